"""Optimizers in tensor operations: eager and within a program, with the same numbers.

In reading order:
optimizer   the base of all: state before the first step
adam        AdamBase, for optimizers like Adam; Adam and AdamW on it
lamb        Lamb, AdamW with a trust ratio
lion        Lion
adafactor   Adafactor
"""

from fulgurite.optim.adafactor import Adafactor as Adafactor
from fulgurite.optim.adam import Adam as Adam
from fulgurite.optim.adam import AdamBase as AdamBase
from fulgurite.optim.adam import AdamW as AdamW
from fulgurite.optim.lamb import Lamb as Lamb
from fulgurite.optim.lion import Lion as Lion
from fulgurite.optim.optimizer import Optimizer as Optimizer
