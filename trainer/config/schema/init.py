"""``trainer.init`` of a checked file, as one typed object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fulgurite.config.schema.schedulers import SchedulerCall
from fulgurite.config.schema.sections import AutoRestart, Logging, Loop
from fulgurite.config.types.classes import Named
from fulgurite.config.types.report import Call
from fulgurite.mixed_precision import MixedPrecision

if TYPE_CHECKING:
    from fulgurite.callbacks import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Init:
    """What ``init`` says, key by key; None or empty where it says nothing.

    Args:
        trainer: the call of the Trainer with those arguments that are Lightning's own.
        backend: ``backend_type`` and the arguments of that backend.
        callbacks: calls; and a ``Named`` for each default that is taken away. ``loggers`` too.
    """

    trainer: Call
    model: Call
    device: str | None = None
    backend: dict[str, Any] | None = None
    model_dir: str | None = None
    optimizer: Call | None = None
    schedulers: Sequence[SchedulerCall] = ()
    precision: MixedPrecision | str | int | None = None
    loop: Loop | None = None
    checkpoint: Checkpoint | None = None
    logging: Logging | None = None
    callbacks: Sequence[Call | Named] = ()
    loggers: Sequence[Call | Named] = ()
    seed: int | None = None
    sparsity: Any = None
    autorestart: AutoRestart | None = None

    @property
    def wants_checkpoints(self) -> bool:
        """Whether Lightning's ``enable_checkpointing`` leaves checkpoints on."""
        return self.trainer.arguments.get("enable_checkpointing") is not False

    @property
    def own_callbacks(self) -> list[Call]:
        """The callbacks that are to be made, without the defaults that are taken away."""
        return [one for one in self.callbacks if isinstance(one, Call)]
