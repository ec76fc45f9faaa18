"""What Lightning and plain functions hold on to.

This room plugs programs into Lightning (a strategy, an accelerator, precision plugins) and into
hand-written loops (traced functions). Rooms above ``backends`` import its classes; it may import
from every room of the backend.

strategy      Lightning's strategy "csx"
parallel      the same in several processes; collective: what they exchange in a traced step;
              processes: what they do together; agreement: whether they have traced the same step;
              consensus: what they agree on at each step; launcher: starts them from a script,
              fork_launcher: from a notebook; meeting: who has come; network: where gloo listens;
              heartbeats: whether they live; sync_batchnorm: batches that are normalized together
loop_services what the loops and callbacks ask of the strategy
loader_sizes  refuses loaders whose batches have more sizes than there may be programs
loader_workers  worker processes of loaders
position      what a checkpoint of ours holds beside Lightning's
order         the order of an epoch's samples, which another process can draw
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
