"""Lightning callbacks that observe a run, one a file (docs/callbacks.md has them all).

Import the classes from here; ``loops`` and ``trainer`` also use files below. This package imports
``backends`` and nothing above it. A new callback: its file, its import here, its row in the docs.

sparse                base of callbacks whose hooks run on some steps only, and cheap logging
profiler              base of the profilers: a clock that leaves pauses out
  rate                logs samples per second
  duration            logs how long a run will still take
  flops               logs floating-point operations per second
  performance         writes what profilers measured to a file
check_loss            ends a run whose loss is NaN or infinite
samples               counts the samples that training has seen
norms                 logs norms of weights and gradients
param_groups          logs learning rates and other numbers of param groups
inputs                logs mean, deviation and range of batches
selective_grad        keeps the gradients of chosen parameters, and makes others zero
eval_metrics          logs metrics that a model only updates
count_params          prints the table of parameters
flags                 sets low-level flags; the table of those that are known
checkpoint            writes checkpoints every n steps, and finds the newest
  saving              how ``Checkpoint`` tells other callbacks that it writes
  beside              writes the checkpoints of a fit beside its steps
  folders             tries the folders of a fit's checkpoints before the first step
  keep_n              deletes old checkpoints
  save_states         writes smaller checkpoints beside whole ones
  load_states         loads parts of a checkpoint
  checkpoint_states   the names of those parts
runner_hooks          calls the twelve hooks of a runner (``fulgurite.runners``)
stopping              ends a run on Ctrl-C or SIGTERM, with a checkpoint
"""

from __future__ import annotations

from typing import Any

from fulgurite.callbacks.check_loss import CheckLoss as CheckLoss
from fulgurite.callbacks.check_loss import NonFiniteLoss as NonFiniteLoss
from fulgurite.callbacks.checkpoint import Checkpoint as Checkpoint
from fulgurite.callbacks.count_params import CountParams as CountParams
from fulgurite.callbacks.duration import DurationProfiler as DurationProfiler
from fulgurite.callbacks.eval_metrics import ModelEvalMetrics as ModelEvalMetrics
from fulgurite.callbacks.flags import GlobalFlags as GlobalFlags
from fulgurite.callbacks.flags import ScopedTrainFlags as ScopedTrainFlags
from fulgurite.callbacks.flags import ScopedValidateFlags as ScopedValidateFlags
from fulgurite.callbacks.flops import FlopUtilization as FlopUtilization
from fulgurite.callbacks.inputs import LogInputSummaries as LogInputSummaries
from fulgurite.callbacks.keep_n import KeepNCheckpoints as KeepNCheckpoints
from fulgurite.callbacks.load_states import LoadCheckpointStates as LoadCheckpointStates
from fulgurite.callbacks.norms import ComputeNorm as ComputeNorm
from fulgurite.callbacks.param_groups import LogOptimizerParamGroup as LogOptimizerParamGroup
from fulgurite.callbacks.performance import SavePerformanceData as SavePerformanceData
from fulgurite.callbacks.profiler import Profiler as Profiler
from fulgurite.callbacks.rate import RateProfiler as RateProfiler
from fulgurite.callbacks.runner_hooks import RunnerHooks as RunnerHooks
from fulgurite.callbacks.samples import SamplesStreamedInfo as SamplesStreamedInfo
from fulgurite.callbacks.save_states import SaveCheckpointState as SaveCheckpointState
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
