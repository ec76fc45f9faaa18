"""Data for a hand-written loop.

executor    DataExecutor: a loop over a loader that knows its steps
"""

from __future__ import annotations

from fulgurite.utils.data.executor import DataExecutor as DataExecutor
