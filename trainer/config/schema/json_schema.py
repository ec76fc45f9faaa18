"""A JSON Schema of parameter files, from the tables and signatures that check them.

Editors complete and mark a file that begins with

    # yaml-language-server: $schema=fulgurite.schema.json

after ``fulgurite schema > fulgurite.schema.json``. The checker knows more: ranges, contradictions,
and whether what a file names exists. The schema knows names as they are written and in lower case,
not those of modules under ``imports``: there, a class path.
"""

from __future__ import annotations

import enum
import inspect
import pathlib
import types
import typing
from collections import abc
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from fulgurite.backends import CSConfig, CSXBackend
from fulgurite.config.document.ignored import IGNORED_KEYS
from fulgurite.config.schema import schema as tables
from fulgurite.config.schema.class_shapes import WHEN, Removable
from fulgurite.config.types.classes import Classes
from fulgurite.config.types.loggers import LOGGER_NAMES
from fulgurite.config.types.shapes import Keys, OneClass, Section, Several, Shape, Value
from fulgurite.config.types.signatures import (
    LISTS,
    MAPPINGS,
    SETS,
    alternatives,
    class_of,
    is_class,
    is_dataclass,
    signature_of,
)
from fulgurite.trainer import Trainer

Schema = dict[str, Any]

BESIDE = {
    "optimizer": ("params", "learning_rate", "adjust_learning_rate"),
    "scheduler": tuple(WHEN),
}
"""What a class of a category takes beside its own arguments."""

_VARIABLE: Schema = {"type": "string", "pattern": r"^\$\{.*\}$"}
_PATH: Schema = {"type": "string", "pattern": r"\.", "description": "an import path"}
_PLAIN: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    pathlib.Path: {"type": "string"},
    types.NoneType: {"type": "null"},
}
_DEPTH = 2
"""Arguments of classes within arguments of classes are described so deep."""


def schema() -> Schema:
    """The schema, draft 2020-12, as plain data: a few hundred kilobytes of JSON."""
    return _Writer().file()


class _Writer:
    """Collects definitions, each written once."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}
        self.classes = Classes()

    def file(self) -> Schema:
        trainer = self.define("trainer", lambda: self.shape(tables.TRAINER))
        inner = {"type": "object", "properties": {"trainer": trainer}, "required": ["trainer"]}
        item = {"if": {"required": ["trainer"]}, "then": inner, "else": trainer}
        several = {"type": "array", "items": item, "minItems": 1}
        names = {"type": "string"}
        imports = {"description": "modules whose classes the file names", **_one_or_more(names)}
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "Fulgurite parameter file",
            "type": "object",
            "properties": {"imports": imports, "trainer": _if_list(several, trainer)},
            "required": ["trainer"],
            "additionalProperties": False,
            "$defs": self.definitions,
        }

    def define(self, name: str, make: Callable[[], Schema]) -> Schema:
        """A reference to a definition, which is made if it is new."""
        if name not in self.definitions:
            # there while it is made: what has itself among its arguments refers to it
            self.definitions[name] = {}
            self.definitions[name] = make()
        return {"$ref": f"#/$defs/{name}"}

    def shape(self, shape: Shape, path: str = "") -> Schema:
        """The schema of a shape; anything, of a shape that is not known here.

        Args:
            path: the dotted key of its keys that are ignored, if it is a section.
        """
        match shape:
            case tables.InitShape():
                return self.init(shape)
            case Keys():
                properties = {key: self.shape(item) for key, item in shape.shapes.items()}
                return _object(properties, shape.required)
            case Value():
                return self.kind(shape.kind, 0)
            case Section():
                found = self.arguments(shape.target(self.classes), frozenset(), 0)
                found["properties"] |= _ignored(path)
                return {"anyOf": [found, {"type": "null"}]}
            case Several():
                return _one_or_more(self.shape(shape.shape))
            case Removable():
                return self.shape(shape.shape)
            case OneClass():
                return self.category(shape)
            case tables.EitherTextOr():
                return {"if": {"type": "string"}, "else": self.shape(shape.shape)}
            case tables.PrecisionShape():
                names = {"type": ["string", "integer"], "examples": list(tables.PRECISIONS)}
                return {"if": {"type": "object"}, "then": self.shape(shape.section), "else": names}
            case tables.DeviceShape():
                return _names(("CSX", "CPU", "GPU"))
            case tables.BackendShape():
                return self.backend()
        return {}

    def init(self, shape: tables.InitShape) -> Schema:
        found = self.arguments(Trainer, frozenset(shape.shapes), 0)
        for key, item in shape.shapes.items():
            found["properties"][key] = self.shape(item, f"trainer.init.{key}.")
        found["properties"] |= _ignored("trainer.init.")
        return {**found, "required": ["model"], "not": {"required": ["device", "backend"]}}

    def backend(self) -> Schema:
        found = self.arguments(CSXBackend, frozenset({"cluster_config"}), 0)
        found["properties"]["backend_type"] = _names(("CSX", "CPU", "GPU"))
        cluster = self.shape(Section(CSConfig), "trainer.init.backend.cluster_config.")
        found["properties"] |= _ignored("trainer.init.backend.")
        found["properties"]["cluster_config"] = cluster
        found["patternProperties"] = {r"^csx\.debug\.": {}}
        return {**found, "required": ["backend_type"]}

    def category(self, shape: OneClass) -> Schema:
        """A class of a category in one of its forms."""
        category, skip = self.classes.category(shape.category), frozenset(shape.skip)
        choices = self.classes.short_names(category) if category.homes else {}
        make = partial(self._forms, shape.category, choices, skip, shape.key, 0)
        return self.define(shape.category, make)

    def _forms(
        self, name: str, choices: dict[str, Any], skip: frozenset[str], key: str, depth: int
    ) -> Schema:
        known = [_names(choices), _PATH] if choices else [{"type": "string"}]
        named: Schema = {"anyOf": known} if choices else known[0]
        properties = {
            spelt: self.define(
                f"{name}.{choice}",
                partial(self._nullable_arguments, name, choice, target, skip, depth + 1),
            )
            for choice, target in choices.items()
            for spelt in dict.fromkeys((choice, choice.lower()))
        }
        properties |= _ignored(f"trainer.init.{name}s.")
        others = {r"\.": {"type": ["object", "null"]}}
        one = {"type": "object", "properties": properties, "minProperties": 1, "maxProperties": 1}
        by_name = {**one, "patternProperties": others, "additionalProperties": not choices}
        by_path = _object({"class_path": named, "init_args": {"type": ["object", "null"]}})
        found = _either("name", {"properties": {"name": named}}, by_name)
        if key != "name":
            found = _either(key, {"properties": {key: named}}, found)
        found = _either("class_path", by_path, found)
        return {"if": {"type": "string"}, "then": named, "else": {"type": "object", **found}}

    def _nullable_arguments(
        self, category: str, name: str, target: Any, skip: frozenset[str], depth: int
    ) -> Schema:
        """A class's arguments, with what its shape takes beside them."""
        found = {**self.arguments(target, skip, depth), "type": ["object", "null"]}
        found["properties"] |= {key: {} for key in BESIDE.get(category, ())}
        if category == "scheduler":
            inner = {"$ref": "#/$defs/scheduler"}
            nested = {"scheduler": inner, "schedulers": _one_or_more(inner)}
            takes = signature_of(target).parameters
            found["properties"] |= {key: nested[key] for key in nested if key in takes}
        if category == "logger":
            others = LOGGER_NAMES.get(name.lower(), {})
            found["properties"] |= {key: {} for key in others}
            needed = [key for key in found.pop("required", ()) if key != "save_dir"]
            found |= {"required": needed} if needed else {}
        return found

    def arguments(self, target: Any, skip: frozenset[str], depth: int) -> Schema:
        """The arguments of a class or function."""
        signature = signature_of(target)
        properties, required = {}, []
        for name, item in signature.parameters.items():
            if name in skip:
                continue
            properties[name] = self.kind(item.kind, depth)
            if item.text:
                properties[name] |= {"description": " ".join(item.text.split())}
            if item.required:
                required.append(name)
            elif isinstance(item.default, (str, int, float, bool)):
                properties[name] |= {"default": item.default}
        found = _object(properties, required)
        text = (inspect.getdoc(target) or "").partition("\n\n")[0]
        described = {"description": " ".join(text.split())} if text else {}
        return {**found, **described, "additionalProperties": signature.open_ended}

    def kind(self, kind: Any, depth: int) -> Schema:
        """The schema of a type."""
        kinds = alternatives(kind)
        found = [self._one_kind(other, depth) for other in kinds]
        if {} in found:
            return {}
        # a type is one name or a list of them
        if not all("string" in one.get("type", ()) for one in found) and kinds != (types.NoneType,):
            found.append(_VARIABLE)
        unique = [one for i, one in enumerate(found) if one not in found[:i]]
        return dict(unique[0]) if len(unique) == 1 else {"anyOf": unique}

    def _one_kind(self, kind: Any, depth: int) -> Schema:
        origin, args = class_of(kind), typing.get_args(kind)
        if isinstance(kind, abc.Hashable) and kind in _PLAIN:
            return _PLAIN[kind]
        if origin is Literal:
            return {"enum": list(args)}
        if inspect.isclass(kind) and issubclass(kind, enum.Enum):
            return {"enum": [item.name for item in kind]}
        if origin in MAPPINGS:
            values = self.kind(args[1], depth) if args else {}
            return {"type": "object", "additionalProperties": values or True}
        if origin is tuple and args and args[-1] is not Ellipsis:
            items = [self.kind(arg, depth) for arg in args]
            return {"type": "array", "prefixItems": items, "minItems": len(args), "items": False}
        if origin in (*LISTS, *SETS):
            return {"type": "array", "items": self.kind(args[0], depth) if args else {}}
        if is_dataclass(kind):
            return self.arguments(kind, frozenset(), depth)
        if is_class(kind) and depth < _DEPTH:
            choices = self.classes.short_names(self.classes.category_of((origin,)))
            name = origin.__name__
            forms = partial(self._forms, name, choices, frozenset(), "name", depth)
            return self.define(name, forms)
        return {}


def _ignored(path: str) -> Schema:
    """The keys of a mapping that are ignored here."""
    keys = {key.removeprefix(path): note for key, note in IGNORED_KEYS.items() if path in key}
    return {
        key: {"description": note, "deprecated": True}
        for key, note in keys.items()
        if key.isidentifier()
    }


def _object(properties: Schema, required: Iterable[str] = ()) -> Schema:
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **needed, "additionalProperties": False}


def _one_or_more(one: Schema) -> Schema:
    return _if_list({"type": "array", "items": one}, {"anyOf": [one, {"type": "null"}]})


def _if_list(several: Schema, one: Schema) -> Schema:
    return {"if": {"type": "array"}, "then": several, "else": one}


def _either(key: str, found: Schema, other: Schema) -> Schema:
    return {"if": {"required": [key]}, "then": found, "else": other}


def _names(names: Iterable[str]) -> Schema:
    known = list(names)
    return {"enum": list(dict.fromkeys([*known, *(name.lower() for name in known)]))}
