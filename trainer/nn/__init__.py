"""Losses that become one kernel, and nonlinearities by name.

    >>> import torch
    >>> from fulgurite import nn
    >>> loss = nn.CrossEntropyLoss(label_smoothing=0.1, use_autogen=True)
    >>> loss(torch.zeros(2, 4), torch.tensor([0, 3]))
    tensor(1.3863)

Users import from here; these files import ``backends`` and ``config`` alone.

losses          torch.nn's, with ``use_autogen``
autogen         autogen_loss: what gives a class of losses that argument
nonlinearities  torch.nn's, by the names of parameter files
"""

from fulgurite.nn.autogen import autogen_loss as autogen_loss
from fulgurite.nn.losses import BCELoss as BCELoss
from fulgurite.nn.losses import BCEWithLogitsLoss as BCEWithLogitsLoss
from fulgurite.nn.losses import CosineEmbeddingLoss as CosineEmbeddingLoss
from fulgurite.nn.losses import CrossEntropyLoss as CrossEntropyLoss
from fulgurite.nn.losses import GaussianNLLLoss as GaussianNLLLoss
from fulgurite.nn.losses import HingeEmbeddingLoss as HingeEmbeddingLoss
from fulgurite.nn.losses import HuberLoss as HuberLoss
from fulgurite.nn.losses import KLDivLoss as KLDivLoss
from fulgurite.nn.losses import L1Loss as L1Loss
from fulgurite.nn.losses import MarginRankingLoss as MarginRankingLoss
from fulgurite.nn.losses import MSELoss as MSELoss
from fulgurite.nn.losses import MultiLabelSoftMarginLoss as MultiLabelSoftMarginLoss
from fulgurite.nn.losses import MultiMarginLoss as MultiMarginLoss
from fulgurite.nn.losses import NLLLoss as NLLLoss
from fulgurite.nn.losses import PoissonNLLLoss as PoissonNLLLoss
from fulgurite.nn.losses import SmoothL1Loss as SmoothL1Loss
from fulgurite.nn.losses import TripletMarginLoss as TripletMarginLoss
from fulgurite.nn.losses import TripletMarginWithDistanceLoss as TripletMarginWithDistanceLoss
from fulgurite.nn.nonlinearities import nonlinearity as nonlinearity
