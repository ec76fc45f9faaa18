"""The static-graph backend, in reading order.

config        its options
strategy      Lightning's strategy "csx": a step function per stage, checkpoints
accelerator   what goes with it; precision: what runs in which type; loss_scale: of 16-bit floats;
              skipping: steps that do not count
function      a plain function as a program: hand-written loops; reach: what it works on
step          a stage's step: which program fits the batch, run it, hand out what it returns;
              conditions, trainer_state: what it depends on; ready: an entry point, bound to its
              tensors; retrace: trace it again on every batch, compare: is it still the same
              program?; audit: the same now and then; replay: with the frozen values of the first
              time; python_state: and undone; updates: without those of optimizers; offline: runs
              that only build
capture       run Lightning's own code once on fakes, in place
  environment   what is changed around it
  world         what a step works on, and how a failed trace is undone
  state         the tensors that modules and optimizers hold; birth: optimizer state before step 0;
                first_update: state that only the first gradient can make
  inputs        the batch; watched: its constants, and what is only passed on; batch_changes: what
                the step does to its dicts and lists
  gradients     p.grad in a trace; carried: for the next step's optimizer; kept_gradients: where
                they are between steps; host_reads: does anybody look; dropped_gradient: if not
  numbers       the numbers of param groups; scheduled: those that the program computes;
                traced_numbers: what each is in a trace; scalars:
                torch's functions on them; mathematics: Python's; rounding: where eager kernels
                round narrow floats
  stand_ins     fakes behind the user's objects; moved: where p.data = ... puts them; formulas:
                torch's code in the form that traces
  tracing       what the user's code sees; misuse: which calls are errors, and the remedies;
                scalar_arguments: tensors where torch takes numbers; names: of tensors in messages;
                narrow: one 16-bit type a run; twins: static forms of torch functions; indices: of
                indexing; leaks: tensors kept beyond the trace; holders: by whom; constants: tensors
                that keep their value; default_dtype: the one they were made with; frozen: Python
                values that stay; impure: clocks and random numbers; attributes: what modules hold;
                changes: which line put it there; lists: outputs that the step collects; patches:
                what a trace changes in others' code, and puts back
  trainer_writes  what the step sets on the Trainer
  effects       what happens on the host after every step; logs: self.log among it; leftovers: what
                the step left there; outputs: where results go
  leaves        tensors in lists, dicts and objects; trees: what a step did to these; born: state
                that it makes there from data
  lines         which line of the user's; errors: TraceError and its kinds
graph         operations between capture and fabric; passes: what happens to them
  cbfloat16     a 16-bit type that torch does not have: its facts, rounding to it
program       what was built, as plain data
fabric        runs it on the host's CPU; denormals
  selfcheck     the first step, both compiled and not; sensitivity: how far rounding moves a result
  compiler      from graph to machine code; wrapper: the compiler's Python made static
  cache         compiled programs in a folder; fingerprint: the key of each
report        what was built, on the screen and as text; waiting: what is being built
rng           random states
"""
