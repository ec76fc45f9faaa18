"""What a strategy does together with other processes: nothing, where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from fulgurite.backends.checkpoints.damage import CheckpointError
from fulgurite.backends.csx.capture import Captured
from fulgurite.backends.csx.plugins.order import ORDER
from fulgurite.backends.csx.state import Gradients

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

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Tell other processes at once if the block, which is a run, ends by an error."""
        return contextlib.nullcontext()

    def requeue_if_asked(self) -> None:
        """Between two steps: save the job of all processes, if a cluster asked for that."""

    def ask_for_audit(self) -> bool:
        """Have all processes audit the training's step after the next; False: it is up to each."""
        return False

    def all_stop(self) -> bool:
        """Whether a signal that ends the run ends it now, in all processes."""
        return True

    def compare(self, stage: str, captured: Mapping[str, Captured]) -> None:
        """Verify that all processes have traced the same step."""

    def agree_on_batch(self, stage: str, loader: int, has_one: bool) -> None:
        """See that a stream has one more batch in all processes, or in none."""

    def with_others(self, position: dict[str, Any]) -> dict[str, Any]:
        """Where the run is, in every process, for a checkpoint."""
        return position

    def own(self, path: object, checkpoint: Mapping[str, Any], position: Any) -> Any:
        """Where this process was, by what ``with_others`` put into a checkpoint."""
        return position_of_rank(path, checkpoint, position, rank=0, count=1)


def position_of_rank(
    path: object, checkpoint: Mapping[str, Any], position: Any, rank: int, count: int
) -> Any:
    """Where a process was, or is to go on where there were more or less of them.

    Raises:
        CheckpointError: there were more or less, in the middle of an epoch whose data cannot be
            dealt out anew.
    """
    if position is None:
        return None
    ranks = position.get(RANKS, [position])
    if len(ranks) == count:
        return ranks[rank]
    if _is_within_epoch(checkpoint) and any(ORDER not in one for one in ranks):
        what = (
            f"was written by {len(ranks)} process{'es' * (len(ranks) > 1)} in the middle of an"
            f" epoch, and {count} would go on with another part of its data each: of samplers of"
            " one's own, streams, several loaders and limit_train_batches it is not known which"
        )
        remedy = f"Go on with {len(ranks)}; or from a checkpoint that an epoch's end wrote."
        raise CheckpointError(str(path), what, remedy)
    return _of_others(ranks, rank)


def _of_others(ranks: Sequence[dict[str, Any]], rank: int) -> dict[str, Any]:
    """Where a process goes on that more or less of them began.

    The order of an epoch's data is rank 0's; gradients of a window that is not over are the mean
    of all, and so is their contribution. What each has logged and counted in the epoch is left out.
    """
    first, own = ranks[0], ranks[rank % len(ranks)]
    found = own | {name: first[name] for name in ("iterator", "first_batch") if name in first}
    if ORDER in first:
        found[ORDER] = {**first[ORDER], "dealt": True}
    if all("progress" in one for one in ranks):
        windows = [one["progress"]["gradients"] for one in ranks]
        gradients = {
            name: sum(one[name] for one in windows if name in one) / len(ranks)
            for name in {name for one in windows for name in one}
        }
        logged: dict[str, Any] = {**own["progress"]["logged"], "results": {}, "metrics": {}}
        found["progress"] = {**own["progress"], "gradients": gradients, "logged": logged}
    return found


def _is_within_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was written in the middle of an epoch."""
    loops: Any = checkpoint.get("loops") or {}
    progress = loops.get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    ready = progress.get("current", {}).get("ready", 0)
    return bool(ready) and not progress.get("is_last_batch", False)
