"""What trains the weights.

In reading order:
scheduler               schedules of any number of a param group; a folder
lr_scheduler            those of "lr", named and called as parameter files do
weight_decay_scheduler  those of "weight_decay"
"""

from fulgurite.optim import lr_scheduler as lr_scheduler
from fulgurite.optim import scheduler as scheduler
from fulgurite.optim import weight_decay_scheduler as weight_decay_scheduler
