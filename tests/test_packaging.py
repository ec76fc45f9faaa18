"""The package as a stranger gets it: built, installed by itself, imported from anywhere."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]
ROOMS = {
    "trainer": "fulgurite",
    "loops": "fulgurite/loops",
    "callbacks": "fulgurite/callbacks",
    "backends": "fulgurite/backends",
}
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist", "lightning_logs", "runs")

PROBE = """
import fulgurite, fulgurite.loops, fulgurite.callbacks, fulgurite.backends
from fulgurite import Trainer, backend
for module in fulgurite, fulgurite.loops, fulgurite.callbacks, fulgurite.backends:
    print(module.__file__)
print(Trainer.__module__, backend.__module__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without this process's PYTHON settings; returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def build(source: Path, into: Path, *options: str) -> list[Path]:
    """Build with the setuptools that is here where it is new enough, else with the index's."""
    if importlib.util.find_spec("setuptools") is not None:
        version = importlib.metadata.version("setuptools").split(".")
        # since 70.1, setuptools makes wheels without the package wheel
        if (int(version[0]), int(version[1])) >= (70, 1):
            options = (*options, "--no-isolation")
    run(sys.executable, "-m", "build", *options, "--outdir", into, source, cwd=into.parent)
    return sorted(into.iterdir())


def names(wheel: Path) -> set[str]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def version() -> str:
    """The version in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository: builds write beside what they read."""
    folder = tmp_path_factory.mktemp("source") / "checkout"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    if not (folder / "README.md").exists():
        (folder / "README.md").write_text("# Fulgurite\n")
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout."""
    pytest.importorskip("build", reason="python -m build is not installed (extra dev)")
    (built,) = build(source, tmp_path_factory.mktemp("wheel") / "dist", "--wheel")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment: the wheel, and the dependencies that are here.

    They come by a path in a .pth file. Python does not read .pth files of folders added so, and the
    editable install here is one: it cannot be what is imported.
    """
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=folder.parent)
    here = [path for path in sys.path if path.endswith("-packages")]
    (site_packages(python) / "dependencies.pth").write_text("\n".join(here) + "\n")
    return python


def site_packages(python: Path) -> Path:
    """Where an environment keeps its packages."""
    return Path(
        run(
            python,
            "-c",
            "import sysconfig; print(sysconfig.get_path('purelib'))",
            cwd=python.parent,
        ).strip()
    )


def test_the_wheel_holds_only_fulgurite_at_its_top(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names(wheel)}
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
    assert {name for name in names(wheel) if name.startswith("fulgurite/")} == expected
    assert {
        "fulgurite/py.typed",
        "fulgurite/trainer.py",
        "fulgurite/backends/csx/program/step_function.py",
    } <= expected


def test_the_sdist_builds_the_same_wheel(wheel: Path, source: Path, tmp_path: Path) -> None:
    built = build(source, tmp_path / "dist")  # build makes this wheel from this sdist
    from_sdist, sdist = sorted(built, key=lambda path: path.suffix != ".whl")
    with tarfile.open(sdist) as archive:
        assert {name.split("/")[0] for name in archive.getnames()} == {f"fulgurite-{version()}"}
    assert from_sdist.name == wheel.name
    assert names(from_sdist) == names(wheel)


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
