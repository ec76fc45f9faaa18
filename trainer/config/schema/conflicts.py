"""Keys of one trainer that say the same thing twice, or contradict each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fulgurite.config.document.problems import Path, Problem, dotted
from fulgurite.config.schema.class_shapes import PROGRAM_SCHEDULER
from fulgurite.config.schema.optimizers import OptimizerCall
from fulgurite.config.types.constructor_checks import TRAINER_CHECKS, trainer_error
from fulgurite.config.types.report import Call, Report
from fulgurite.mixed_precision import CB16_MIXED, MixedPrecision
from fulgurite.placement import PLACEMENT, contradiction

SAME: tuple[tuple[Path, str], ...] = (
    (("loop", "max_steps"), "max_steps"),
    (("loop", "num_steps"), "max_steps"),
    (("loop", "num_epochs"), "max_epochs"),
    (("loop", "steps_per_epoch"), "limit_train_batches"),
    (("loop", "eval_steps"), "limit_val_batches"),
    (("loop", "eval_frequency"), "val_check_interval"),
    (("loop", "eval_frequency"), "check_val_every_n_epoch"),
    (("loop", "grad_accum_steps"), "accumulate_grad_batches"),
    (("logging", "log_steps"), "log_every_n_steps"),
    (("precision", "max_gradient_norm"), "gradient_clip_val"),
    (("precision", "max_gradient_norm"), "gradient_clip_algorithm"),
    (("precision", "max_gradient_value"), "gradient_clip_val"),
    (("precision", "max_gradient_value"), "gradient_clip_algorithm"),
    (("model_dir",), "default_root_dir"),
    (("loggers",), "logger"),
)
"""Our key, and the Trainer's argument that says the same."""


def check_conflicts(
    given: Mapping[str, Any], found: Mapping[str, Any], path: Path, report: Report
) -> None:
    """Check the keys of an ``init`` against each other.

    Args:
        given: what the file says.
        found: the same, key by key as the shapes made it.
        path: where it stands.
        report: gets what is wrong.
    """
    given = {key: value for key, value in given.items() if value is not None}
    for ours, lightnings in SAME:
        if given.get(lightnings) is not None and _at(given, ours) is not None:
            text = f"is given as {dotted(ours)} too, which says the same. Give one."
            report.problem((*path, lightnings), text)
    if given.get("checkpoint") is not None and given.get("enable_checkpointing") is False:
        text = "false contradicts checkpoint, which is given too. Leave one of them out."
        report.problem((*path, "enable_checkpointing"), text)
    _check_schedulers(given, found, path, report)
    if "device" in given and "backend" in given:
        text = "backend and device are mutually exclusive arguments of Trainer. Please only provide"
        report.problem((*path, "device"), f"{text} one or the other")
    elif "device" not in given and "backend" not in given:
        text = "names no device: a run needs device (CSX, CPU or GPU) or backend, or --device."
        report.notes.append(Problem(path, text))
    else:
        _check_device(given, found, path, report)
    # a value that its type refused already is told once
    wrong = {p.path[len(path)] for p in report.problems if p.path[: len(path)] == path != p.path}
    if report.classes.imports and not wrong & TRAINER_CHECKS:
        told = trainer_error({key: found[key] for key in given if key in found})
        if told is not None:
            report.problem((*path, *_named_in(told, given)), told)


def _check_schedulers(
    given: Mapping[str, Any], found: Mapping[str, Any], path: Path, report: Report
) -> None:
    """Schedulers set the numbers of the file's optimizer, and factors are read by schedulers."""
    schedulers, optimizer = found.get("schedulers") or [], found.get("optimizer")
    if schedulers and given.get("optimizer") is None:
        report.problem(
            (*path, "schedulers"),
            "set numbers of the file's optimizer, and it has none. Give optimizer too, or leave"
            " both to configure_optimizers.",
        )
    targets = [call.target for call in schedulers if call is not None]
    known = all(target is not None for target in targets)
    program = report.classes.library(PROGRAM_SCHEDULER)
    if report.classes.imports and isinstance(optimizer, Call) and known:
        _check_numbers([call for call in schedulers if call is not None], optimizer, report)
    if isinstance(optimizer, OptimizerCall) and optimizer.scales and known:
        if any(issubclass(target, program) for target in targets):
            return
        report.problem(
            (*path, "optimizer"),
            "adjust_learning_rate and adjust_val are factors of what a scheduler of fulgurite.optim"
            " gives, and the file has none. Give schedulers: [ConstantLR: {learning_rate: 1e-3}],"
            " or an lr of its own in each group.",
        )


def _check_numbers(schedulers: Sequence[Call], optimizer: Call, report: Report) -> None:
    """No two schedulers set the same number, as training would say: torch's alone may."""
    from fulgurite.backends.program_scheduler import ProgramScheduler, both_set, tagged

    entries = optimizer.groups if isinstance(optimizer, OptimizerCall) else ()
    # the last group has the parameters of no entry
    groups = [*({"tags": entry.options.get("tags")} for entry in entries), {}]
    owners: dict[tuple[int, str], Call] = {}
    named: Any = optimizer.target  # a class, or a function of the user's that returns one
    for call in schedulers:
        kind: Any = call.target
        counts = issubclass(kind, ProgramScheduler)
        key = getattr(kind, "param_group_key", "") if counts else "lr"
        for i in tagged(groups, call.arguments.get("param_group_tags") if counts else None):
            before: Any = owners.setdefault((i, key), call).target
            if owners[i, key] is not call and (counts or issubclass(before, ProgramScheduler)):
                report.problem(call.path, both_set(before, kind, i, key, named))
                break


def _at(given: Mapping[str, Any], path: Path) -> Any:
    value: Any = given
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _check_device(
    given: Mapping[str, Any], found: Mapping[str, Any], path: Path, report: Report
) -> None:
    """The device against what Lightning is told of machines, and against the precision."""
    kind = found.get("device") or (found.get("backend") or {}).get("backend_type")
    if not isinstance(kind, str):
        return
    kind = kind.upper()
    said = f"device={kind!r}" if "device" in given else f"backend {kind}"
    placed = {key: found[key] for key in PLACEMENT if key in given and key in found}
    plain = {key: value for key, value in placed.items() if not isinstance(value, Call)}
    wrong = contradiction(kind, said, **plain)
    if wrong is not None:
        report.problem((*path, *_named_in(wrong, placed)), wrong)
    precision = found.get("precision")
    mixed = precision if isinstance(precision, MixedPrecision) and precision.enabled else None
    only_csx = precision == CB16_MIXED or (mixed and mixed.fp16_type == "cbfloat16")
    if only_csx and kind != "CSX":
        report.problem((*path, "precision"), f"cbfloat16 exists on CSX only; got {said}.")


def _named_in(text: str, given: Mapping[str, Any]) -> Path:
    """The key that a text names, if it does."""
    names = [key for key in given if key in text]
    return (max(names, key=len),) if names else ()
