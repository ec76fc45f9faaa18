"""``trainer.init`` of a checked file: its sections that are plain settings, and all of it.

Steps are optimizer steps everywhere, whatever the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fulgurite.config.schema.class_shapes import SchedulerCall
from fulgurite.config.types.classes import Named
from fulgurite.config.types.report import Call
from fulgurite.mixed_precision import MixedPrecision

if TYPE_CHECKING:
    from fulgurite.callbacks import Checkpoint

LOG_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")


def _check_positive(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be a positive integer; got {value}.")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """``loop``: how long to train, and how often to validate.

    Args:
        max_steps: train until this many steps were done in all, those of the checkpoint that a run
            goes on from included.
        num_steps: train so many steps, beyond those of a checkpoint named by ``ckpt_path``.
        num_epochs: train so many epochs; 1 where nothing says how long.
        steps_per_epoch: steps of an epoch; None is the loader's length.
        eval_frequency: steps between validations, or as a fraction of the training: 0.5 validates
            half-way and at the end. 0 or null: never.
        eval_steps: batches of a validation; None is the loader's length.
        grad_accum_steps: micro-batches of a step.
    """

    max_steps: int | None = None
    num_steps: int | None = None
    num_epochs: int | None = None
    steps_per_epoch: int | None = None
    eval_frequency: int | float | None = 1.0
    eval_steps: int | None = None
    grad_accum_steps: int = 1

    def __post_init__(self) -> None:
        _check_positive(self, "max_steps", "num_steps", "num_epochs", "steps_per_epoch")
        _check_positive(self, "eval_steps", "grad_accum_steps")
        given = [name for name in ("num_steps", "num_epochs") if getattr(self, name) is not None]
        if len(given) == 2:
            raise ValueError(
                f"num_steps={self.num_steps} and num_epochs={self.num_epochs} exclude each other:"
                " give one. (max_steps goes with either.)"
            )
        often = self.eval_frequency
        if often and (often < 0 or (isinstance(often, float) and often > 1)):
            raise ValueError(
                "eval_frequency must be a number of steps (a positive integer), a fraction of the"
                f" training (a float up to 1.0), or null for none; got {often}."
            )


@dataclass(frozen=True, kw_only=True)
class Logging:
    """``logging``: what is said, and how often.

    Args:
        log_steps: steps between two entries of the loggers; Lightning's ``log_every_n_steps``.
        log_level: of Python's logging, for Fulgurite and Lightning: ``INFO``, ``DEBUG`` and so on.
    """

    log_steps: int = 50
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        _check_positive(self, "log_steps")
        if self.log_level.upper() not in LOG_LEVELS:
            raise ValueError(f"log_level must be one of {LOG_LEVELS}; got {self.log_level!r}.")


@dataclass(frozen=True, kw_only=True)
class AutoRestart:
    """``autorestart``: begin again from the last checkpoint after a crash, in a new process.

    Args:
        max_num_restarts: restarts in a row without a new checkpoint; null or 0 is no restart.
        min_num_csx: systems to go on with at least; there is one.
        hang_timeout: seconds without a finished batch after which a run counts as hung, the
            building of programs left out; null: never.
    """

    max_num_restarts: int | None = None
    min_num_csx: int = 1
    hang_timeout: int | float | None = 1800

    def __post_init__(self) -> None:
        if self.max_num_restarts is not None and self.max_num_restarts < 0:
            raise ValueError(
                f"max_num_restarts must be 0 (no restart) or more; got {self.max_num_restarts}."
            )
        _check_positive(self, "min_num_csx")
        if self.hang_timeout is not None and not 0 < self.hang_timeout < float("inf"):
            raise ValueError(
                f"hang_timeout must be seconds, more than 0, or null for none; got"
                f" {self.hang_timeout}."
            )


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
