"""What runs a graph while it is compiled beside the training: its operations, one by one.

Some of these runs are timed: how much of each is in products of matrices. Compiled code calls the
same library for those, so that only the rest can become faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fulgurite.backends.csx.compile.background.queue import Job, queue
from fulgurite.backends.csx.compile.fabric import Call
from fulgurite.backends.csx.compile.threads import Threads
from fulgurite.backends.csx.graph.products import is_product

_TIMED = 5  # runs, of which the median counts: what else the machine does may fall on either side


class Meanwhile:
    """A graph that runs operation by operation until its compilation has ended.

    Args:
        job: compiles it.
        reference: its operations one by one.
        settle: called when the job has ended; returns what to call from then on.
        threads: how many compute it; while that is found out, nothing else is timed.
    """

    def __init__(
        self, job: Job, reference: Call, settle: Callable[[Job], Call], threads: Threads
    ) -> None:
        self.job, self._reference, self._settle, self._threads = job, reference, settle, threads
        self._shares: list[float] | None = None  # in products; None before the first run

    @property
    def is_over(self) -> bool:
        """Whether something else runs the graph from now on."""
        return self.job.ended

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run it once."""
        queue.poll()
        if self.is_over:
            return self._settle(self.job)(inputs)
        if self.job.fixed is not None or not self._threads.is_chosen:
            return self._reference(inputs)
        if self._shares is None:  # a first run takes longer: its memory is new
            self._shares = []
            return self._reference(inputs)
        share, outputs = _in_products(self._reference, inputs)
        self._shares.append(share)
        if len(self._shares) == _TIMED:
            self.job.fixed = statistics.median(self._shares)
        return outputs


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times the operations that multiply matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        if not is_product(func):
            return func(*args, **kwargs)
        began = perf_counter()
        try:
            return func(*args, **kwargs)
        finally:
            self.seconds += perf_counter() - began


def _in_products(run: Call, inputs: list[Tensor]) -> tuple[float, Sequence[Tensor]]:
    """Run a graph once; the share of that time that its products took, and what it gave."""
    began = perf_counter()
    with _Products() as products:
        outputs = run(inputs)
    return products.seconds / (perf_counter() - began), outputs
