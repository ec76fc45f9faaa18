"""Callbacks that parameter files name, and what they share, one a file (docs/callbacks.md).

sparse                what costs a step nothing: hooks on log steps, cheap logging
profiler              what profilers share: a clock without pauses
  rate                samples per second
  duration            time that remains
  flops               operations per second
  performance         what they found, as a file
check_loss            a run ends whose loss is no number
samples               how many samples came
norms                 of weights and gradients
param_groups          learning rates and their kin
inputs                mean, spread and range of batches
selective_grad        which gradients reach the optimizer
eval_metrics          metrics that nobody logs
count_params          the table of parameters
flags                 low-level flags: which are known
checkpoint            when checkpoints are written, and which is the newest; saving: who is told
  keep_n              old ones go
  save_states         smaller ones beside; load_states: parts of one; checkpoint_states: their names
runner_hooks          the twelve hooks of a runner
stopping              Ctrl-C and SIGTERM: a checkpoint after the step in flight
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
