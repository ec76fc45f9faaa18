"""The static-graph backend, in reading order.

config        its options
strategy      Lightning's strategy "csx": a step function per stage, checkpoints
accelerator   what goes with it; precision: what runs in which type
step          a stage's step: which program fits the batch, run it, hand out what it returns
capture       run Lightning's own code once on fakes, in place
  state         the tensors that modules and optimizers hold; birth: optimizer state before step 0
  inputs        the batch; numbers: the numbers of param groups
  tracing       what the user's code sees; constants, effects, lines: values, host calls, user lines
  errors        TraceError and its kinds
graph         operations between capture and fabric; passes: what happens to them
program       what was built, as plain data
fabric        runs it on the host's CPU; denormals
report        what was built, on the screen and as text
rng           random states
"""
