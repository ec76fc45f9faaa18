"""The two files of a report: written anew with each program, whole at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import QUIET, csx, fit
from models import Classifier, loader, mlp
from reports import Validated, built, read

import fulgurite
from fulgurite.backends.csx.program import announcements
from fulgurite.backends.report import report_file

pytestmark = pytest.mark.fits


def stages(folder: Path) -> list[str]:
    return [one["stage"] for one in read(folder)["programs"]]


def train(folder: Path) -> fulgurite.Trainer:
    trainer = fulgurite.Trainer(backend=csx(artifact_dir=folder), **QUIET, max_epochs=1)
    trainer.fit(Classifier(mlp()), loader(32))
    return trainer


def test_each_program_of_a_run_is_a_section_of_one_page(tmp_path: Path) -> None:
    built(tmp_path, num_sanity_val_steps=0)
    assert stages(tmp_path) == ["training", "validation"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<article") == 2
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        *("report.html", "report.json", "training.txt", "validation.txt"),
    ]


def test_another_run_takes_the_place_of_the_same_stage_alone(tmp_path: Path) -> None:
    first = train(tmp_path)
    written = read(tmp_path)
    first.validate(Validated(mlp()), loader(32), verbose=False)
    assert stages(tmp_path) == ["training", "validation"]
    assert read(tmp_path)["programs"][0] == written["programs"][0]
    train(tmp_path)
    assert stages(tmp_path) == ["validation", "training"]


@pytest.mark.long
def test_programs_of_one_stage_of_one_run_are_all_there(tmp_path: Path) -> None:
    built(tmp_path, limit_val_batches=0, backend={"max_programs": 2})
    trainer = fulgurite.Trainer(backend=csx(artifact_dir=tmp_path), **QUIET, max_epochs=1)
    trainer.fit(Classifier(mlp()), loader(40))  # the last batch has 8 samples
    assert stages(tmp_path) == ["training", "training"]
    assert "shape" in read(tmp_path)["programs"][1]["reason"]


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "report.json"
    file.write_text("before")

    def full(self: Path, text: str, **options: Any) -> None:
        with self.open("w") as opened:
            opened.write(text[:3])
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            report_file._replace(file, "after")
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_a_run_without_a_folder_notes_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("recording_build", "_write", "writing_graphs"):
        ran = f"ran {name}"
        monkeypatch.setattr(announcements, name, lambda *args, ran=ran: pytest.fail(ran))
    run = fit(lambda: Classifier(mlp()), lambda: (loader(32),), static=True)
    assert len(run.losses) == 2
