"""The sections of ``trainer.init`` that are plain settings, as typed classes.

Steps are optimizer steps everywhere, whatever the number of micro-batches. Nothing is imported here
for types alone: jsonargparse would import it when it looks for those of the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

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
