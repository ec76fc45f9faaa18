"""One traced step: Lightning's own code, run once on fakes, and what is to be known of that.

Programs and plugins import from here: ``capture`` and what it gives (``captured``), scopes, and
traces that are compared. This room imports from every room listed before it but ``compile``.

capture          trace a step as often as it takes; captured: what that gives
trace            one run of the step's code; step_inputs: the fakes that it works on;
                 finished_trace: what is made of it; patch_table: what is changed around it
scope            what the step works on; lightning_scope: of a LightningModule; discovery: of a
                 function; host_reads: whether somebody reads gradients after it; undo: how it is
                 all put back
batch_spec       what the batch must look like; batch_changes: what the step does to its containers;
                 sizes: in which dimensions batches differ; objects: batches that are objects
leaves           tensors inside lists, dicts and objects; trees: what the step did to these;
                 created_state: state that it makes there
outputs          what the program returns, and where it goes
host_calls       what happens on the host after every step; logs: self.log among it;
                 metrics: torchmetrics, where no program can do what they do
side_effects     what the step left on the host, and what becomes of it; trainer_writes: on the
                 Trainer; trainer_state: what it read there
recording        a trace's operations as plain data; comparison: the first difference of two;
                 updates: those of optimizers, which may be left out; retrace: the comparison on
                 every batch; python_state: what a second trace changes, put back; readable: what
                 the host may have changed that the step can read
"""
