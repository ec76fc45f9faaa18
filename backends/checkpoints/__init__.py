"""Checkpoints: nothing half written, nothing damaged taken for good.

For every device; a file is what ``torch.save`` writes of Lightning's dict, no more and no less. Of
processes that hold parts it is a folder, as of Lightning's FSDP.

damage         says what is wrong with a file that is no whole checkpoint
files          writes what appears when it is complete; sweeps what killed processes left
writer         copies a checkpoint, and writes beside the training, one file after the other
chunks         a part of a tensor, in the rectangles of torch.distributed.checkpoint
folders        a checkpoint in parts: what is in it, and what is wrong with one
folder_writer  writes one, each process its parts
folder_reader  reads one, or the parts that a process is to hold
conversion     makes one file of a folder, and back, tensor by tensor
plugin         Lightning's ``CheckpointIO`` of all that
"""
