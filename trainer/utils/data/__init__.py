"""Batches: for a hand-written loop, and of few sizes.

executor    DataExecutor: a loop over a loader that knows its steps
buckets     PadToBuckets: a collate function for samples of many lengths
"""

from __future__ import annotations

from fulgurite.utils.data.buckets import PadToBuckets as PadToBuckets
from fulgurite.utils.data.executor import DataExecutor as DataExecutor
