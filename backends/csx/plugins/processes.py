"""What a strategy does together with other processes: nothing, where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from fulgurite.backends.checkpoints.damage import CheckpointError
from fulgurite.backends.csx.capture.captured import Captured
from fulgurite.backends.csx.state.gradients import Gradients

RANKS = "ranks"
"""The key of what each process has, in what a checkpoint holds beside Lightning's."""


class OneProcess:
    """A strategy's dealings with other processes, where there are none."""

    def reducing(self, gradients: Gradients) -> contextlib.AbstractContextManager[None]:
        """What happens to the gradients of a backward pass that is traced inside of it."""
        return contextlib.nullcontext()

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """What happens around a step that is traced, where it does not only accumulate."""
        return contextlib.nullcontext()

    def compare(self, stage: str, captured: Mapping[str, Captured]) -> None:
        """Verify that all processes have traced the same step."""

    def with_others(self, position: dict[str, Any]) -> dict[str, Any]:
        """Where the run is, in every process, for a checkpoint."""
        return position

    def own(self, path: object, checkpoint: Mapping[str, Any], position: Any) -> Any:
        """Where this process was, by what ``with_others`` put into a checkpoint."""
        return position_of_rank(path, checkpoint, position, rank=0, count=1)


def position_of_rank(
    path: object, checkpoint: Mapping[str, Any], position: Any, rank: int, count: int
) -> Any:
    """Where a process was; nothing where there were more or less, and the epoch was over.

    Raises:
        CheckpointError: there were more or less, in the middle of an epoch.
    """
    if position is None:
        return None
    ranks = position.get(RANKS, [position])
    if len(ranks) == count:
        return ranks[rank]
    if _is_within_epoch(checkpoint):
        what = (
            f"was written by {len(ranks)} process{'es' * (len(ranks) > 1)} in the middle of an"
            f" epoch, and {count} would go on with another part of its data each"
        )
        remedy = f"Go on with {len(ranks)}; or from a checkpoint that an epoch's end wrote."
        raise CheckpointError(str(path), what, remedy)
    return position if rank == 0 else None


def _is_within_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was written in the middle of an epoch."""
    loops: Any = checkpoint.get("loops") or {}
    progress = loops.get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    ready = progress.get("current", {}).get("ready", 0)
    return bool(ready) and not progress.get("is_last_batch", False)
