"""Install the package as a stranger does, and try its three faces: script, parameter file, command.

    python tests/tools/smoke.py                         the lowest and the newest dependencies
    python tests/tools/smoke.py newest --torch 2.15.0   another torch than .ci/constraints.txt has
    python tests/tools/smoke.py here                    the packages of this environment; no index

Wheel and sdist are built; each is installed in an empty environment and run in an empty folder. The
lowest version of a dependency is the one that its range in pyproject.toml begins with, which so has
to be there and to work; what dependencies need themselves is the newest that fits. Then the extra
``examples`` is added and an example runs. The lowest versions that an extra names must at least be
there to be installed together. The index is the one that pip is configured with.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

sys.path.append(str(Path(__file__).parents[1] / "support"))
from pasted import files, program

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
EXAMPLES = "examples"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist", "lightning_logs", "runs")
LIMIT_S = 1200

NET = """\
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Net(LightningModule):
    def __init__(self, width: int):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1))
    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

def data():
    return DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
"""
FILE = """\
trainer:
  init:
    backend: {backend_type: CSX, background: false}
    model: {class_path: net.Net, init_args: {width: 4}}
    optimizer: {SGD: {lr: 0.1}}
    loop: {max_steps: 20}
  fit:
    train_dataloader: {data_processor: net.data}
"""


def run(*command: str | Path, cwd: Path, statuses: tuple[int, ...] = (0,), **variables: str) -> str:
    """Run a command without this process's PYTHON settings; returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode in statuses, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def pyproject() -> dict[str, Any]:
    """What pyproject.toml says."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def checkout(folder: Path) -> Path:
    """A copy of the repository: builds write beside what they read."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return folder


def build(source: Path, into: Path, *options: str) -> list[Path]:
    """Build with the setuptools that is here where it is new enough, else with the index's."""
    [backend] = map(Requirement, pyproject()["build-system"]["requires"])
    found = [one.version for one in importlib.metadata.distributions(name=backend.name)]
    if found and found[0] in backend.specifier:
        options = (*options, "--no-isolation")
    run(sys.executable, "-m", "build", *options, "--outdir", into, source, cwd=into.parent)
    return sorted(into.iterdir())


def site_packages(python: Path) -> Path:
    """Where an environment keeps its packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(python, "-c", code, cwd=python.parent).strip())


def environment(folder: Path) -> Path:
    """Make an empty environment without pip; returns its interpreter."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def install_linked(python: Path, wheel: Path) -> None:
    """Install a wheel alone; what it depends on are the packages that are here.

    They come by a path in a .pth file. Python does not read .pth files of folders added so, and the
    editable install here is one: it cannot be what is imported.
    """
    options = ("--no-deps", "--no-index", "--quiet")
    run(*PIP, "--python", python, "install", *options, wheel, cwd=wheel.parent)
    here = [path for path in sys.path if path.endswith("-packages")]
    (site_packages(python) / "dependencies.pth").write_text("\n".join(here) + "\n")


def requirements(extra: str = "") -> list[Requirement]:
    """What the project depends on, or what an extra adds, with the extras that it names."""
    project = pyproject()["project"]
    texts = project["optional-dependencies"][extra] if extra else project["dependencies"]
    found: list[Requirement] = []
    for requirement in map(Requirement, texts):
        own = requirement.name == project["name"]
        nested = (one for name in requirement.extras for one in requirements(name))
        found += nested if own else [requirement]
    return found


def lowest(wanted: list[Requirement]) -> list[str]:
    """The constraints that leave of each range its beginning."""
    lines = []
    for one in wanted:
        begin = [clause.version for clause in one.specifier if clause.operator == ">="]
        assert len(begin) == 1, f"{one}: a range has one beginning"
        lines.append(f"{one.name}=={begin[0]}")
    return lines


def installed(python: Path, wanted: list[Requirement]) -> str:
    """Names and versions of requirements, as an environment has them."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    names = [one.name for one in wanted]
    found = run(python, "-c", code, *names, cwd=python.parent).split()
    return ", ".join(f"{name} {found[i]}" for i, name in enumerate(names))


def try_faces(python: Path, folder: Path, compiles: bool = True) -> None:
    """Run a script, a parameter file and the commands in an empty folder.

    Args:
        compiles: whether the installed torch's compiler has what ours asks for.
    """
    command = python.with_name("fulgurite")
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    for name, text in {**files("README"), "script.py": program("README")}.items():
        (folder / name).write_text(text)
    said = run(python, "script.py", cwd=folder, **cache)
    assert "training program" in said, said
    assert re.search(r"^CSX: [\d,]+ batches in ", said, re.M), said

    (folder / "net.py").write_text(NET)
    (folder / "run.yaml").write_text(FILE)
    assert run(command, "check", "run.yaml", cwd=folder, **cache) == "run.yaml: no problems\n"
    said = run(command, "fit", "run.yaml", cwd=folder, **cache)
    how = "compiled in" if compiles else r"run operation by operation \(torch's compiler failed"
    assert re.search(rf"training program, \d+ operations, {how}", said), said
    assert (folder / "model_dir" / "checkpoint_20.ckpt").is_file(), said

    version = f"fulgurite {pyproject()['project']['version']}, "
    assert run(command, "--version", cwd=folder, **cache).startswith(version)
    said = run(command, "doctor", cwd=folder, statuses=(0, 1), **cache)
    # all else that it may find wrong: it stops what takes long
    found = said.count("not done after") + (not compiles)
    assert "self-test" in said, said
    assert said.count("MEND") == found, said


def install(python: Path, wanted: str | Path, limits: list[str], *options: str) -> None:
    """Install from the index, within limits; of what others have built only wheels."""
    file = python.parent / "limits.txt"
    file.write_text("\n".join(limits) + "\n")
    flags = ("--quiet", "--only-binary=:all:", "--constraint", file, *options)
    said = run(*PIP, "--python", python, "install", *flags, wanted, cwd=python.parent)
    assert "yanked" not in said, said


def try_installed(archive: Path, kind: str, torch: list[str], folder: Path) -> None:
    """Install an archive and what it depends on, and try it; prints what was installed.

    Args:
        archive: a wheel or an sdist.
        kind: "lowest" or "newest".
        torch: the constraint of the newest torch that is meant.
        folder: an empty one.
    """
    python = environment(folder / "venv")
    core, examples = requirements(), requirements(EXAMPLES)
    backend = Requirement(pyproject()["build-system"]["requires"][0])
    limits, options = torch, list[str]()
    if kind == "lowest":  # also of what builds an sdist
        limits, options = lowest([backend, *core, *examples]), ["--no-build-isolation"]
        install(python, backend.name, limits)
    install(python, archive, limits, *options)
    print(f"{archive.name}: {installed(python, core)}", flush=True)
    # torch 2.11 and 2.12, with which the range begins, run programs operation by operation
    try_faces(python, empty(folder), compiles=kind != "lowest")

    install(python, f"fulgurite[{EXAMPLES}] @ {archive.as_uri()}", limits, *options)
    print(f"  {EXAMPLES}: {installed(python, examples)}", flush=True)
    arguments = ("--epochs=1", "--autogen-policy=disabled", f"--out={folder / 'digits'}")
    said = run(python, ROOT / "examples" / "digits.py", *arguments, cwd=folder)
    assert "test accuracy" in said, said


def try_extras(wheel: Path, torch: list[str], folder: Path) -> None:
    """Look whether the lowest versions that each extra names can be installed together."""
    python = environment(folder / "venv")
    for extra in pyproject()["project"]["optional-dependencies"]:
        limits = lowest(requirements(extra))
        wanted = f"fulgurite[{extra}] @ {wheel.as_uri()}"
        install(python, wanted, [*limits, *torch], "--dry-run")
        print(f"  {extra}: can be installed as {', '.join(limits)}", flush=True)


def empty(folder: Path) -> Path:
    """A new folder in a folder."""
    made = folder / "empty"
    made.mkdir()
    return made


def main() -> None:
    """Try what was asked for; an AssertionError has what the command that failed printed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = ("lowest", "newest", "here")
    parser.add_argument("kinds", nargs="*", default=["lowest", "newest"], metavar="|".join(kinds))
    parser.add_argument("--torch", help="the newest that is meant; its wheel may be gigabytes")
    options = parser.parse_args()
    if unknown := {*options.kinds} - {*kinds}:
        parser.error(f"expected {', '.join(kinds)}; got {', '.join(sorted(unknown))}")
    torch = [f"torch=={options.torch}"] if options.torch else CONSTRAINTS.read_text().splitlines()
    with tempfile.TemporaryDirectory() as at:
        archives = build(checkout(Path(at, "checkout")), Path(at, "dist"))
        [wheel] = (one for one in archives if one.suffix == ".whl")
        for kind in options.kinds:
            print(f"{kind}:", flush=True)
            if kind == "here":
                python = environment(Path(at, "venv"))
                install_linked(python, wheel)
                print(f"{wheel.name}: {installed(python, requirements())}", flush=True)
                try_faces(python, empty(Path(at)))
                continue
            for archive in archives:
                with tempfile.TemporaryDirectory(dir=at) as folder:
                    try_installed(archive, kind, torch, Path(folder))
            if kind == "lowest":
                with tempfile.TemporaryDirectory(dir=at) as folder:
                    try_extras(wheel, CONSTRAINTS.read_text().splitlines(), Path(folder))
    print("all of it works")


if __name__ == "__main__":
    main()
