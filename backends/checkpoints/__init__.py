"""Checkpoint files: nothing half written, nothing damaged taken for good.

For every device; a file is what ``torch.save`` writes of Lightning's dict, no more and no less.

damage     says what is wrong with a file that is no whole checkpoint
files      writes a file that appears when it is complete; sweeps what killed processes left
writer     copies a checkpoint, and writes beside the training, one file after the other
plugin     Lightning's ``CheckpointIO`` of all that
"""
