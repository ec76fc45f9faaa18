"""From YAML text to plain values, with the place of every key.

Read are mappings, lists, strings, numbers, true/false and null, as YAML 1.2 writes them: ``1e-3``
is a number; ``yes``, ``on``, a date and a time of day are strings. Anchors, aliases and merges
(``<<``) work. Nothing of a file is executed, and no file takes long: its size, its depth and what
its aliases stand for are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from fulgurite.config.document.problems import (
    ParameterFileError,
    Path,
    Place,
    Problem,
    dotted,
    refusal,
    shown,
)

MOST_VALUES = 20_000
"""More than any file that a person wrote; a few nested aliases stand for billions."""
MOST_LEVELS = 50
"""Far more than a file has, and far less than Python's recursion takes."""
MOST_DIGITS = 400
"""Of a whole number. float64 ends at 309."""

_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "bool": ("true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(0b[01][01_]*|0x[0-9a-fA-F][0-9a-fA-F_]*|0o[0-7][0-7_]*|[0-9][0-9_]*)", None),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        None,
    ),
    "null": ("~|null|Null|NULL|", ["~", "n", "N", ""]),
}
_PATTERNS = {kind: re.compile(f"(?:{pattern})") for kind, (pattern, _) in _SCALARS.items()}


class Loader(yaml.SafeLoader):
    """SafeLoader's grammar with the scalars of YAML 1.2, and an end to nesting."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # PyYAML composes by calling itself: a deep file would end in Python's recursion
        self.level += 1
        if self.level > MOST_LEVELS:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            text = f"it is nested deeper than {MOST_LEVELS} levels"
            raise yaml.MarkedYAMLError(problem=text, problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.level -= 1
        return node


# SafeLoader's are those of YAML 1.1, where ``no`` is false and ``1e-3`` a string
Loader.yaml_implicit_resolvers = {}
for _kind, (_pattern, _first) in _SCALARS.items():
    _firsts = list("-+.0123456789") if _first is None else list(_first)
    Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), _firsts)
Loader.add_implicit_resolver(f"{_TAG}merge", re.compile("^<<$"), ["<"])


def values_of(text: str, source: str) -> tuple[Any, dict[Path, Place], list[Problem]]:
    """What YAML text says, where each of its keys and list items stands, and what is wrong.

    Raises:
        ParameterFileError: it is not YAML.
    """
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise refusal(Place(source), "is empty.")
        builder = _Builder(source)
        return builder.build(node, ()), builder.places, builder.problems
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(error, source, text) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = Place(source, before.count("\n") + 1, len(before) - before.rfind("\n"))
        character = f"the character {chr(error.character)!r}"
        wrong = f"is not text: it holds {character}, which YAML does not allow."
        raise refusal(place, wrong) from None
    except RecursionError:  # of whoever calls with hardly any frames left
        wrong = "is nested too deep for the recursion limit that is left here."
        raise refusal(Place(source), wrong) from None


def plain_scalar(text: str) -> Any:
    """What an unquoted word is: a number, true or false, null; else itself."""
    for kind, pattern in _PATTERNS.items():
        if pattern.fullmatch(text):
            try:
                return _converted(kind, text)
            except ValueError:
                return text
    return text


def _converted(kind: str, text: str) -> Any:
    """The value of a scalar.

    Raises:
        ValueError: it is not of that kind, or out of all bounds; the text says what to write.
    """
    if kind == "str":
        return text
    if not _PATTERNS[kind].fullmatch(text):
        wanted = {"bool": "true or false", "int": "a whole number", "float": "a number"}
        raise ValueError(f"expected {wanted.get(kind, kind)}; got {shown(text)}.")
    if kind in ("bool", "null"):
        return text.lower() == "true" if kind == "bool" else None
    digits = text.replace("_", "").lower()
    if kind == "float":
        number = float(re.sub(r"\.(?=inf|nan)", "", digits))
        # 1e400 is read as infinity, which nobody meant
        if number in (float("inf"), float("-inf")) and "inf" not in digits:
            raise ValueError(f"is too large for a number: {shown(text)}. Infinity is .inf.")
        return number
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"is a number of {len(digits)} digits; at most {MOST_DIGITS} are read.")
    unsigned = digits.lstrip("+-")
    if unsigned.isdigit() and len(unsigned) > 1 and unsigned[0] == "0":
        short = unsigned.lstrip("0") or "0"
        raise ValueError(
            f"has a leading zero, which some read as octal: write {short}, or {text!r} in quotes"
            " for a string."
        )
    return int(digits, 10) if unsigned.isdigit() else int(digits, 0)


class _Builder:
    """Makes plain data of YAML's nodes, and notes where each stands."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.places: dict[Path, Place] = {}
        self.problems: list[Problem] = []
        self._values = 0
        self._open: set[int] = set()

    def build(self, node: yaml.Node, path: Path) -> Any:
        self.places.setdefault(path, self._place(node))
        self._enter(node, path)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._open.add(id(node))
        built: Any = None
        if isinstance(node, yaml.MappingNode):
            built = self._mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            built = self._sequence(node, path)
        self._open.discard(id(node))
        return built

    def _enter(self, node: yaml.Node, path: Path) -> None:
        """Count a value, and stop at what would never end."""
        self._values += 1
        if self._values > MOST_VALUES:
            text = (
                f"it stands for more than {MOST_VALUES} values, by aliases (*name) within aliases"
            )
        elif id(node) in self._open:
            text = f"{dotted(path)} contains itself through an alias (*name)"
        elif len(path) > MOST_LEVELS:
            text = f"it is nested deeper than {MOST_LEVELS} levels"
        else:
            return
        raise yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)

    def _place(self, node: yaml.Node) -> Place:
        return Place(self.source, node.start_mark.line + 1, node.start_mark.column + 1)

    def _problem(self, node: yaml.Node, path: Path, text: str) -> None:
        self.places[path] = self._place(node)
        self.problems.append(Problem(path, text))

    def _sequence(self, node: yaml.SequenceNode, path: Path) -> list[Any]:
        if node.tag != f"{_TAG}seq":
            self._problem(node, path, _tag_text(node))
        return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[Any, Any]:
        if node.tag != f"{_TAG}map":
            self._problem(node, path, _tag_text(node))
        data: dict[Any, Any] = {}
        for key_node, value_node, key in self._pairs(node, path):
            self.places[*path, key] = self._place(key_node)
            data[key] = self.build(value_node, (*path, key))
        return data

    def _pairs(
        self, node: yaml.MappingNode, path: Path
    ) -> Iterator[tuple[yaml.Node, yaml.Node, str | int]]:
        """The keys and values of a mapping: its own, then those merged into it that it lacks."""
        own: dict[Any, int] = {}
        merges: list[tuple[yaml.Node, yaml.Node]] = []
        for key_node, value_node in node.value:
            merging = key_node.tag == f"{_TAG}merge"
            key = "<<" if merging else self._key(key_node, path)
            if key is None:
                continue
            if key in own:
                again = "Merge both as <<: [*a, *b]." if merging else "Remove one."
                text = f"is given twice, first at line {own[key]}. {again}"
                self._problem(key_node, (*path, key), text)
                continue
            own[key] = key_node.start_mark.line + 1
            if merging:
                merges.append((key_node, value_node))
            else:
                yield key_node, value_node, key
        # after all keys of its own: those count more, wherever the merge stands among them
        for key_node, value_node in merges:
            yield from self._merged(key_node, value_node, path, set(own))

    def _merged(
        self, key_node: yaml.Node, value_node: yaml.Node, path: Path, taken: set[Any]
    ) -> Iterator[tuple[yaml.Node, yaml.Node, str | int]]:
        """What is merged in; of several mappings, an earlier one counts more."""
        listed = isinstance(value_node, yaml.SequenceNode)
        for other in value_node.value if listed else [value_node]:
            self._enter(other, (*path, "<<"))
            if not isinstance(other, yaml.MappingNode):
                self._problem(key_node, (*path, "<<"), "merges only mappings (<<: *name).")
                continue
            self._open.add(id(other))
            for pair in self._pairs(other, path):
                if pair[2] not in taken:
                    taken.add(pair[2])
                    yield pair
            self._open.discard(id(other))

    def _key(self, node: yaml.Node, path: Path) -> str | int | None:
        if not isinstance(node, yaml.ScalarNode):
            self._problem(
                node,
                (*path, "?"),
                "a key must be a word; got a list or mapping. Quote {...}, [..].",
            )
            return None
        key = self._scalar(node, (*path, node.value))
        if isinstance(key, (str, int)) and not isinstance(key, bool):
            return key
        if key is not None or not node.value or node.tag == f"{_TAG}null":
            text = f"a key must be a word; got {node.value or 'nothing'}. Quote it if it is meant."
            self._problem(node, (*path, "?"), text)
        return None

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        kind = node.tag.removeprefix(_TAG)
        if kind not in ("str", *_SCALARS) or kind == node.tag:
            self._problem(node, path, _tag_text(node))
            return None
        try:
            return _converted(kind, node.value)
        except ValueError as error:
            self._problem(node, path, str(error))
            return None


def _tag_text(node: yaml.Node) -> str:
    tag = node.tag.replace(_TAG, "!!")
    if tag == "!!merge":
        return "<< stands for no value: it is a key, as in <<: *name."
    return f"has the tag {tag}: only plain values are read. Leave the tag out."


_HINTS = (
    (r"found character '\\t'", "A tab stands there: indent with spaces."),
    (
        r"mapping values are not allowed",
        "A second ': ' in one line, or a line indented deeper than the one above it."
        " Quote text that holds ': '.",
    ),
    (
        r"could not find expected ':'",
        "A key without its ':', or a line that is indented less than the text it belongs to.",
    ),
    (
        r"expected <block end>, but found",
        "Keys of one mapping, and items of one list, begin in the same column.",
    ),
    (
        r"found character '[@`%]'|found character '\|'|but found '[>|]'",
        "Quote text that begins with this character.",
    ),
    (r"unknown escape character", "In double quotes \\ begins an escape: write 'C:\\data' or /."),
    (r"unexpected end of stream", "A quote that is opened is never closed."),
    (r"expected ',' or", "A bracket is not closed, or a comma is missing."),
    (r"found undefined alias", "Define it before, as &name. Quote text that begins with *."),
    (r"but found another document", "A file holds one document (---); trainers are a list."),
    (r"alphabetic or numeric character", "Quote text that begins with * or &."),
    (r"sequence entries are not allowed", "'- ' begins a list item: give it a line of its own."),
    (r"tag handle|expected URI|<uri>|suffix", "Quote text that begins with !."),
)


_BARE_VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")


def _not_yaml(error: yaml.MarkedYAMLError, source: str, whole: str) -> ParameterFileError:
    """The reader's complaint, where it stands, what began it, and what mends it.

    Args:
        whole: the text of the file.
    """
    mark, begun = error.problem_mark or error.context_mark, error.context_mark
    # within braces and brackets YAML reads the { of a variable as another mapping's
    if mark is not None and (found := _BARE_VARIABLE.match(whole, max(0, mark.index - 1))):
        place = Place(source, mark.line + 1, mark.column)
        wrong = (
            f"is not YAML: within {{...}} and [...] a variable is written in quotes: '{found[0]}'."
        )
        return refusal(place, wrong)
    if begun is not None and "unexpected end of stream" in (error.problem or ""):
        mark = begun
    place = Place(source, mark.line + 1, mark.column + 1) if mark else Place(source)
    since = ""
    if error.context and begun is not None and mark is not None and begun.line != mark.line:
        since = f", {error.context} from line {begun.line + 1}"
    text = (error.problem or error.context or "").replace("<stream end>", "the file's end")
    hint = next((f" {hint}" for pattern, hint in _HINTS if re.search(pattern, text)), "")
    return refusal(place, f"is not YAML: {text}{since}.{hint}")
