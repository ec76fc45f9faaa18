"""Low-level flags that parameter files set: which are known, and which mean something here.

A key is a dotted path, such as ``csx.debug.retrace_every_iteration``. ``KNOWN`` is the one table of
them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info

from fulgurite.backends.backend import did_you_mean
from fulgurite.backends.csx import StaticGraph
from fulgurite.callbacks.sparse import is_static

_MEMORY = "no servers share the work: the process takes what it needs"
_INITIAL = "weights are initialized when the module is made"
_NOT_HERE = "it concerns the compiler of other hardware"
_LINK = "data stays in this process"

RETRACE = "csx.debug.retrace_every_iteration"

KNOWN: dict[str, str | None] = {
    RETRACE: None,
    "csx.cluster.auto_taint": "there is no cluster here to reserve",
    "csx.debug.act_memory_gi": _MEMORY,
    "csx.debug.check_constraints": _NOT_HERE,
    "csx.debug.chf_memory_gi": _MEMORY,
    "csx.debug.cmd_memory_gi": _MEMORY,
    "csx.debug.compile_crd_memory_gi": _MEMORY,
    "csx.debug.debug_args": _NOT_HERE,
    "csx.debug.drop_data": "outputs never leave the process, so nothing is saved by dropping them",
    "csx.debug.execute_crd_memory_gi": _MEMORY,
    "csx.debug.fabric_type_blacklist": "the fabric is an argument of the backend: fabric",
    "csx.debug.implicit_cast_cb16_to_fp32": "cbfloat16 values are float32 tensors here already",
    "csx.debug.ini": _NOT_HERE,
    "csx.debug.lazy_initialization": _INITIAL,
    "csx.debug.log_initialization": _INITIAL,
    "csx.debug.op_definition_module": _NOT_HERE,
    "csx.debug.optimize_initialization": _INITIAL,
    "csx.debug.save_gpv": _NOT_HERE,
    "csx.debug.skip_connectivity_check": "there is no cluster here to connect to",
    "csx.debug.skip_weight_init": _INITIAL,
    "csx.debug.wgt_memory_gi": _MEMORY,
    "csx.debug.wrk_memory_gi": _MEMORY,
    "csx.performance.compress_weights": _LINK,
    "csx.performance.max_transfer_bytes": _LINK,
    "csx.performance.micro_batch_size": (
        "a program takes its whole batch at once; batches that do not fit are accumulated with"
        " accumulate_grad_batches (loop.grad_accum_steps)"
    ),
    "csx.performance.transfer_processes": _LINK,
    "csx.performance.use_speculative_optimizers": _NOT_HERE,
    "csx.precision.optimization_level": "precision is what trainer.precision says, and no less",
    "csx.storage.s3.profile": "checkpoints are files",
}
"""Every flag; why it does nothing here, or None where it acts."""

PREFIXES = ("csx.debug.ini.", "csx.debug.debug_args.")
"""Flags whose parts are not known one by one; they mean what the whole means."""


class _Flags(pl.Callback):
    """Flags by their dotted names.

    Raises:
        ValueError: a flag is not known, or its value is none that it takes.
    """

    def __init__(self, **flags: Any) -> None:
        self.flags = dict(flags)
        self._noted = False
        for flag, value in self.flags.items():
            _check(type(self).__name__, flag, value)

    def announce(self) -> None:
        """Say once which flags do nothing."""
        if self._noted:
            return
        self._noted = True
        for flag in self.flags:
            why = KNOWN[_whole(flag)]
            if why is not None:
                rank_zero_info(f"{type(self).__name__}: {flag} does nothing here: {why}.")

    def apply(self, trainer: pl.Trainer) -> None:
        """Let the flags act: step functions made from now on have them."""
        if RETRACE in self.flags and is_static(trainer):
            strategy = trainer.strategy
            assert isinstance(strategy, StaticGraph)
            # the process's backend is shared by other Trainers: this one's strategy gets a copy
            strategy.backend = dataclasses.replace(
                strategy.backend, retrace_every_iteration=self.flags[RETRACE]
            )


class GlobalFlags(_Flags):
    """Sets low-level flags for every run of the Trainer (``KNOWN`` lists them).

    Args:
        flags: values by dotted name, ``**{"csx.debug.retrace_every_iteration": True}``. A known one
            that has no meaning here does nothing, and says so once.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set the flags before the first program is made."""
        self.announce()
        self.apply(trainer)


class _ScopedFlags(_Flags):
    """Flags that hold for the programs of one stage."""

    def __init__(self, **flags: Any) -> None:
        super().__init__(**flags)
        self._backend: Any = None

    def begin(self, trainer: pl.Trainer) -> None:
        """Set the flags, and remember those that were set before."""
        self.announce()
        if self._backend is None and is_static(trainer):
            self._backend = trainer.strategy.backend  # type: ignore[attr-defined]
            self.apply(trainer)

    def end(self, trainer: pl.Trainer) -> None:
        """Set the flags again that were set before."""
        if self._backend is not None:
            trainer.strategy.backend = self._backend  # type: ignore[attr-defined]
            self._backend = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Reset the flags."""
        self.end(trainer)


class ScopedTrainFlags(_ScopedFlags):
    """Sets low-level flags for training programs; those of validation go without.

    Args:
        flags: as those of ``GlobalFlags``.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set the flags: the training step is made right after this hook."""
        if stage == "fit":
            self.begin(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the flags: the training step is made and has them."""
        self.end(trainer)


class ScopedValidateFlags(_ScopedFlags):
    """Sets low-level flags for validation programs, within training and alone.

    Args:
        flags: as those of ``GlobalFlags``.
    """

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the flags for the programs of validation."""
        self.begin(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the flags."""
        self.end(trainer)


def _whole(flag: str) -> str:
    """The flag of the table that a key belongs to."""
    prefix = next((prefix for prefix in PREFIXES if flag.startswith(prefix)), None)
    return flag if prefix is None else prefix.rstrip(".")


def _check(owner: str, flag: str, value: Any) -> None:
    if _whole(flag) not in KNOWN:
        raise ValueError(
            f"{owner}: there is no flag {flag!r}.{did_you_mean(flag, KNOWN)} docs/callbacks.md"
            " lists all flags."
        )
    if flag == RETRACE and not isinstance(value, bool):
        raise ValueError(f"{owner}: {flag} is true or false; got {value!r}.")
