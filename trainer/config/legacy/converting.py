"""The old form of parameter files, turned into this one.

Words: *old* keys stand under ``runconfig``, ``model``, ``optimizer`` and the like, *new* ones under
``trainer``. ``old_keys`` has a row for each old key; this file applies the rows, and does what
takes more than a new name.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from fulgurite.config.document.problems import Path, Problem, dotted, nearest
from fulgurite.config.legacy.draft import Draft, Note
from fulgurite.config.legacy.old_keys import CLOSED_SECTIONS, ROWS, SECTIONS, WITHOUT_MEANING, Row
from fulgurite.config.legacy.old_optimizers import convert_optimizer

ORDER = {
    "init": (
        *("device", "backend", "model_dir", "seed", "model", "optimizer", "schedulers"),
        *("precision", "sparsity", "loop", "checkpoint", "logging", "callbacks", "loggers"),
    ),
    "fit": ("train_dataloader", "val_dataloader", "ckpt_path"),
    "validate": ("val_dataloader", "ckpt_path"),
    "validate_all": ("val_dataloaders", "ckpt_paths"),
}
"""The keys of a new file, in the order in which people read them."""

_BACKEND: Path = ("trainer", "init", "backend")
_PRECISION: Path = ("trainer", "init", "precision")
_EVAL_PATHS: tuple[Path, ...] = (
    ("trainer", "fit", "val_dataloader"),
    ("trainer", "validate", "val_dataloader"),
    ("trainer", "validate_all", "val_dataloaders"),
)
_DEFAULT_CALLBACKS = ("CheckLoss",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """An old file in the new form.

    Args:
        params: the new form.
        origins: the path of each new key: that of the old key that it came from.
        notes: old keys that have no counterpart, or changed their meaning.
        problems: what is wrong with old keys, all of it. ``params`` is of no use then.
    """

    params: dict[str, Any]
    origins: dict[Path, Path]
    notes: tuple[Note, ...]
    problems: tuple[Problem, ...]


def is_legacy(params: Mapping[str, Any]) -> bool:
    """Whether parameters have the old form."""
    return "trainer" not in params and any(section in params for section in SECTIONS)


def convert(params: Mapping[str, Any]) -> Converted:
    """Turn the old form into the new one. Numbers of a run stay the same.

    Args:
        params: what an old file says; it stays as it is.
    """
    draft = Draft()
    rest = _sections(params, draft)
    # first of all: what follows looks at new keys
    for row in ROWS:
        _apply(row, rest, draft)
    _refuse_others(rest, draft)
    _convert_device(draft)
    _convert_precision(draft)
    _convert_accumulation(draft)
    if rest["optimizer"]:
        convert_optimizer(rest["optimizer"], draft)
    _put_model(rest["model"], draft)
    _put_data(rest, draft)
    if rest["sparsity"]:
        draft.put(("trainer", "init", "sparsity"), rest["sparsity"], ("sparsity",))
    draft.finish(ORDER)
    return Converted(
        params=draft.params,
        origins=draft.origins,
        notes=tuple(draft.notes),
        problems=tuple(draft.problems),
    )


def _sections(params: Mapping[str, Any], draft: Draft) -> dict[str, Any]:
    """A copy of each section; what stands beside them."""
    rest: dict[str, Any] = {section: {} for section in SECTIONS}
    for key, value in copy.deepcopy(dict(params)).items():
        if key == "imports":
            draft.params[key] = value
        elif key in WITHOUT_MEANING:
            draft.note((key,), WITHOUT_MEANING[key], ("trainer",), value)
        elif key not in SECTIONS:
            known = (*SECTIONS, "imports")
            text = f"no such section.{nearest(key, known)} An old file has: {', '.join(known)}."
            draft.problem((key,), text)
        elif isinstance(value, Mapping) or key == "sparsity":
            rest[key] = value
        elif value is not None:
            draft.problem((key,), f"expected keys and values; got {value!r}.")
    return rest


def _apply(row: Row, rest: dict[str, Any], draft: Draft) -> None:
    """Take a row's old key out of its section, and put it where it belongs."""
    *above, key = row.old_path
    section: Any = rest
    for part in above:
        section = section.get(part) if isinstance(section, dict) else None
    if not isinstance(section, dict) or key not in section:
        return
    value = section.pop(key)
    if value is None and row.null is None:
        return
    value = row.null if value is None else value
    if row.harmless is not None:
        if value not in row.harmless:
            draft.problem(row.old_path, f"{row.note}.")
    elif row.without_effect:
        draft.note(row.old_path, row.without_effect, _near(row), value)
    else:
        for path in row.new_paths:
            _put(path, value, row.old_path, draft)


def _near(row: Row) -> Path:
    return row.new_paths[0] if row.new else ("trainer", "init")


def _put(path: Path, value: Any, old: Path, draft: Draft) -> None:
    """Put a value; a callback may be all that an old key says: true or false."""
    if draft.get(path) is not None:
        first = dotted(draft.origins[path])
        draft.problem(old, f"means the same as {first}, which is given too. Give one.")
        return
    if path[2] == "callbacks" and len(path) == 4 and isinstance(value, bool):
        if not value and path[3] not in _DEFAULT_CALLBACKS:
            return
        value = {} if value else None
    draft.put(path, value, old)


def _refuse_others(rest: dict[str, Any], draft: Draft) -> None:
    """Keys that are in no table: all of them are mistakes.

    What else ``optimizer`` has are arguments of the optimizer, unless it is almost a key.
    """
    # its keys have rows, which took them out: what is left is empty
    rest["runconfig"] = {k: v for k, v in rest["runconfig"].items() if k != "experimental" or v}
    for section in (*CLOSED_SECTIONS, "optimizer"):
        known = [row.old.split(".")[1] for row in ROWS if row.old.startswith(f"{section}.")]
        for key in rest[section]:
            if section in CLOSED_SECTIONS or get_close_matches(str(key), known, cutoff=0.85):
                draft.problem((section, key), f"no such key.{nearest(key, known)}")


def _convert_device(draft: Draft) -> None:
    """``device``, or ``backend`` where it has options; options that say nothing go."""
    device = draft.take(("trainer", "init", "device"))
    cluster = draft.get((*_BACKEND, "cluster_config"), {})
    if cluster == {"num_csx": 1}:
        draft.take((*_BACKEND, "cluster_config"))
    options = draft.get(_BACKEND, {})
    for key in [key for key, value in options.items() if value is False]:
        del options[key]
    old: Path = ("runconfig", "target_device")
    if device is not None and str(device).upper() != "CSX":
        for key in list(options):
            origin = draft.origins[*_BACKEND, key]
            text = f"is an option of backend CSX, and target_device is {device}"
            draft.note(origin, text, ("trainer", "init", "device"), options.pop(key))
    if not options:
        if device is not None:
            draft.put(("trainer", "init", "device"), device, old)
        return
    if device is None:
        device, old = "CSX", draft.origins[*_BACKEND, next(iter(options))]
        draft.note(old, "is an option of backend CSX, which is therefore used", _BACKEND)
    # backend_type first among the keys, where people look for it
    rest = dict(options)
    options.clear()
    draft.put((*_BACKEND, "backend_type"), device, old)
    options.update(rest)


def _device(draft: Draft) -> str:
    device = draft.get(("trainer", "init", "device")) or draft.get((*_BACKEND, "backend_type"))
    return str(device or "").upper()


def _convert_precision(draft: Draft) -> None:
    """Write out the defaults of old runs, and what they changed without being asked."""
    given = draft.get(_PRECISION)
    if not given:
        return
    # ``use_bfloat16`` of the first files has its row there: true or false
    if draft.get((*_PRECISION, "fp16_type")) is True:
        given["fp16_type"] = "bfloat16"
    elif draft.get((*_PRECISION, "fp16_type")) is False:
        del given["fp16_type"]
    first = draft.origins[_PRECISION]
    if "enabled" not in given:
        draft.put((*_PRECISION, "enabled"), False, first)
    if given["enabled"] and "fp16_type" not in given:
        draft.put((*_PRECISION, "fp16_type"), "float16", first)
    dtype, device = given.get("fp16_type"), _device(draft)
    narrow = {"CPU": ("float16", "cbfloat16"), "GPU": ("cbfloat16",)}.get(device, ())
    if given["enabled"] and dtype in narrow:
        text = f"was always bfloat16 on {device}, and is now"
        _note_precision("fp16_type", text, draft)
        given["fp16_type"] = "bfloat16"
    _convert_loss_scale(given, draft)


def _convert_loss_scale(given: dict[str, Any], draft: Draft) -> None:
    """A loss in bfloat16 was never scaled by steps; and only such scales have limits."""
    if given.get("fp16_type") == "bfloat16" and given.get("loss_scaling_factor") == "dynamic":
        text = "was never dynamic with bfloat16, and is 1.0 now"
        _note_precision("loss_scaling_factor", text, draft)
        given["loss_scaling_factor"] = 1.0
    if given.get("loss_scaling_factor") != "dynamic":
        for key in ("initial_loss_scale", "min_loss_scale", "max_loss_scale"):
            if key in given:
                _note_precision(key, "had no effect: the loss scale is not dynamic", draft)
                del given[key]


def _note_precision(key: str, text: str, draft: Draft) -> None:
    path = (*_PRECISION, key)
    draft.note(draft.origins[path], text, path, draft.get(path))


def _convert_accumulation(draft: Draft) -> None:
    """Say that ``grad_accum_steps`` had no effect on CSX, where it has one now."""
    path: Path = ("trainer", "init", "loop", "grad_accum_steps")
    old: Path = ("optimizer", "grad_accum_steps")
    steps, device = draft.get(path, 1), _device(draft)
    if steps == 1 or device in ("CPU", "GPU"):
        return
    if device == "CSX":
        draft.note(old, "had no effect on CSX, where it has one now", path, draft.take(path))
    else:
        draft.note(old, "has an effect on CSX too, where it had none", path)


def _put_model(arguments: dict[str, Any], draft: Draft) -> None:
    path: Path = ("trainer", "init", "model")
    draft.put(path, arguments, ("model",))
    if "name" not in arguments and "class_path" not in arguments:
        draft.note(("model",), "does not say which model; add name: or class_path:", path)


def _put_data(rest: dict[str, Any], draft: Draft) -> None:
    """The loaders of each stage; a stage without its loader goes, checkpoint path and all."""
    if rest["train_input"]:
        draft.put(("trainer", "fit", "train_dataloader"), rest["train_input"], ("train_input",))
    if rest["eval_input"]:
        for path in _EVAL_PATHS:
            draft.put(path, rest["eval_input"], ("eval_input",))
    needs = {"fit": "train_input", "validate": "eval_input", "validate_all": "eval_input"}
    for stage, section in needs.items():
        if not rest[section]:
            draft.take(("trainer", stage))
