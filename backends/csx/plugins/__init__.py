"""What Lightning and plain functions hold on to.

This room plugs programs into Lightning (a strategy, an accelerator, precision plugins) and into
hand-written loops (traced functions). Rooms above ``backends`` import its classes; it may import
from every room of the backend.

strategy      Lightning's strategy "csx"
parallel      the same in several processes; processes: what they do together; agreement:
              whether they have traced the same step; heartbeats: whether they live; launcher:
              starts them from a script
position      what a checkpoint of ours holds beside Lightning's
restored      what a checkpoint has that a fit cannot go on from
torn          no checkpoint of a state that a failed step has half written
evaluation    the steps of validation, test and predict
refusals      what CSX cannot do, as errors
zero_grad     ``zero_grad()`` on the host reaches the gradients that programs keep
accelerator   the accelerator that goes with the strategy
precision     what runs in which type
loss_scale    the scale of the loss, as state of the program
function      a plain function as a program
arguments     which arguments of a function are data, which are static
"""
