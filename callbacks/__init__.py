"""Observers of a run, one a file.

rate    steps per second
"""

from __future__ import annotations

from fulgurite.callbacks.rate import StepRate as StepRate
