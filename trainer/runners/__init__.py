"""Runners: scripts of model_fn, train_data_fn and eval_data_fn, with parameter files and flags.

    from fulgurite.runners import run
    run(model_fn, train_data_fn, eval_data_fn)

Scripts import what stands below; nothing of Fulgurite imports this package. Its files import
``config``, ``callbacks`` and ``cli``.

parameters  the command line of such a script, its parameter file, and the plan that they make
models      what a model_fn gives, as a LightningModule
runner      what runs: on CPU or GPU, on CSX, or only compiles there; run, which begins it
"""

from __future__ import annotations

from fulgurite.runners.models import PyTorchBaseModel as PyTorchBaseModel
from fulgurite.runners.runner import PyTorchBaseRunner as PyTorchBaseRunner
from fulgurite.runners.runner import PyTorchCSCompiler as PyTorchCSCompiler
from fulgurite.runners.runner import PyTorchCSRunner as PyTorchCSRunner
from fulgurite.runners.runner import PyTorchRunner as PyTorchRunner
from fulgurite.runners.runner import run as run
