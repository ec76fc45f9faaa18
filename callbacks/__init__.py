"""Observers of a run, one a file.

rate          steps per second
runner_hooks  the twelve hooks of a runner
stopping      Ctrl-C and SIGTERM: a checkpoint after the step in flight
"""

from __future__ import annotations

from fulgurite.callbacks.rate import StepRate as StepRate
from fulgurite.callbacks.runner_hooks import RunnerHooks as RunnerHooks
from fulgurite.callbacks.stopping import StopOnSignal as StopOnSignal
