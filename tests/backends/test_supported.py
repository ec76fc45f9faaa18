"""The versions that are supported: what is said where one is too new, or lacks something."""

from __future__ import annotations

import importlib.metadata
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from document_private_names import allowed
from harness import fit
from models import Classifier, loader, mlp
from torch import nn

import fulgurite
from fulgurite.backends import supported
from fulgurite.backends.csx.program import announcements
from fulgurite.backends.patches import patched
from fulgurite.backends.supported import (
    TESTED,
    UnsupportedVersion,
    has,
    newer_than_tested,
    refuse_missing,
)


def test_the_versions_are_those_that_are_installed_with_the_package() -> None:
    assert allowed() == TESTED


def test_the_error_names_the_version_the_names_who_needs_them_and_what_was_tested() -> None:
    names = {"torch.nn.Module": {"_nowhere": "a.py", "_apply": "b.py"}, "torch._gone": {"x": "c"}}
    with pytest.raises(ImportError) as caught:
        refuse_missing(names)
    assert type(caught.value) is fulgurite.errors.UnsupportedVersion is UnsupportedVersion
    assert str(caught.value) == (
        f"torch {importlib.metadata.version('torch')} has no torch.nn.Module._nowhere, which a.py"
        f" needs; nor torch._gone.x. Fulgurite was tested with torch{TESTED['torch']}.\n"
        f"  Remedy: pip install 'torch{TESTED['torch']}'"
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [("import nowhere_at_all", "No module named"), ("raise ImportError('GLIBC')", "GLIBC")],
)
def test_a_module_that_is_there_and_cannot_be_imported_says_why_itself(
    text: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"torchbroken{len(text)}"  # what was imported once is not looked for again
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=error) as caught:
        refuse_missing({f"{name}.inner": {"x": "a.py"}})
    assert type(caught.value) is not UnsupportedVersion


class Owner(nn.Module):
    """Has names of every kind."""

    annotated: int

    def __init__(self) -> None:
        super().__init__()
        self.set_here = 1

    @property
    def asked(self) -> bool:
        return getattr(self, "by_name", False)


@pytest.mark.parametrize(
    ("name", "there"),
    [
        *((name, True) for name in ("annotated", "set_here", "by_name", "asked", "_buffers")),
        *(("forward", True), ("__repr__", True), ("nowhere", False)),
    ],
)
def test_a_class_has_what_its_code_gives_to_its_objects(name: str, there: bool) -> None:
    assert has(Owner, name) is there


def test_a_patch_of_what_is_gone_is_an_error_of_the_version_that_lacks_it() -> None:
    for owner in (nn.Linear(2, 2), nn.Linear, torch.nn.functional):
        with pytest.raises(UnsupportedVersion, match=r"^torch .* has no torch\.nn\..*\.nowhere"):
            with patched([(owner, "nowhere", 1)]):
                pytest.fail("it was replaced")


def test_a_patch_may_add_to_what_is_no_package_of_others_and_stand_before_pythons_own() -> None:
    module, ours = ModuleType("ours"), SimpleNamespace()
    with patched([(module, "x", 1), (ours, "y", 2), (torch.nn.functional, "min", math.fmod)]):
        assert (module.x, ours.y, vars(torch.nn.functional)["min"]) == (1, 2, math.fmod)
    assert not hasattr(module, "x")


@pytest.mark.fits
@pytest.mark.parametrize("version", ["2.16.0", "2.16.0a0+git1234", "2.20.1", "3.0.0"])
def test_a_newer_torch_is_told_once_at_the_first_program(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(announcements, "say", lambda trainer, line: said.append(line))
    monkeypatch.setattr(supported.torch, "__version__", version)
    for _ in range(2):
        fit(lambda: Classifier(mlp()), lambda: (loader(32),), static=True)
        announcements._kinds.clear()  # a line of each kind is said once
    newer, *others = said
    assert newer == newer_than_tested()
    assert newer not in others
    assert newer.startswith(f"CSX: torch {version} is newer than what Fulgurite was tested with")
    assert TESTED["torch"] in newer
    assert "one by one" in newer
    assert sum("training program, " in line for line in others) == 2


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.1", "2.15.0", "2.15.9"])
def test_a_torch_that_was_tested_is_not_told(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported.torch, "__version__", version)
    assert newer_than_tested() is None


def test_the_names_that_are_asked_for_are_many_and_all_there() -> None:
    names = [name for row in supported.REQUIRED.values() for name in row]
    assert len(names) > 200
    refuse_missing(supported.REQUIRED)


def test_the_table_says_files_that_are_there() -> None:
    root = Path(supported.__file__).parents[1]
    files = {file for row in supported.REQUIRED.values() for file in row.values()}
    assert [file for file in files if not (root / file).is_file()] == []
