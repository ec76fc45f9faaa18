"""Lightning callbacks that observe a run (docs/callbacks.md has them all).

Import the classes from here; ``loops`` and ``trainer`` also use files below. This package imports
``backends`` and nothing above it. A new callback: its file, its import here, its row in the docs.

sparse             what callbacks build upon: hooks on some steps only, cheap logging, undoing
saving             around a checkpoint that is written: who is told, in which thread, which ones go
checkpoint         writes checkpoints every n steps, finds the newest, tries the folders first
checkpoint_states  loads some parts of a checkpoint, or saves smaller ones beside whole ones
profilers          samples and operations per second, time that is left, and the file of them
check_loss         ends a run whose loss is NaN or infinite
monitors           logs norms, numbers of param groups, summaries of batches, a model's own metrics
samples            counts the samples that training has seen
selective_grad     keeps the gradients of chosen parameters, and makes others zero
count_params       prints the table of parameters
low_level_flags    sets low-level flags; the table of those that are known
runner_hooks       calls the twelve hooks of a runner (``fulgurite.runners``)
stopping           ends a run on Ctrl-C or SIGTERM, with a checkpoint
"""

from __future__ import annotations

from typing import Any

from fulgurite.callbacks.check_loss import CheckLoss as CheckLoss
from fulgurite.callbacks.check_loss import NonFiniteLoss as NonFiniteLoss
from fulgurite.callbacks.checkpoint import Checkpoint as Checkpoint
from fulgurite.callbacks.checkpoint_states import LoadCheckpointStates as LoadCheckpointStates
from fulgurite.callbacks.checkpoint_states import SaveCheckpointState as SaveCheckpointState
from fulgurite.callbacks.count_params import CountParams as CountParams
from fulgurite.callbacks.low_level_flags import GlobalFlags as GlobalFlags
from fulgurite.callbacks.low_level_flags import ScopedTrainFlags as ScopedTrainFlags
from fulgurite.callbacks.low_level_flags import ScopedValidateFlags as ScopedValidateFlags
from fulgurite.callbacks.monitors import ComputeNorm as ComputeNorm
from fulgurite.callbacks.monitors import LogInputSummaries as LogInputSummaries
from fulgurite.callbacks.monitors import LogOptimizerParamGroup as LogOptimizerParamGroup
from fulgurite.callbacks.monitors import ModelEvalMetrics as ModelEvalMetrics
from fulgurite.callbacks.profilers import DurationProfiler as DurationProfiler
from fulgurite.callbacks.profilers import FlopUtilization as FlopUtilization
from fulgurite.callbacks.profilers import Profiler as Profiler
from fulgurite.callbacks.profilers import RateProfiler as RateProfiler
from fulgurite.callbacks.profilers import SavePerformanceData as SavePerformanceData
from fulgurite.callbacks.runner_hooks import RunnerHooks as RunnerHooks
from fulgurite.callbacks.samples import SamplesStreamedInfo as SamplesStreamedInfo
from fulgurite.callbacks.saving import KeepNCheckpoints as KeepNCheckpoints
from fulgurite.callbacks.selective_grad import SelectiveGrad as SelectiveGrad
from fulgurite.callbacks.stopping import StopOnSignal as StopOnSignal

DEFAULT_CALLBACKS: dict[str, dict[str, Any]] = {
    "CheckLoss": {},
    "LogOptimizerParamGroup": {"keys": "lr"},
    "ModelEvalMetrics": {},
    "RateProfiler": {},
    "DurationProfiler": {},
    "SavePerformanceData": {},
    "SamplesStreamedInfo": {},
}
"""Name and arguments of those that a parameter file has without naming them."""
