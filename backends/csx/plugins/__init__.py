"""What Lightning and plain functions hold on to.

strategy      Lightning's strategy "csx"
accelerator   the accelerator that goes with it
precision     what runs in which type
loss_scale    the scale of the loss, as state of the program
function      a plain function as a program
"""
