"""One traced step: Lightning's own code, run once on fakes.

trace            run it, and keep the operations; captured: what that gives
patch_table      what is changed around it
scope            what the step works on, and how a failed trace is undone; discovery: what a
                 function works on; host_reads: whether somebody reads gradients after it
batch_spec       what the batch must look like; batch_changes: what the step does to its containers
leaves           tensors inside lists, dicts and objects; trees: what the step did to these;
                 created_state: state that it makes there
outputs          what the program returns, and where it goes
host_calls       what happens on the host after every step; logs: self.log among it
side_effects     what the step left on the host, and what becomes of it; trainer_writes: on the
                 Trainer; trainer_state: what it read there
recording        a trace's operations as plain data, and the first difference of two; updates: those
                 of optimizers, which may be left out; retrace: the comparison on every batch;
                 python_state: what a second trace changes, put back
"""
