"""The memory of programs, measured while they run, beside what ``report.memory`` predicts.

Measured is what torch's allocator of the CPU gives while a program runs once (the profiler's
events), with what kernels take for themselves; the tensors that it is given; and what a compiled
program has made before. Memory that is not torch's is not in it: Python's, the BLAS library's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fulgurite.backends.csx.compile.checking.selfcheck import SelfCheck
from fulgurite.backends.csx.compile.fabric import Loaded
from fulgurite.backends.csx.compile.host.host_fabric import HostFabric
from fulgurite.backends.csx.costs.memory import Memory, memory

_RUN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One entry point: the prediction, and the bytes that were measured.

    Args:
        loaded: what ran.
        predicted: the prediction.
        resident_bytes: of its inputs.
        kept_bytes: of what was made before it ran.
        run_bytes: the most that was allocated, and not freed, while it ran.
    """

    loaded: Loaded
    predicted: Memory
    resident_bytes: int
    kept_bytes: int
    run_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return self.resident_bytes + self.kept_bytes + self.run_bytes

    @property
    def ratio(self) -> float:
        """The predicted peak by the measured one."""
        return self.predicted.peak_bytes / self.peak_bytes

    @property
    def ratio_of_intermediates(self) -> float:
        """The same without what is resident."""
        predicted = self.predicted.peak_bytes - self.predicted.resident_bytes
        return predicted / (self.kept_bytes + self.run_bytes)


def measured(fit: Callable[[], Any]) -> list[Measured]:
    """Run a fit of at least three steps, and measure each of its entry points once.

    A compiled program is measured when its check is over: some eight steps.
    """
    runs, done, found = Counter[int](), set[int](), list[Measured]()
    run = HostFabric.run

    def watched(fabric: HostFabric, loaded: Loaded, inputs: list[Tensor]) -> Any:
        runs[id(loaded)] += 1
        if runs[id(loaded)] < _RUN or id(loaded) in done or isinstance(loaded.call, SelfCheck):
            return run(fabric, loaded, inputs)
        done.add(id(loaded))
        resident = {_memory(one): min(_size(one), one.nbytes) for one in inputs}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            outputs = run(fabric, loaded, inputs)
        assert loaded.runs is not None
        found.append(
            Measured(
                loaded=loaded,
                predicted=memory(loaded.runs, loaded.kernels()),
                resident_bytes=sum(resident.values()),
                kept_bytes=_kept(loaded) if loaded.compiled else 0,
                run_bytes=_peak(profiled),
            )
        )
        return outputs

    with mock.patch.object(HostFabric, "run", watched):
        fit()
    return found


def _peak(profiled: profile) -> int:
    """The most that the allocations and frees of a profile come to."""
    results: Any = profiled.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


def _kept(loaded: Loaded) -> int:
    """Of the tensors that a compiled program made when it was loaded."""
    call: Any = loaded.call
    tensors = [value for value in call.__globals__.values() if isinstance(value, Tensor)]
    return sum({_memory(one): _size(one) for one in tensors}.values())


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
