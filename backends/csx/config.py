"""Backend "CSX": the options of the static-graph backend.

Every name that parameter files and scripts may use is known here from the start. An option whose
effect does not exist yet is refused where it differs from its default, never ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from lightning_utilities.core.rank_zero import rank_zero_warn

from fulgurite.backends.backend import Backend, check_keys

AUTOGEN_POLICIES = ("disabled", "default", "medium", "aggressive")
FABRIC_NAMES = ("auto", "host", "gpu")
EXECUTIONS = ("pipeline", "weight_streaming")


@dataclass(frozen=True, kw_only=True)
class CSConfig:
    """The cluster as a whole. It is global to the process: the first explicit value holds.

    Args:
        num_csx: number of systems, that is, of processes that share the work.
        num_workers_per_csx: worker processes of each system's DataLoaders whose num_workers is 0;
            a loader of an IterableDataset keeps its 0.
        max_wgt_servers: weight servers; 0 leaves it to the fabric.
        max_act_per_csx: activation servers per system; 0 leaves it to the fabric.
    """

    num_csx: int = 1
    num_workers_per_csx: int = 0
    max_wgt_servers: int = field(default=0, metadata={"built": ()})
    max_act_per_csx: int = field(default=0, metadata={"built": ()})

    def __post_init__(self) -> None:
        for item in fields(self):
            value, least = getattr(self, item.name), 1 if item.name == "num_csx" else 0
            if type(value) is not int or value < least:
                raise ValueError(
                    f"CSConfig.{item.name} must be an integer of at least {least}; got {value!r}."
                )


_process_config: CSConfig | None = None


def _claim_config(config: CSConfig) -> None:
    global _process_config
    if _process_config is not None and _process_config != config:
        raise ValueError(
            f"cluster_config is global to the process and already is {_process_config}; it cannot"
            f" become {config}. Give every backend the same one, or give it only once."
        )
    _refuse_unbuilt(config, "cluster_config.")
    _process_config = config


def forget_config() -> None:
    global _process_config
    _process_config = None


def process_config() -> CSConfig:
    """The cluster configuration that holds in this process."""
    return _process_config or CSConfig()


@dataclass(frozen=True, kw_only=True)
class CSXBackend(Backend):
    """The static-graph backend: each stage's step becomes one program.

    Args:
        artifact_dir: folder that receives a report of the programs (report.html, report.json),
            and each as text when it is built, and after each pass; None writes none.
        compile_dir: folder of compiled programs, which later runs load; None is the user's cache
            folder. Of several the first takes programs, and the others are only read, as one that
            a team shares (docs/backends.md).
        compile_only: trace and compile the programs of a run, say what they are, and stop. The
            next run loads them.
        validate_only: trace them, which is all that is checked, and stop: needs no compiler.
        retrace_every_iteration: run the step's Python on every iteration.
        background: run a program that has to be compiled operation by operation until another
            process has compiled it; False waits, as does ``Trainer(deterministic=True)``. The
            first steps then round differently (docs/backends.md).
        audit: trace the step again now and then, and compare it with the program; takes at most 2 %
            of a run's time, besides once for each program (docs/steps.md).
        flush_denormals: numbers next to zero (in float32 below 1.2e-38) are zero in programs, as on
            an accelerator; False keeps them, as torch does, and is slower where there are many.
        autogen_policy: "disabled" runs the program operation by operation; "default", the same as
            "medium", generates fused kernels; "aggressive" generates products too, where that is
            faster (docs/autogen.md). "mild" is read as "medium".
        fabric: what runs programs: "host" (the CPU), "gpu", or "auto", the best there is.
        max_programs: programs each stage may have. "auto": one for each phase of freezing or
            accumulating, and in each for up to four shapes of batches. 1, as on the wafer: nothing
            may ever change.
        execution: "pipeline": each process keeps all weights; "weight_streaming": each of several
            keeps a part of them, of gradients and of optimizer state (docs/distributed.md); one
            keeps ``max_resident_bytes`` of them.
        max_resident_bytes: with "weight_streaming" in one process: weights and optimizer state that
            may be in memory, in bytes; beyond it they are in files in the Trainer's ``model_dir``
            (docs/weight_streaming.md).
        cluster_config: a CSConfig, or a dict of its fields.

    Raises:
        ValueError: a value outside its range, options that exclude each other, or a second,
            different ``cluster_config``.
        NotImplementedError: a value that is known, but whose effect is not built yet.
        RuntimeError: a backend of another type already lives in this process.
    """

    backend_type: ClassVar[str] = "CSX"

    artifact_dir: str | Path | None = None
    compile_dir: str | Path | Sequence[str | Path] | None = None
    compile_only: bool = False
    validate_only: bool = False
    retrace_every_iteration: bool = False
    background: bool = True
    audit: bool = True
    flush_denormals: bool = True
    autogen_policy: str = field(default="default", metadata={"known": AUTOGEN_POLICIES})
    fabric: str = field(default="auto", metadata={"known": FABRIC_NAMES, "built": ("host",)})
    max_programs: int | str = "auto"
    execution: str = field(default="pipeline", metadata={"known": EXECUTIONS, "built": EXECUTIONS})
    max_resident_bytes: int | None = None
    cluster_config: CSConfig | Mapping[str, Any] | None = None

    def _compile_only(self) -> None:
        object.__setattr__(self, "compile_only", not self.validate_only)

    def _validate(self) -> None:
        if self.autogen_policy == "mild":
            rank_zero_warn('autogen_policy="mild" is no more: it is read as "medium".')
            object.__setattr__(self, "autogen_policy", "medium")
        for item in fields(self):
            value, known = getattr(self, item.name), item.metadata.get("known")
            if known is not None and value not in known:
                raise ValueError(f"{item.name} must be one of {known}; got {value!r}.")
            if type(item.default) is bool and type(value) is not bool:
                raise ValueError(f"{item.name} must be True or False; got {value!r}.")
        self._check_artifact_dir()
        self._check_compile_dir()
        most = self.max_programs
        if most != "auto" and (type(most) is not int or most < 1):
            raise ValueError(f"max_programs must be 'auto' or a positive integer; got {most!r}.")
        self._check_budget()
        if self.compile_only and self.validate_only:
            raise ValueError(
                "compile_only and validate_only exclude each other: the one stops after compiling,"
                " the other before it. Give one of them."
            )
        if self.compile_only and not self.compiles:
            raise ValueError(
                f"compile_only=True has nothing to do with autogen_policy={self.autogen_policy!r},"
                " which compiles nothing. Leave autogen_policy out; or validate_only=True, which"
                " checks the model without compiling."
            )
        _refuse_unbuilt(self, "")
        if self.cluster_config is not None:
            config = self.cluster_config
            if isinstance(config, Mapping):
                check_keys(config, CSConfig, "cluster_config")
                config = CSConfig(**config)
            if not isinstance(config, CSConfig):
                raise TypeError(
                    "cluster_config must be a CSConfig or a dict of its fields; got"
                    f" {type(config).__name__}."
                )
            _claim_config(config)
            object.__setattr__(self, "cluster_config", config)

    def _check_budget(self) -> None:
        limit = self.max_resident_bytes
        if limit is None:
            return
        if type(limit) is not int or limit < 1:
            raise ValueError(
                f"max_resident_bytes must be a positive integer or None; got {limit!r}."
            )
        if self.execution != "weight_streaming":
            raise ValueError(
                f"max_resident_bytes={limit} is of execution='weight_streaming', and execution is"
                f" {self.execution!r}, which keeps all weights in memory. Give both, or neither."
            )

    def _check_artifact_dir(self) -> None:
        folder = self.artifact_dir
        if folder is None:
            return
        if not isinstance(folder, (str, os.PathLike)):
            kind = type(folder).__name__
            raise TypeError(f"artifact_dir must be a folder's path or None; got {kind} {folder!r}.")
        # made with the first program; until then the nearest folder above it tells
        there = next(
            one for one in (Path(folder), *Path(folder).absolute().parents) if one.exists()
        )
        if not there.is_dir():
            raise ValueError(
                f"artifact_dir={str(folder)!r} cannot be a folder: {there} is a file. Give a folder"
                " that exists or can be made."
            )

    def _check_compile_dir(self) -> None:
        given = self.compile_dir
        folders = given if isinstance(given, (list, tuple)) else [given] * (given is not None)
        if given in ([], ()) or not all(isinstance(one, (str, os.PathLike)) for one in folders):
            raise TypeError(
                "compile_dir must be a folder's path, a list of them, of which the first one takes"
                f" programs, or None; got {type(given).__name__} {given!r}."
            )

    @property
    def audits(self) -> bool:
        """Whether steps are traced again now and then."""
        return self.audit and not (self.only_builds or self.retrace_every_iteration)

    @property
    def compares_traces(self) -> bool:
        """Whether steps are traced more than once."""
        return self.audits or self.retrace_every_iteration

    @property
    def only_builds(self) -> bool:
        """Whether programs are built and not run."""
        return self.compile_only or self.validate_only

    @property
    def compiles(self) -> bool:
        """Whether the policy asks for generated kernels."""
        return self.policy != "disabled"

    @property
    def policy(self) -> str:
        """The policy of kernels under its own name: "default" is "medium"."""
        return "medium" if self.autogen_policy == "default" else self.autogen_policy


def _refuse_unbuilt(options: CSXBackend | CSConfig, prefix: str) -> None:
    for item in fields(options):
        value, default = getattr(options, item.name), item.default
        assert default is not MISSING
        built = item.metadata.get("built")
        if built is not None and value != default and value not in built:
            others = f" or one of {built}" if built else ""
            raise NotImplementedError(
                f"{prefix}{item.name}={value!r} is a known option of backend CSX, but its effect"
                f" is not built yet. Use the default, {default!r}{others}."
            )
