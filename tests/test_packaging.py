"""The package as a stranger gets it: built, installed by itself, imported from anywhere."""

from __future__ import annotations

import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from smoke import (
    ROOT,
    build,
    checkout,
    environment,
    install_linked,
    pyproject,
    run,
    site_packages,
    try_faces,
)

pytestmark = pytest.mark.packaging

ROOMS = {
    "trainer": "fulgurite",
    "loops": "fulgurite/loops",
    "callbacks": "fulgurite/callbacks",
    "backends": "fulgurite/backends",
}

PROBE = """
import fulgurite, fulgurite.loops, fulgurite.callbacks, fulgurite.backends
from fulgurite import Trainer, backend
for module in fulgurite, fulgurite.loops, fulgurite.callbacks, fulgurite.backends:
    print(module.__file__)
print(Trainer.__module__, backend.__module__)
"""


def contents(wheel: Path) -> dict[str, int]:
    """The files of a wheel, each with its checksum."""
    with zipfile.ZipFile(wheel) as archive:
        return {file.filename: file.CRC for file in archive.infolist() if not file.is_dir()}


def version() -> str:
    """The version in pyproject.toml."""
    return str(pyproject()["project"]["version"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository."""
    return checkout(tmp_path_factory.mktemp("source") / "checkout")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout."""
    pytest.importorskip("build", reason="python -m build is not installed (extra dev)")
    (built,) = build(source, tmp_path_factory.mktemp("wheel") / "dist", "--wheel")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment: the wheel, and the dependencies that are here."""
    python = environment(tmp_path_factory.mktemp("fresh") / "venv")
    install_linked(python, wheel)
    return python


def test_the_wheel_holds_only_fulgurite_at_its_top(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in contents(wheel)}
    assert tops == {"fulgurite", f"fulgurite-{version()}.dist-info"}


def test_the_wheel_holds_every_file_of_the_rooms_and_nothing_else(
    wheel: Path, source: Path
) -> None:
    expected = {
        f"{package}/{path.relative_to(source / room).as_posix()}"
        for room, package in ROOMS.items()
        for path in (source / room).rglob("*")
        if path.is_file()
    }
    assert {name for name in contents(wheel) if name.startswith("fulgurite/")} == expected
    assert {
        "fulgurite/py.typed",
        "fulgurite/trainer.py",
        "fulgurite/backends/csx/program/step_function.py",
    } <= expected


def test_the_wheel_says_its_licence_and_has_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        about = f"fulgurite-{version()}.dist-info"
        metadata = message_from_bytes(archive.read(f"{about}/METADATA"))
        licence = archive.read(f"{about}/licenses/LICENSE").decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert licence.split()[:4] == ["Apache", "License", "Version", "2.0,"]


def test_the_sdist_builds_the_same_wheel(wheel: Path, source: Path, tmp_path: Path) -> None:
    built = build(source, tmp_path / "dist")  # build makes this wheel from this sdist
    from_sdist, sdist = sorted(built, key=lambda path: path.suffix != ".whl")
    with tarfile.open(sdist) as archive:
        tops = {tuple(name.split("/")[:2]) for name in archive.getnames() if "/" in name}
    files = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "MANIFEST.in", *ROOMS}
    made = {"PKG-INFO", "setup.cfg", "fulgurite.egg-info"}
    assert tops == {(f"fulgurite-{version()}", name) for name in files | made}
    assert from_sdist.name == wheel.name
    assert contents(from_sdist) == contents(wheel)


@pytest.mark.parametrize("where", ["an empty folder", "the checkout"])
def test_the_installed_wheel_is_what_is_imported(python: Path, tmp_path: Path, where: str) -> None:
    cwd = ROOT if where == "the checkout" else tmp_path
    *files, homes = run(python, "-c", PROBE, cwd=cwd).splitlines()
    installed = site_packages(python)
    assert [Path(file).resolve() for file in files] == [
        (installed / package / "__init__.py").resolve() for package in ROOMS.values()
    ]
    assert homes == "fulgurite.trainer fulgurite.backends"


def test_the_installed_version_is_that_of_the_project(python: Path, tmp_path: Path) -> None:
    code = """import fulgurite
from importlib import metadata
print(fulgurite.__version__, metadata.version("fulgurite"))"""
    assert run(python, "-c", code, cwd=tmp_path).split() == [version()] * 2


@pytest.mark.compiler
def test_script_parameter_file_and_command_work_from_the_wheel(
    python: Path, tmp_path: Path
) -> None:
    try_faces(python, tmp_path)
