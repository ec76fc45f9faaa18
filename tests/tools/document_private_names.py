"""Write docs/private_names.md and backends/private_names.json from the imports, names and patches
in the code.

python tests/tools/document_private_names.py

What is looked for: imports of what is private in the packages of ``TESTED``, attributes of what is
imported, private attributes of objects, and patches of others' code. Whose a private attribute of
an object is cannot be read from ``x._name``: tests/support/private_owners.py says it. Fulgurite is
not imported: it cannot be while the table that this writes is wrong.
"""

from __future__ import annotations

import ast
import builtins
import json
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
from private_owners import ENDS, ENDS_AT, OTHERS, OWNERS, PYTHONS, PYTHONS_HERE, STANDS_FOR

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "private_names.md"
TABLE = ROOT / "backends" / "private_names.json"
ROOMS = ("backends", "callbacks", "loops", "trainer")
COMPILER = ("backends/csx/compile/", "backends/csx/graph/passes/decompositions.py")
"""Where what is made for the compiler is made."""
OUTSIDE = ("host_fabric.py", "threads.py", "toolchain.py", "queue.py")
"""Files of the compiler's room whose functions do not run below ``failures_reported`` alone."""
IMPORTED_LATE = ("inductor/changes.py", "inductor/wrapper.py")
"""Files of it that are imported when a graph is compiled, below that too."""
GATEWAY = "backends/torch_compiler.py"
"""What its functions import is asked for where a graph is lowered for the compiler, or compiled."""


def allowed() -> dict[str, str]:
    """The packages that are looked at, and the versions that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = [re.fullmatch(r"([a-z]+)(?:\[.*\])?(.*)", one) for one in project["dependencies"]]
    wanted = ("torch", "lightning", "torchmetrics", "jsonargparse")
    found = {row[1]: row[2] for row in rows if row is not None}
    return {package: found[package] for package in wanted}


TESTED = allowed()

DIFFERENT = "backends/torch_versions.py"
"""Says how versions differ: a name in a string there is one that it looks for."""

AT_ONCE, LATE, COMPILED = "at once", "late", "compiled"
GONE = {
    AT_ONCE: "`UnsupportedVersion` where Fulgurite is imported",
    LATE: "`UnsupportedVersion` where it is used, before anything was trained",
    COMPILED: "programs run operation by operation",
}
OF_TEMPLATES = {
    "torch._inductor.select_algorithm.PRINT_AUTOTUNE": "`aggressive` compiles as `default`",
}
"""What is asked for by ``autogen_policy="aggressive"`` alone, and what follows where it is gone."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place where others' code is patched, and the full names of what is replaced."""

    names: tuple[str, ...]
    why: str
    file: str


@dataclass(slots=True)
class Scan:
    """What the code uses."""

    uses: dict[str, dict[str, set[str]]] = field(default_factory=dict)  # name: kind: files
    sites: list[Site] = field(default_factory=list)
    strangers: set[str] = field(default_factory=set)  # private, and whose is not known

    def add(self, name: str, kind: str, file: str) -> None:
        """Note a use of a name."""
        self.uses.setdefault(name, {}).setdefault(kind, set()).add(file)


def scan() -> Scan:
    """Read all the code of the package."""
    found = Scan()
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path != ROOT / "backends" / "supported.py":
                _File(path, found).read()
    for name, uses in list(found.uses.items()):  # who needs x.y at once needs x at once
        for end in range(name.count(".")):
            owner = name.rsplit(".", end + 1)[0]
            if AT_ONCE in uses and owner in found.uses:
                found.uses[owner].setdefault(AT_ONCE, set()).update(uses[AT_ONCE])
    return found


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


class _File:
    """A file that is read."""

    def __init__(self, path: Path, found: Scan) -> None:
        self._file, self._found = path.relative_to(ROOT).as_posix(), found
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        self._parents = {
            child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)
        }
        self._known: dict[str, str] = {}  # names in the file that stand for others' dotted names
        self._texts: list[tuple[int, str]] = []  # strings that may be private names
        self._own = {
            name for node in ast.walk(self._tree) for name in _defined(node) if name not in OWNERS
        }

    def read(self) -> None:
        """Note what it uses."""
        for node in ast.walk(self._tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._import(node)
        for node in ast.walk(self._tree):
            for target, value in _pairs(node):
                dotted = self._dotted(value)
                if isinstance(target, ast.Name) and dotted and dotted.startswith("torch.ops."):
                    self._known[target.id] = dotted
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute):
                self._attribute(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._text(node, node.value)
            elif isinstance(node, ast.Call):
                site = self._patch(node)
                if site is not None:
                    self._found.sites.append(site)
                for name in site.names if site is not None else ():
                    if "?" not in name and "." in name and not self._is_pythons(name):
                        self._use(name, node)
        patched = {name.rpartition(".")[2] for site in self._found.sites for name in site.names}
        for line, text in self._texts:
            if text not in patched:
                self._found.strangers.add(f"{self._file}:{line} {text!r}")

    # -- imports and what they lead to -------------------------------------------------------

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            name = f"{module}.{alias.name}" if module else alias.name
            if name.partition(".")[0] not in TESTED:
                continue
            bound = alias.asname or (alias.name if module else name.partition(".")[0])
            self._known[bound] = name if module or alias.asname else bound
            if _is_private(name):
                self._use(name, node)

    def _dotted(self, node: ast.AST) -> str | None:
        """The dotted name that an expression stands for, if it leads to others' code."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._dotted(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return None

    def _attribute(self, node: ast.Attribute) -> None:
        dotted = self._dotted(node)
        if dotted is not None:
            if not isinstance(self._parents[node], ast.Attribute) and _is_private(dotted):
                self._use(re.sub(r"(\.__\w+__|\.default)$", "", dotted), node)
        elif _is_private(node.attr):
            if node.attr in OWNERS:
                if not self._defines(node):
                    self._of_owners(node.attr, node)
            elif node.attr not in self._own | OTHERS:
                self._found.strangers.add(f"{self._file}:{node.lineno} {ast.unparse(node)}")

    def _defines(self, node: ast.Attribute) -> bool:
        """Whether it is ``self._name`` of a class of the file that sets that itself."""
        if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            return False
        kind: ast.AST | None = node
        while kind is not None and not isinstance(kind, ast.ClassDef):
            kind = self._parents.get(kind)
        inside = ast.walk(kind) if kind is not None else ()
        return any(node.attr in _defined(one) for one in inside)

    def _text(self, node: ast.Constant, text: str) -> None:
        if not re.fullmatch(r"_[a-z]\w*", text) or text.endswith("_") or self._file == DIFFERENT:
            return
        if text in OWNERS:
            self._of_owners(text, node)
        elif text not in self._own | OTHERS | ENDS and not text.startswith("_fulgurite_"):
            self._texts.append((node.lineno, text))

    def _of_owners(self, name: str, node: ast.AST) -> None:
        for owner in OWNERS[name]:
            self._use(f"{owner}.{name}", node)

    def _use(self, name: str, node: ast.AST) -> None:
        for end in ENDS_AT:
            if name.startswith(f"{end}."):
                name = end
        self._found.add(name, self._kind(node), self._file)

    def _kind(self, node: ast.AST) -> str:
        """What happens where a name is gone that is used here."""
        below = self._file.startswith(COMPILER) and not self._file.endswith(OUTSIDE)
        if below and (self._function(node) is not None or self._file.endswith(IMPORTED_LATE)):
            return COMPILED
        if self._file == GATEWAY and self._function(node) is not None:
            return COMPILED
        above: ast.AST | None = node
        while above is not None:
            if isinstance(above, ast.Try) and "UnsupportedVersion" in ast.dump(above):
                return LATE
            above = self._parents.get(above)
        return AT_ONCE

    def _function(self, node: ast.AST) -> ast.FunctionDef | None:
        above = self._parents.get(node)
        while above is not None and not isinstance(above, ast.FunctionDef):
            above = self._parents.get(above)
        return above

    # -- patches -----------------------------------------------------------------------------

    def _patch(self, node: ast.Call) -> Site | None:
        """The patches that a call makes, of others' code; None if it makes none."""
        called = ast.unparse(node.func)
        named = {one.arg: one.value for one in node.keywords}
        if called == "patches_of":
            owner, names = node.args[0], self._keys(node.args[1], node)
        elif called == "Patch" and isinstance(named.get("name"), ast.Constant):
            owner, names = named["owner"], [ast.literal_eval(named["name"])]
        elif called == "patched" and node.args and self._file != "backends/patches.py":
            pairs = self._pairs_in(node.args[0], node)
            owner = pairs[0][0] if pairs else node.args[0]
            names = [name for _, name in pairs]
        else:
            return None
        text, dotted = ast.unparse(owner), self._dotted(owner)
        if text in PYTHONS or (self._file, text) in PYTHONS_HERE:
            return None
        full = STANDS_FOR.get((self._file, text)) or STANDS_FOR.get(
            (self._file, ast.unparse(node.args[0]) if node.args else text)
        )
        if full is None:
            full = tuple(f"{dotted or '?'}.{name}" for name in names or ["?"])
        elif names and "?" not in names:  # of what the owner stands for, what this one replaces
            named_here = tuple(name for name in full if name.rpartition(".")[2] in names)
            full = named_here or tuple(names)
        if any("?" in name for name in full):
            self._found.strangers.add(f"{self._file}:{node.lineno} patches {text}")
        return Site(full, self._said(named["why"], node) if "why" in named else "", self._file)

    @staticmethod
    def _is_pythons(full: str) -> bool:
        """Whether every class has such a method, or a module finds the name among Python's."""
        owner, _, name = full.rpartition(".")
        if hasattr(object, name):
            return True
        return hasattr(builtins, name) and not hasattr(pkgutil.resolve_name(owner), name)

    def _assigned(self, node: ast.expr, at: ast.expr) -> ast.expr:
        """What was last assigned to a name before a place, in its function or the file."""
        if not isinstance(node, ast.Name):
            return node
        values = [
            value
            for one in ast.walk(self._function(at) or self._tree)
            for target, value in _pairs(one)
            if isinstance(target, ast.Name) and target.id == node.id and value.lineno <= at.lineno
        ]
        return max(values, key=lambda one: one.lineno, default=node)

    def _keys(self, node: ast.expr, at: ast.expr) -> list[str]:
        made = self._assigned(node, at)
        keys = made.keys if isinstance(made, ast.Dict) else []
        return [ast.literal_eval(key) for key in keys if isinstance(key, ast.Constant)]

    def _pairs_in(self, node: ast.expr, at: ast.expr) -> list[tuple[ast.expr, str]]:
        """Owner and name of the changes in a list of (owner, name, value)."""
        made = self._assigned(node, at)
        return [
            (one.elts[0], getattr(one.elts[1], "value", "?"))
            for one in ast.walk(made)
            if isinstance(one, ast.Tuple) and len(one.elts) == 3
        ]

    def _said(self, node: ast.expr, at: ast.expr) -> str:
        made = self._assigned(node, at)
        return made.value if isinstance(made, ast.Constant) else ""


def _pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets of an assignment with their values: ``a, b = 1, 2`` has two."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    for target in node.targets if isinstance(node, ast.Assign) else ():
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _defined(node: ast.AST) -> Iterator[str]:
    """The names that a statement or expression defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


PAGE_HEAD = """# Private names: what is used of others that they do not promise

*Made by `python tests/tools/document_private_names.py` from the imports, attributes and patches in
the code.*

Fulgurite uses {private} names of torch, Lightning, torchmetrics and jsonargparse that are private
there (a part of the name begins with `_`), and replaces {public} public ones for a while, with
{patches} patches. A later version may move or drop any of them. So pip installs only versions that
were tested, which stand below; whoever forces a newer torch (`pip install --no-deps`) is told so
in a line at the first program, and each name is one of three kinds:

- What tracing a step or the Trainer needs is asked for where Fulgurite is imported, all of it at
  once (2 ms). Where a name is gone, that ends with `fulgurite.errors.UnsupportedVersion`, an
  `ImportError`, which says which name, what needs it, the version that is installed and those that
  were tested. So it is for the devices "CPU" and "GPU" too.
- What reads the classes of parameter files is asked for where one is first read. It is the
  same error, before anything was trained.
- Without what only compiling needs, programs run
  [operation by operation](backends.md#compiling-that-fails), and their line says what is gone.

`tests/backends/test_private_names.py` takes each name away in turn, in a process of its own, and
sees that.
"""
PATCHES_HEAD = """## Patches

Where others' code is replaced, and why. What becomes of each where the name is gone is above; where
an object lacks what is to be replaced in it, that is the same error. Not listed are patches of
Python's own modules (`math`, `logging`, ...).

| what | by | why |
|---|---|---|"""


def kinds(uses: dict[str, set[str]]) -> list[str]:
    """What happens where a name is gone; what is told at once is told nowhere else."""
    return [AT_ONCE] if AT_ONCE in uses else sorted(uses)


def required(found: Scan) -> dict[str, dict[str, str]]:
    """The names that are asked for where the package is imported, as in ``private_names``."""
    table: dict[str, dict[str, str]] = {}
    for name in sorted(found.uses):
        if AT_ONCE in found.uses[name]:
            owner, _, last = name.rpartition(".")
            table.setdefault(owner, {})[last] = min(found.uses[name][AT_ONCE])
    return table


def page(found: Scan) -> str:
    """The text of docs/private_names.md."""
    return "\n".join([PAGE_HEAD.format(**_numbers(found)), *_names(found), *_patches(found)])


def _numbers(found: Scan) -> dict[str, int]:
    private = [name for name in found.uses if _is_private(name)]
    return {
        "private": len(private),
        "public": len(found.uses) - len(private),
        "patches": len(found.sites),
    }


def _names(found: Scan) -> Iterator[str]:
    for package in TESTED:
        rows = [name for name in sorted(found.uses) if name.partition(".")[0] == package]
        yield from (f"## {package}\n", f"{package}{TESTED[package]}.\n") if rows else ()
        yield from ("| name | used in | where it is gone |", "|---|---|---|") if rows else ()
        for name in rows:
            uses = found.uses[name]
            files = sorted({file for kind in uses for file in uses[kind]})
            gone = OF_TEMPLATES.get(name) or "; ".join(GONE[kind] for kind in kinds(uses))
            yield f"| `{name}` | {_listed(files)} | {gone} |"
        yield from ("",) if rows else ()


def _listed(files: list[str]) -> str:
    more = f" and {len(files) - 2} more" if len(files) > 3 else ""
    return ", ".join(f"`{file}`" for file in (files[:2] if more else files)) + more


def _patches(found: Scan) -> Iterator[str]:
    yield PATCHES_HEAD
    for site in sorted(found.sites, key=lambda one: (one.file, one.names)):
        names = ", ".join(f"`{name}`" for name in site.names)
        yield f"| {names} | `{site.file}` | {site.why} |"
    yield ""


def table(found: Scan) -> str:
    """The text of ``backends/private_names.json``."""
    return json.dumps(required(found), indent=2) + "\n"


if __name__ == "__main__":
    one = scan()
    if one.strangers:
        raise SystemExit("\n".join(["Whose are these? OWNERS is to say it:", *one.strangers]))
    TABLE.write_text(table(one), encoding="utf-8")
    PAGE.write_text(page(one), encoding="utf-8")
