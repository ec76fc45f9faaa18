"""Optimizers in tensor operations, and schedulers whose numbers a program computes.

Users import classes from here, and ``config`` too; these files import ``backends`` alone.

optimizer               the base of all optimizers: state before the first step
adam                    AdamBase, for optimizers like Adam; Adam, AdamW and Lamb on it
lion                    Lion
adafactor               Adafactor
scheduler               schedules of any number of a param group; a folder
lr_scheduler            those of "lr", named and called as parameter files do
weight_decay_scheduler  those of "weight_decay"
"""

from fulgurite.optim import lr_scheduler as lr_scheduler
from fulgurite.optim import scheduler as scheduler
from fulgurite.optim import weight_decay_scheduler as weight_decay_scheduler
from fulgurite.optim.adafactor import Adafactor as Adafactor
from fulgurite.optim.adam import Adam as Adam
from fulgurite.optim.adam import AdamBase as AdamBase
from fulgurite.optim.adam import AdamW as AdamW
from fulgurite.optim.adam import Lamb as Lamb
from fulgurite.optim.lion import Lion as Lion
from fulgurite.optim.optimizer import Optimizer as Optimizer
