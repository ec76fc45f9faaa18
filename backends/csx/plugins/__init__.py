"""What Lightning and plain functions hold on to.

This room plugs programs into Lightning (a strategy, an accelerator, precision plugins) and into
hand-written loops (traced functions). Rooms above ``backends`` import its classes; it may import
from every room of the backend but ``distributed``, which goes over it.

strategy             Lightning's strategy "csx"
loop_services        what the loops and callbacks ask of the strategy
loader_sizes         refuses loaders whose batches have more sizes than there may be programs
evaluation_steps     the steps of validation, test and predict
checkpoint_position  what a checkpoint of ours holds beside Lightning's: where the run is
checkpoint_checks    checkpoints that a fit cannot go on from, or that nobody should write
unsupported          what CSX cannot do, as errors
host_optimizers      ``step()`` and ``zero_grad()`` on the host, while programs keep the gradients
accelerator          the accelerator that goes with the strategy
precision_plugins    what runs in which type
loss_scale           the scale of the loss, as state of the program
function_programs    a plain function as a program, and which of its arguments are data
"""
