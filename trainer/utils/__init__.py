"""Around a hand-written loop.

data    DataExecutor: batches, and which steps closures run on
"""
