"""Examples and benchmarks run, with few steps."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pasted import ROOT, blocks


def run(*arguments: str, **environment: str) -> str:
    """What ``python arguments`` prints; it must succeed."""
    result = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},  # tiny steps, busy machines
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_digits(device: str, tmp_path: Path) -> None:
    policy = ["--autogen-policy", "disabled", "--compare"] if device == "CSX" else []
    text = run(
        str(ROOT / "examples/digits.py"),
        f"--device={device}",
        "--epochs=1",
        f"--out={tmp_path / 'digits'}",
        *policy,
    )
    assert "test accuracy" in text
    picture = Path(text.partition("curves ")[2].split()[0])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert Path(text.partition("checkpoint ")[2].split()[0]).exists()
    if device == "CSX":
        assert "training program" in text
        assert "validation program" in text
        assert "test program" in text
        assert "largest difference in loss" in text
    else:
        assert "program" not in text


def test_digits_are_shifted_by_a_pixel_in_eight_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    pictures = importlib.import_module("digits").pictures
    (given, labels), (shifted, repeated) = (pictures("train", one).tensors for one in (False, True))
    moves = shifted.view(9, 1280, 1, 8, 8)
    assert torch.equal(moves[4], given)
    assert torch.equal(moves[0][..., 1:, 1:], given[..., :-1, :-1])
    assert torch.equal(moves[8][..., :-1, :-1], given[..., 1:, 1:])
    assert not moves[8][..., -1, :].any()
    assert torch.equal(repeated.view(9, 1280), labels.expand(9, -1))


INIT = "trainer.init"


def run_file(name: str, device: str, folder: Path, *keys: str, mode: str = "fit") -> str:
    """What ``fulgurite fit examples/NAME.yaml`` prints, with ``keys`` set."""
    keys = (*keys, f"{INIT}.model_dir={folder}")
    if device == "CSX":
        keys = (*keys, f"{INIT}.device=null", f"{INIT}.backend.backend_type=CSX")
        keys = (*keys, f"{INIT}.backend.autogen_policy=disabled")
    else:
        keys = (*keys, f"{INIT}.device={device}")
    settings = [part for key in keys for part in ("--set", key)]
    return run("-m", "fulgurite", mode, str(ROOT / f"examples/{name}.yaml"), *settings)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_digits_as_a_file(device: str, tmp_path: Path) -> None:
    short = ("trainer.fit.train_dataloader.shifted=false", f"{INIT}.loop.eval_frequency=40")
    text = run_file("digits", device, tmp_path, *short, f"{INIT}.loop.num_epochs=2")
    assert ("training program" in text) == (device == "CSX")
    assert (tmp_path / "checkpoint_80.ckpt").exists()
    assert f"curves         {tmp_path / 'curves.png'}\n" in text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    run_file("digits", device, tmp_path, *short, f"{INIT}.loop.num_epochs=3")  # its curves go on
    points = torch.load(tmp_path / "checkpoint_120.ckpt")["callbacks"]["Curves"]["points"]
    assert list(points) == ["loss_epoch", "val_loss", "accuracy", "val_accuracy"]
    assert all([epoch for epoch, _ in line] == [1, 2, 3] for line in points.values())
    text = run_file("digits", device, tmp_path, mode="test")
    accuracy = text.partition("test_accuracy")[2].split()[1]
    assert float(accuracy) > 0.8


@pytest.mark.long
@pytest.mark.process
def test_gpt_bytes_as_a_file(tmp_path: Path) -> None:
    text = run_file("gpt_bytes", "CSX", tmp_path, f"{INIT}.loop.max_steps=4")
    assert "training program" in text
    assert "token" in text  # the table of parameters
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["checkpoint_4.ckpt"]


@pytest.mark.long
@pytest.mark.compiler
def test_a_gpt_with_leaky_relu_as_a_file_of_the_old_form(tmp_path: Path) -> None:
    keys = (f"runconfig.model_dir={tmp_path}", "runconfig.max_steps=20")
    settings = [part for key in keys for part in ("--set", key)]
    command = ("-m", "fulgurite", "fit", str(ROOT / "examples/gpt_legacy.yaml"), *settings)
    text = run(*command)
    assert "training program" in text
    assert (tmp_path / "checkpoint_20.ckpt").exists()
    [file] = tmp_path.rglob("metrics.csv")
    with file.open() as lines:
        bits = [
            float(row["bits_per_byte"]) for row in csv.DictReader(lines) if row["bits_per_byte"]
        ]
    assert bits[-1] < bits[0] - 0.3
    with pytest.raises(AssertionError, match="Did you mean 'leaky_relu'"):  # the model is asked
        run(*command, "--set", "model.nonlinearity=leakyrelu")


@pytest.mark.long
@pytest.mark.process
def test_two_phases_as_a_file(tmp_path: Path) -> None:
    file = (ROOT / "examples/two_phases.yaml").read_text()
    device = "backend: {backend_type: CSX, autogen_policy: disabled}"
    for old, new in (
        ("device: CSX", device),
        ("model_dir: runs/two_phases", f"model_dir: {tmp_path}/out"),
        ("max_steps: 300", "max_steps: 2"),
        ("max_steps: 450", "max_steps: 4"),
        ("split: train,", "split: train, steps: 2,"),
    ):
        assert old in file
        file = file.replace(old, new)
    (tmp_path / "two_phases.yaml").write_text(file)
    text = run(
        "-m",
        "fulgurite",
        "fit",
        str(tmp_path / "two_phases.yaml"),
        PYTHONPATH=str(ROOT / "examples"),
    )
    assert text.count("training program") == 1  # each kind of line is said once in a process
    names = sorted(path.name for path in (tmp_path / "out").glob("*.ckpt"))
    assert names == ["checkpoint_2.ckpt", "checkpoint_4.ckpt"]


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_gpt_bytes(device: str, tmp_path: Path) -> None:
    policy = ["--autogen-policy", "disabled", "--compare"] if device == "CSX" else []
    text = run(
        str(ROOT / "examples/gpt_bytes.py"),
        f"--device={device}",
        "--epochs=1",
        "--steps=10",
        f"--out={tmp_path / 'gpt'}",
        *policy,
    )
    after, before = text.partition("bits per byte ")[2].split(", from ")
    assert float(after) < float(before.split()[0]) - 1
    assert Path(text.partition("checkpoint ")[2].split()[0]).exists()
    assert len(text.partition("\ndef read(")[2]) >= 400
    assert ("training program" in text) == (device == "CSX")


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_custom_loop(device: str, tmp_path: Path) -> None:
    text = run(
        str(ROOT / "examples/custom_loop.py"),
        f"--device={device}",
        "--epochs=2",
        f"--out={tmp_path / 'loop'}",
        *(["--autogen-policy", "disabled"] if device == "CSX" else []),
    )
    assert float(text.rpartition("test accuracy ")[2]) > 0.7
    assert text.count("  loss ") == 2  # steps 50 and 94
    assert "step   94  test accuracy" in text
    assert "checkpoint of step 94" in text
    assert (tmp_path / "loop/last.pt").exists()


def test_the_documentation_shows_the_optimizer_of_the_example() -> None:
    text = (ROOT / "examples/own_optimizer.py").read_text(encoding="utf-8")
    shown = text[text.index("class CautiousAdamW") : text.index("class CautiousDigits")]
    assert shown.strip() in (ROOT / "docs/optimizers.md").read_text(encoding="utf-8")


def test_the_documentation_shows_a_part_of_the_file_of_the_old_form() -> None:
    [part] = [block.text for block in blocks("autogen", "yaml")]
    assert part in (ROOT / "examples/gpt_legacy.yaml").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_own_optimizer(device: str, tmp_path: Path) -> None:
    text = run(
        str(ROOT / "examples/own_optimizer.py"),
        f"--device={device}",
        "--epochs=1",
        f"--out={tmp_path / 'own'}",
        *(["--autogen-policy", "disabled"] if device == "CSX" else []),
    )
    difference = text.partition("largest difference in loss: ")[2].split()[0]
    assert float(difference) < 1e-3
    assert float(text.rpartition("test accuracy ")[2].strip().rstrip("%")) > 60
    assert Path(text.partition("checkpoint ")[2].split()[0]).exists()
    assert ("training program" in text) == (device == "CSX")


RUNNER = ("--params", str(ROOT / "examples/runner.yaml"), "--num_epochs", "1")


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_runner(device: str, tmp_path: Path) -> None:
    script, folder = str(ROOT / "examples/runner.py"), f"--model_dir={tmp_path}"
    run(script, device, "--mode", "train_and_eval", folder, *RUNNER)
    [checkpoint] = tmp_path.rglob("*.ckpt")
    text = run(script, device, "--mode", "eval", folder, f"--checkpoint_path={checkpoint}", *RUNNER)
    assert "val_loss" in text


@pytest.mark.long
@pytest.mark.process
def test_custom_runner(tmp_path: Path) -> None:
    script, folder = str(ROOT / "examples/custom_runner.py"), f"--model_dir={tmp_path}"
    text = run(script, "CPU", "--mode", "train_and_eval", folder, *RUNNER)
    assert "epoch 0: mean loss " in text
    assert f"trained; losses in {tmp_path / 'losses.csv'}" in text
    assert "train batch     39 spans, median " in text
    assert len((tmp_path / "losses.csv").read_text().splitlines()) == 40


@pytest.mark.long
@pytest.mark.compiler
def test_the_step_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    text = run(
        str(ROOT / "tests/benchmarks/step.py"),
        *("--sections", "mlp", "--steps=5", "--rounds=1", f"--json={path}"),
    )
    rows = {row["name"]: row for row in json.loads(path.read_text())["sections"]["mlp"]["rows"]}
    assert rows["Fulgurite bare program"]["rounds_us"][0] > 0
    absent = [name for name in ("accelerate", "JAX", "Keras") if not any(name in r for r in rows)]
    assert all(f"{name}" in text for name in absent)
    assert ("not installed" in text) == bool(absent)
    assert "mlp: fit adds to bare" in text


@pytest.mark.process
def test_the_speed_pages_figures_are_those_of_the_benchmarks_json() -> None:
    table = run(str(ROOT / "tests/benchmarks/table.py"))
    begin, end = "<!-- speed: tests/benchmarks/table.py -->\n", "<!-- speed ends -->"
    assert (ROOT / "docs/speed.md").read_text().partition(begin)[2].partition(end)[0] == table
