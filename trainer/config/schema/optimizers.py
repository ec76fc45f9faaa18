"""``optimizer``: checked against its signature, and its param groups made by globs.

    optimizer:
      AdamW:
        lr: 3e-4
        weight_decay: 0.1
        params:
          - {params: "*.bias", modules: "*Norm*", weight_decay: 0.0, tag: no_decay}

A parameter belongs to the first entry with a glob that one of its names matches as a whole, or
that the class of its module does; parameters that none matches form the last group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from fulgurite.config.document.problems import Path, Problem, nearest
from fulgurite.config.types.classes import Named
from fulgurite.config.types.report import Call
from fulgurite.config.types.shapes import OneClass, Report, is_mapping
from fulgurite.config.types.values import check_arguments

if TYPE_CHECKING:
    from torch import nn

LR_GROUPS: dict[str, tuple[str, ...]] = {
    "embedding": ("*embedding*weight",),
    "decoder_kernel": ("*decoder*dense*weight", "*decoder*linear*weight"),
}
"""Names that ``adjust_learning_rate`` may use where the model has no ``lr_adjustment_groups``."""

_FACTORS = ("adjust_learning_rate", "adjust_val")


@dataclass(frozen=True, kw_only=True)
class Group:
    """One entry of ``params``.

    Args:
        path: where it stands.
        globs: of the names of its parameters.
        modules: of the classes of modules whose own parameters are among them.
        options: what the param group has besides.
    """

    path: Path
    globs: tuple[str, ...]
    modules: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class OptimizerCall(Call):
    """An optimizer to be made of a module's parameters.

    Args:
        groups: the entries of ``params``.
        factors: the entries of ``adjust_learning_rate``: a name or a glob, and the factor.
        factors_path: where those stand.
    """

    groups: tuple[Group, ...]
    factors: Mapping[str, float]
    factors_path: Path

    @property
    def scales(self) -> bool:
        """Whether a group has a factor, which ``ScalePerParamLR`` reads."""
        return bool(self.factors) or any(
            key in group.options for group in self.groups for key in _FACTORS
        )


@dataclass(frozen=True)
class OptimizerShape(OneClass):
    """A class of optimizer; ``lr`` may be written ``learning_rate``."""

    def called(self, found: Named, report: Report) -> Call | None:
        """The call, with its groups."""
        given, path = dict(found.arguments), found.arguments_path
        entries, factors = given.pop("params", None), given.pop(_FACTORS[0], None)
        _rename_lr(given, path, report)
        call = super().called(replace(found, arguments=given), report)
        groups = self._groups(call, entries, (*path, "params"), report)
        if call is None:
            return None
        return OptimizerCall(
            **vars(call),
            groups=groups,
            factors=_checked_factors(factors, (*path, _FACTORS[0]), report),
            factors_path=(*path, _FACTORS[0]),
        )

    def _groups(
        self, call: Call | None, entries: Any, path: Path, report: Report
    ) -> tuple[Group, ...]:
        if entries is None:
            return ()
        placed: list[tuple[Path, Any]] = [(path, entries)]
        if isinstance(entries, list) and entries:
            placed = [((*path, i), entry) for i, entry in enumerate(entries)]
        found = [self._group(call, *one, report) for one in placed]
        return tuple(group for group in found if group is not None)

    def _group(self, call: Call | None, path: Path, entry: Any, report: Report) -> Group | None:
        if not is_mapping(entry, path, report):
            return None
        options = dict(entry)
        globs, modules = (_globs(options.pop(key, [])) for key in ("params", "modules"))
        tag = options.pop("tag", None)
        if globs is None or modules is None or not (globs or modules):
            text = "params: expected a glob of parameter names, or a list of them; or modules: the"
            report.problem(path, f"{text} same of class names.")
            return None
        if tag is not None:
            options.setdefault("tags", tag)
        _rename_lr(options, path, report)
        if call is not None and call.target is not None:
            options = _options_of(call, options, path, report)
        return Group(path=path, globs=globs, modules=modules, options=options)


def _globs(value: Any) -> tuple[str, ...] | None:
    globs = [value] if isinstance(value, str) else value
    if not isinstance(globs, list) or not all(isinstance(one, str) for one in globs):
        return None
    return tuple(globs)


def _rename_lr(given: dict[str, Any], path: Path, report: Report) -> None:
    if "lr" in given and "learning_rate" in given:
        report.problem((*path, "learning_rate"), "the same as lr, which is given too. Give one.")
    if "learning_rate" in given:
        given.setdefault("lr", given.pop("learning_rate"))


def _options_of(call: Call, options: dict[str, Any], path: Path, report: Report) -> dict[str, Any]:
    """A group's options as the optimizer has them among its arguments."""
    assert call.target is not None
    beside = {key: options[key] for key in ("tags", *_FACTORS) if key in options}
    own = {key: value for key, value in options.items() if key not in beside}
    tried = report.fork()
    found = check_arguments(call.target, own, path, tried, call.skip)
    report.notes += tried.notes
    # what the optimizer needs besides, it has from its own arguments
    report.problems += [problem for problem in tried.problems if problem.path != path]
    return {**found, **beside}


def _checked_factors(value: Any, path: Path, report: Report) -> dict[str, float]:
    if value is None or not is_mapping(value, path, report):
        return {}
    for name, factor in value.items():
        if not isinstance(factor, (int, float)) or isinstance(factor, bool):
            report.problem((*path, name), f"expected a number; got {factor!r}.")
    return dict(value)


Refuse = Callable[[list[Problem]], None]


def param_groups(call: Call, module: nn.Module, refuse: Refuse) -> Any:
    """What an optimizer's first argument is: a module's parameters, or groups of them.

    Frozen parameters are among them, as in ``module.parameters()``: a callback may thaw them.

    Args:
        call: the optimizer's.
        module: whose parameters.
        refuse: raises what is wrong with a file.

    Raises:
        ParameterFileError: an entry of the file has no parameters.
    """
    if not isinstance(call, OptimizerCall) or not (call.groups or call.factors):
        return module.parameters()
    names: dict[nn.Parameter, list[str]] = {}  # of a shared parameter, each name may match
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    factors = [(_lr_globs(module, name), factor) for name, factor in call.factors.items()]
    # A group is what one entry and one factor have in common: either may divide the other's.
    made: dict[tuple[int, int], list[nn.Parameter]] = {}
    for parameter, own in names.items():
        kinds = _kinds(module, own)
        key = (
            _first(_matches(own, one.globs) or _matches(kinds, one.modules) for one in call.groups),
            _first(_matches(own, globs) for globs, _ in factors),
        )
        made.setdefault(key, []).append(parameter)
    refuse(_unused(call, factors, [name for own in names.values() for name in own], made))
    return [
        {"params": made[entry, factor], **_options(call, entry, factor)}
        for entry, factor in sorted(made)
    ]


def _kinds(module: nn.Module, names: list[str]) -> list[str]:
    """The classes of the modules that hold a parameter, and those that they derive from."""
    owners = [module.get_submodule(name.rpartition(".")[0]) for name in names]
    return [kind.__name__ for owner in owners for kind in type(owner).__mro__]


def _first(matches: Iterable[bool]) -> int:
    """The index of the first entry that matches; one past the last if there is none."""
    found = list(matches)
    return found.index(True) if True in found else len(found)


def _matches(names: list[str], globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for name in names for glob in globs)


def _options(call: OptimizerCall, entry: int, factor: int) -> dict[str, Any]:
    factors = dict(enumerate(call.factors.values()))
    own = call.groups[entry].options if entry < len(call.groups) else {}
    return {**({_FACTORS[0]: factors[factor]} if factor in factors else {}), **own}


def _lr_globs(module: nn.Module, name: str) -> tuple[str, ...]:
    """The globs of a name of ``adjust_learning_rate``, which may be one itself."""
    own = getattr(module, "lr_adjustment_groups", LR_GROUPS).get(name, (name,))
    patterns = getattr(own, "param_filter_patterns", own)
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _unused(
    call: OptimizerCall,
    factors: list[tuple[tuple[str, ...], float]],
    names: list[str],
    made: Iterable[tuple[int, int]],
) -> list[Problem]:
    """Globs that match nothing, and entries whose parameters all belong to earlier ones.

    An entry that also has ``modules`` speaks of all models, and may be empty.
    """
    problems = []
    for i, group in enumerate(call.groups):
        if group.modules:
            continue
        wrong = [glob for glob in group.globs if not _matches(names, [glob])]
        problems += [Problem((*group.path, "params"), _no_match(glob, names)) for glob in wrong]
        if not wrong and i not in {entry for entry, _ in made}:
            text = "all its parameters belong to entries before it. Put it before them."
            problems.append(Problem(group.path, text))
    for name, (globs, _) in zip(call.factors, factors, strict=True):
        if not _matches(names, globs):
            problems.append(Problem((*call.factors_path, name), _no_match(globs[0], names)))
    return problems


def _no_match(glob: str, names: list[str]) -> str:
    near = nearest(glob.strip("*"), names)
    some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{glob!r} matches no parameter.{near or f' There are {some}.'}"
