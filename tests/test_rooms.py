"""The house: imports flow down, every folder ships, nothing else lies at the top."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import shutil
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("trainer", "loops", "callbacks", "backends")
"""From the top down: a room imports from itself and from those to its right."""

FLOORS = {
    "backends/csx": (
        *("diagnostics", "graph", "streaming", "compile", "costs", "state", "hyperparams"),
        *("contract", "objects", "capture", "program", "plugins", "distributed"),
    ),
    "backends/csx/compile": (*("store", "programs", "inductor", "checking", "background", "host"),),
    "trainer/config": ("document", "types", "legacy", "schema", "run"),
}
"""Rooms inside rooms, from the ground up: each imports from itself and from those before it."""
MAY_COMPILE = ("compile", "costs", "program", "plugins")
"""Who imports from ``backends/csx/compile``."""
FACES = tuple(f"backends/csx/{room}" for room in ("state", "contract", "objects", "capture"))
"""Rooms that list what others use of them: these import it from the room, not from its files."""
INNER = [(house, room) for house, rooms in FLOORS.items() for room in rooms]

MOST_LINES = {ast.Module: 500, ast.ClassDef: 200, ast.FunctionDef: 60}
"""Of a file, a class and a function inside the houses."""

MOST_FILES = 12
"""Of a room, besides its ``__init__``."""
LISTS = {"callbacks", "backends/csx/graph/passes"}
"""Rooms whose files are one like the other: as many as there are."""

CONTRIBUTING = "docs/contributing.md"

PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
BUILD = ("pyproject.toml", "MANIFEST.in", "LICENSE", "Makefile")
TOP = {*BUILD, *PAGES, "tests", "examples", "docs", *ROOMS}


def files(*folders: str) -> list[Path]:
    """The Python files of folders, relative to the root."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in found)


def parsed(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, at any depth; a relative one begins with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def room_of(name: str) -> str | None:
    """The room of a dotted name of this package; the face and its own modules are ``trainer``."""
    parts = name.split(".")
    if parts[0] != "fulgurite":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS[1:] else "trainer"


def lengths(path: Path) -> Iterator[tuple[int, str, type, int]]:
    """Line, name, kind and lines of a file, and of every class and function in it."""
    tree = parsed(path)
    yield 1, path.name, ast.Module, len((ROOT / path).read_text(encoding="utf-8").splitlines())
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            kind = ast.ClassDef if isinstance(node, ast.ClassDef) else ast.FunctionDef
            yield node.lineno, node.name, kind, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("fulgurite", "trainer"),
        ("fulgurite.Trainer", "trainer"),
        ("fulgurite.trainer.Trainer", "trainer"),
        ("fulgurite.optim.schedules", "trainer"),
        ("fulgurite.loops", "loops"),
        ("fulgurite.backends.csx.graph.graph.Graph", "backends"),
        ("torch.nn", None),
    ],
)
def test_a_name_belongs_to_a_room(name: str, room: str | None) -> None:
    assert room_of(name) == room


@pytest.mark.parametrize("room", ROOMS)
def test_imports_never_flow_up(room: str) -> None:
    assert files(room), f"{room}/ holds no Python file"
    above = ROOMS[: ROOMS.index(room)]
    wrong = [
        f"{path}:{line} imports {name}"
        for path in files(room)
        for line, name in imported(parsed(path))
        if room_of(name) in above
    ]
    assert wrong == []


@pytest.mark.parametrize(("house", "room"), INNER)
def test_imports_never_flow_up_inside_a_house(house: str, room: str) -> None:
    package = ".".join(["fulgurite", *house.removeprefix("trainer/").split("/")])
    above = FLOORS[house][FLOORS[house].index(room) + 1 :]
    closed = {*above} if room in MAY_COMPILE else {*above, "compile"}
    wrong = [
        f"{path}:{line} imports {name}"
        for path in files(f"{house}/{room}")
        for line, name in imported(parsed(path))
        for other in closed
        if name.startswith(f"{package}.{other}.")
    ]
    assert wrong == []


def test_one_room_and_one_file_import_the_compiler() -> None:
    found = {
        str(path)
        for path in files(*ROOMS)
        for _, name in imported(parsed(path))
        if name.startswith("torch._inductor")
    }
    room = "backends/csx/compile/inductor"
    assert {path for path in found if not path.startswith(f"{room}/")} == {
        "backends/torch_compiler.py"
    }
    assert len(found) <= 4


def test_who_shows_a_report_has_its_data_alone() -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for path in files("backends/report")
        for line, name in imported(parsed(path))
        if re.match(r"(torch|lightning|fulgurite(?!\.backends\.report\.))\b", name)
    ]
    assert wrong == []


@pytest.mark.parametrize("room", FACES)
def test_what_a_room_has_a_face_for_is_imported_from_it(room: str) -> None:
    package = ".".join(["fulgurite", *room.split("/")])
    wrong = [
        f"{path}:{line} imports {name}"
        for path in files(*ROOMS)
        if not path.is_relative_to(room)
        for line, name in imported(parsed(path))
        if name.startswith(f"{package}.") and name.count(".") > package.count(".") + 1
    ]
    assert wrong == []


FACE = "fulgurite.backends.csx"


@pytest.mark.parametrize("room", ["loops", "callbacks"])
def test_loops_and_callbacks_know_the_static_graph_backend_by_its_face_alone(room: str) -> None:
    deeper = [
        f"{path}:{node.lineno} imports from {node.module}"
        for path in files(room)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{FACE}.")
        if node.module != FACE
    ]
    whole = [name for path in files(room) for _, name in imported(parsed(path)) if name == FACE]
    assert (deeper, whole) == ([], [])


def test_the_face_has_what_type_checkers_see_and_nobody_misses() -> None:
    tree = parsed(Path("backends/csx/__init__.py"))
    seen = {name for node in tree.body if isinstance(node, ast.If) for _, name in imported(node)}
    short = {name.rpartition(".")[2] for name in seen}
    used = {
        name.removeprefix(f"{FACE}.")
        for path in files("loops", "callbacks")
        for _, name in imported(parsed(path))
        if name.startswith(f"{FACE}.")
    }
    assert short == used
    assert len(short) <= 15
    face = importlib.import_module(FACE)
    assert {
        name
        for name in short
        if getattr(face, name)
        is not pkgutil.resolve_name(next(one for one in seen if one.endswith(f".{name}")))
    } == set()
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = face.Nothing


def test_a_room_has_at_most_twelve_files() -> None:
    rooms = Counter(str(path.parent) for path in files(*ROOMS) if path.stem != "__init__")
    assert {room for room, count in rooms.items() if count > MOST_FILES} == LISTS


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.stem for path in files(*ROOMS))
    assert {name for name, count in names.items() if count > 1} == {"__init__"}


def test_one_file_alone_compares_versions() -> None:
    asked = re.compile(r"\b__version__\b|\bversion\(|\bversion_info\b|\bVersion\b")
    wrong = [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path in files(*ROOMS)
        if path.name not in ("torch_versions.py", "supported.py")  # the second: which are supported
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Compare) and asked.search(ast.unparse(node))
    ]
    assert wrong == [], "how versions differ is said in backends/torch_versions.py"


def test_no_room_reads_opcodes() -> None:
    """They are others in each version of Python: names and lines come from the syntax tree."""
    found = {
        f"{path}: {name}"
        for path in files(*ROOMS)
        for tree in [parsed(path)]
        for name in (
            *(name for _, name in imported(tree)),
            *(f".{node.attr}" for node in ast.walk(tree) if isinstance(node, ast.Attribute)),
        )
        if name.partition(".")[0] in ("dis", "opcode") or name in (".co_code", "._co_code_adaptive")
    }
    assert found == set()


def test_no_import_is_relative_or_by_a_rooms_folder() -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for path in files(*ROOMS, "tests", "examples")
        for line, name in imported(parsed(path))
        if name.startswith(".") or name.split(".")[0] in ROOMS
    ]
    assert wrong == []


def test_every_folder_of_the_rooms_ships_and_nothing_else_is_listed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = {"trainer": "fulgurite"} | {room: f"fulgurite.{room}" for room in ROOMS[1:]}
    assert setuptools["package-dir"] == {name: room for room, name in names.items()}
    folders = {path.parent for path in files(*ROOMS)}
    packages = [".".join([names[folder.parts[0]], *folder.parts[1:]]) for folder in sorted(folders)]
    assert sorted(setuptools["packages"]) == sorted(packages)
    assert [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []


def test_every_file_opens_with_a_docstring() -> None:
    paths = files(*ROOMS, "tests", "examples")
    assert [str(path) for path in paths if not ast.get_docstring(parsed(path))] == []


@pytest.mark.parametrize(
    "folder",
    [
        *(f"{house}/{room}" for house, room in INNER),
        *("backends/csx", "backends/csx/graph/passes", "backends/report", "loops"),
        *("trainer/commands", "trainer/nn", "trainer/optim/scheduler", "trainer/runners"),
    ],
)
def test_a_folders_docstring_names_each_of_its_files(folder: str) -> None:
    listing = ast.get_docstring(parsed(Path(folder, "__init__.py"))) or ""
    names = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
    assert {name for name in names if not re.search(rf"\b{name}\b", listing)} == set()


@pytest.mark.parametrize("house", FLOORS)
def test_the_tests_of_a_house_lie_in_the_folders_of_its_rooms(house: str) -> None:
    folder = ROOT / "tests" / house
    tests = {path.relative_to(folder) for path in folder.rglob("test_*.py")}
    assert {path.parts[0] for path in tests} == set(FLOORS[house])


def test_beside_the_rooms_tests_are_helpers_commands_and_benchmarks() -> None:
    folders = {path.parts[1] for path in files("tests") if len(path.parts) > 2}
    assert folders - {*ROOMS, "support", "tools", "benchmarks", "compat"} == set()
    loose = {path.name for path in files("tests") if len(path.parts) == 2}
    assert {name for name in loose if not name.startswith("test_")} == {"conftest.py"}


@pytest.mark.parametrize("house", FLOORS)
def test_the_map_has_the_rooms_in_their_order(house: str) -> None:
    page = (ROOT / CONTRIBUTING).read_text(encoding="utf-8")
    [line] = re.findall(rf"^ +{house}: +(.*)$", page, re.MULTILINE)
    assert re.findall(r"\w+", line) == list(FLOORS[house])


def test_what_the_map_names_is_where_it_says() -> None:
    page = (ROOT / CONTRIBUTING).read_text(encoding="utf-8")
    path = rf"(?:{'|'.join((*ROOMS, 'tests'))})/[\w/]*(?:\.\w+)?"
    paths = set(re.findall(rf"`(?:python )?({path})", page))
    assert {name for name in paths if not (ROOT / name).exists()} == set()
    named = re.findall(rf"`(\w+)`\s+in\s+`({path})`", page)
    assert named
    lost = {
        f"{name} in {file}"
        for name, file in named
        if (ROOT / file).exists()
        and not re.search(rf"\b{name}\b", (ROOT / file).read_text(encoding="utf-8"))
    }
    assert lost == set()


@pytest.mark.parametrize("house", FLOORS)
def test_no_file_class_or_function_of_a_house_is_too_long(house: str) -> None:
    too_long = [
        f"{path}:{line} {name}: {lines} lines"
        for path in files(house)
        for line, name, kind, lines in lengths(path)
        if lines > MOST_LINES[kind]
    ]
    assert too_long == []


@pytest.mark.process
def test_only_the_agreed_files_and_folders_lie_at_the_top() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what is tracked cannot be known")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tops = {name.split("/")[0] for name in listed.stdout.split("\0") if name}
    assert {top for top in tops if not top.startswith(".")} - TOP == set()
