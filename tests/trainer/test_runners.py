"""Runner scripts: every mode and flag, old and new parameters, old and new models."""

from __future__ import annotations

import argparse
import copy
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
import torch
import yaml
from document_runners import PAGE, page
from harness import assert_close
from models import Classifier, loader, mlp
from torch import Tensor, nn

from fulgurite.backends import reset_backend
from fulgurite.callbacks.runner_hooks import HOOKS
from fulgurite.runners import (
    PyTorchBaseModel,
    PyTorchBaseRunner,
    PyTorchCSCompiler,
    PyTorchCSRunner,
    PyTorchRunner,
    run,
)
from fulgurite.runners.parameters import FLAGS, MODES, parse_command_line
from fulgurite.runners.runner import _STAGES, NOT_CALLED

LEGACY: dict[str, Any] = {
    "runconfig": {"seed": 1, "num_epochs": 2, "log_steps": 2, "target_device": "CSX"},
    "model": {"size": 16},
    "optimizer": {"optimizer_type": "SGD", "learning_rate": 0.1, "momentum": 0.9},
    "train_input": {"rows": 64},
    "eval_input": {"rows": 32},
}
STEPS = {**LEGACY, "runconfig": {"seed": 1, "target_device": "CSX"}}
NEW: dict[str, Any] = {
    "trainer": {
        "init": {
            "device": "CSX",
            "seed": 1,
            "optimizer": {"SGD": {"lr": 0.1, "momentum": 0.9}},
            "loop": {"num_epochs": 2},
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
    }
}


class Net(nn.Module):
    """Its forward returns the loss of a batch."""

    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__()
        self.net = mlp(0.2)

    def forward(self, data: Any) -> Any:
        return nn.functional.cross_entropy(self.net(data[0]), data[1])


class Recording(PyTorchBaseRunner):
    """Its hooks write down that they were called, and the losses of training."""

    made: Any = None  # the last one; None where a run has another runner

    def __init__(self, model: Any, params: Any) -> None:
        super().__init__(model, params)
        self.calls: list[str] = []
        self.losses: list[Tensor] = []
        Recording.made = self

    def on_train_batch_end(self, loss: Any, epoch: int, step: int) -> None:
        self.losses.append(loss)
        self.calls.append("train_batch_end")


def _recorder(hook: str) -> Callable[..., Any]:
    def record(self: Recording, *args: Any) -> Any:
        self.calls.append(hook.removeprefix("on_"))
        return args[0] if hook.endswith("batch_start") else None

    return record


for _hook in set(HOOKS) - {"on_train_batch_end"}:
    setattr(Recording, _hook, _recorder(_hook))


def train_data(params: dict[str, Any]) -> Any:
    return loader(params.get("train_input", {}).get("rows", 64))


def eval_data(params: dict[str, Any]) -> Any:
    return loader(params.get("eval_input", {}).get("rows", 32), seed=2)


Start = Callable[..., Recording]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs a script with a command line; on CSX without a compiler. Returns its runner."""

    def placement(self: PyTorchBaseRunner) -> dict[str, Any]:
        init = self._phase.init
        backend = init.backend or {"backend_type": init.device}
        if str(backend["backend_type"]).upper() == "CSX":
            backend = {"autogen_policy": "disabled", **backend}
        return {"device": None, "backend": backend}

    def start(
        *arguments: str,
        params: dict[str, Any] = LEGACY,
        model_fn: Callable[..., Any] = Net,
        runner: Any = Recording,
        **options: Any,
    ) -> Recording:
        reset_backend()
        file = tmp_path / "params.yaml"
        file.write_text(yaml.safe_dump(params), encoding="utf-8")
        where = [] if "--model_dir" in arguments else ["--model_dir", str(tmp_path / token_hex(4))]
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments, "--params", str(file), *where])
        Recording.made = None
        run(model_fn, train_data, eval_data, runner=runner, **options)
        return Recording.made  # type: ignore[no-any-return]

    monkeypatch.setattr(PyTorchBaseRunner, "_placement", placement)
    return start


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of programs."""
    lines: list[str] = []
    monkeypatch.setattr("fulgurite.backends.csx.program.announcements.rank_zero_info", lines.append)
    return lines


def changed(params: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Parameters with some dotted keys (``__`` for the dot) set."""
    params = copy.deepcopy(params)
    for key, value in keys.items():
        *above, last = key.split("__")
        section = params
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
    return params


# -- modes -------------------------------------------------------------------------------------

TRAIN = ["train_epoch_start", *["train_batch_start", "train_batch_end"] * 4]
EVAL = ["eval_start", "eval_epoch_start", *["eval_batch_start", "eval_batch_end"] * 2]
EVAL += ["eval_epoch_end", "eval_end"]


@pytest.mark.fits
@pytest.mark.parametrize("params", [LEGACY, NEW], ids=["old", "new"])
@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_train(params: dict[str, Any], device: str, start: Start) -> None:
    runner = start(device, "--mode", "train", params=params)
    assert runner.calls == ["train_start", *[*TRAIN, "train_epoch_end"] * 2, "train_end"]
    assert runner.trainer.backend.backend_type == device


@pytest.mark.fits
def test_train_and_eval(start: Start) -> None:
    runner = start("--mode", "train_and_eval")
    epoch = [*TRAIN, *EVAL, "train_epoch_end"]
    assert runner.calls == ["train_start", *epoch, *epoch, "train_end"]


@pytest.mark.fits
@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_eval_takes_the_checkpoint_that_is_named(device: str, start: Start, tmp_path: Path) -> None:
    trained = start(device, "--mode", "train_and_eval")
    wanted = trained.trainer.callback_metrics["val_loss"]
    trained.trainer.save_checkpoint(tmp_path / "one.ckpt")
    runner = start(device, "--mode", "eval", f"--checkpoint_path={tmp_path / 'one.ckpt'}")
    assert runner.calls == EVAL
    assert_close(runner.trainer.callback_metrics["val_loss"], wanted)


@pytest.mark.fits
def test_eval_takes_the_newest_checkpoint_else(start: Start, tmp_path: Path) -> None:
    folder = ["--model_dir", str(tmp_path / "out")]
    wanted = start("--mode", "train_and_eval", *folder).trainer.callback_metrics["val_loss"]
    found = start("--mode", "eval", *folder).trainer.callback_metrics["val_loss"]
    assert_close(found, wanted)


@pytest.mark.fits
def test_eval_all_takes_every_checkpoint_in_the_order_of_steps(
    start: Start, tmp_path: Path
) -> None:
    trained = start("--mode", "train").trainer
    folder = ["--model_dir", str(tmp_path / "out")]
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        start("--mode", "eval_all", *folder)
    for step in (2, 10):
        trained.save_checkpoint(tmp_path / "out" / f"checkpoint_{step}.ckpt")
    (tmp_path / "out" / "model_checkpoint_2.ckpt").touch()  # of SaveCheckpointState: not whole
    assert start("--mode", "eval_all", *folder).calls == EVAL * 2


@pytest.mark.fits
def test_training_again_goes_on_from_the_newest_checkpoint(start: Start, tmp_path: Path) -> None:
    folder = ["--model_dir", str(tmp_path / "out")]
    whole = [float(loss) for loss in start("--mode=train").losses]
    first = start("--mode=train", "--num_epochs=1", *folder).losses
    second = start("--mode=train", *folder).losses
    assert [*map(float, first), *map(float, second)] == whole
    third = start("--mode=train", *folder)
    assert third.losses == []
    assert third.trainer.global_step == len(whole)
    assert start("--mode=train", *folder).losses == []


@pytest.mark.fits
def test_csx_and_the_cpu_train_alike(start: Start) -> None:
    ours = [float(loss) for loss in start("CSX", "--mode", "train").losses]
    assert_close(ours, [float(loss) for loss in start("CPU", "--mode", "train").losses])


@pytest.mark.fits
def test_old_and_new_parameters_train_alike(start: Start) -> None:
    old = [float(loss) for loss in start("--mode", "train").losses]
    assert old == [float(loss) for loss in start("--mode", "train", params=NEW).losses]


def test_a_mode_without_its_data_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "eval_data", None)
    with pytest.raises(ValueError, match="mode eval needs eval_data_fn"):
        start("--mode", "eval")


# -- flags -------------------------------------------------------------------------------------


@pytest.mark.fits
@pytest.mark.parametrize("params", [LEGACY, NEW], ids=["old", "new"])
@pytest.mark.parametrize(
    ("flag", "steps"), [("max_steps", 3), ("num_epochs", 1)], ids=["max_steps", "num_epochs"]
)
def test_a_number_of_the_command_line_counts_more_than_the_files(
    flag: str, steps: int, params: dict[str, Any], start: Start
) -> None:
    runner = start("CPU", "--mode=train", f"--{flag}={steps}", params=params)
    assert len(runner.losses) == (3 if flag == "max_steps" else 4)


@pytest.mark.parametrize("params", [LEGACY, NEW], ids=["old", "new"])
def test_eval_steps(params: dict[str, Any], start: Start) -> None:
    runner = start("CPU", "--mode=eval", "--eval_steps=1", params=params)
    assert runner.calls.count("eval_batch_end") == 1


@pytest.mark.fits
@pytest.mark.parametrize("params", [LEGACY, NEW], ids=["old", "new"])
def test_flags_of_csx_go_to_its_backend(
    params: dict[str, Any], start: Start, tmp_path: Path
) -> None:
    runner = start("CSX", "--mode=train", f"--compile_dir={tmp_path}", params=params)
    assert runner.trainer.backend.compile_dir == str(tmp_path)


@pytest.mark.fits
@pytest.mark.parametrize("params", [LEGACY, NEW], ids=["old", "new"])
@pytest.mark.parametrize("runner", [None, PyTorchCSCompiler], ids=["chosen", "given"])
def test_validate_only_traces_and_trains_nothing(
    runner: Any, params: dict[str, Any], start: Start, said: list[str]
) -> None:
    start("CSX", "--mode=train", "--validate_only", params=params, runner=runner)
    assert any("training program" in line and ", checked" in line for line in said)


@pytest.mark.fits
@pytest.mark.compiler
def test_compile_only_makes_a_compiler_of_the_run(
    start: Start, tmp_path: Path, said: list[str]
) -> None:
    flags = ["--compile_only", f"--compile_dir={tmp_path / 'programs'}"]
    start("CSX", "--mode=train", *flags, runner=None)
    assert any("training program" in line and "compiled in" in line for line in said)
    assert list((tmp_path / "programs").iterdir())


@pytest.mark.fits
def test_is_pretrained_checkpoint_takes_weights_and_begins_at_step_0(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "one.ckpt"
    start("CPU", "--mode=train").trainer.save_checkpoint(path)
    anew = start("CPU", "--mode=train", f"--checkpoint_path={path}", "--is_pretrained_checkpoint")
    assert len(anew.losses) == 8
    first = start("CPU", "--mode=train").losses[0]
    assert anew.losses[0] < first
    goes_on = start("CPU", "--mode=train", f"--checkpoint_path={path}", "--num_epochs=3")
    assert len(goes_on.losses) == 4


MEANINGLESS = [flag for flag in FLAGS if not flag.means]


@pytest.mark.fits
@pytest.mark.parametrize("params", [LEGACY, NEW], ids=["old", "new"])
def test_flags_without_a_meaning_are_noted_once_each(
    params: dict[str, Any], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("fulgurite.runners.runner.rank_zero_info", said.append)
    given = [
        part
        for flag in MEANINGLESS
        for part in (f"--{flag.name}", *([] if "action" in flag.options else ["1"]))
    ]
    start("CPU", "--mode=train", "--max_steps=1", *given, params=params)
    for flag in MEANINGLESS:
        assert [line for line in said if line.startswith(f"--{flag.name} ")] == [
            f"--{flag.name} has no effect here: {flag.does}."
        ]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--mode", "train"],
        ["--params", "p.yaml"],
        ["--params", "p.yaml", "--mode", "fly"],
        ["TPU", "--params", "p.yaml", "--mode", "train"],
        ["--params", "p.yaml", "--mode", "train", "--max_step", "3"],
        ["--params", "p.yaml", "--mode", "train", "--max_steps", "many"],
        ["--params", "p.yaml", "--mode", "train", "--compile_only", "--validate_only"],
        ["CSX", "--params", "p.yaml", "--mode", "train", "--cpu"],
        ["--params", "p.yaml", "--mode", "train", "--is_pretrained_checkpoint"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_ends_with_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_command_line(arguments)
    assert raised.value.code == 2
    assert "usage: " in capsys.readouterr().err


def test_eval_all_with_a_checkpoint_is_a_wrong_command_line(start: Start) -> None:
    with pytest.raises(SystemExit) as raised:
        start("CPU", "--mode=eval_all", "--checkpoint_path=one.ckpt")
    assert raised.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "device"),
    [(["gpu"], "GPU"), (["--cpu"], "CPU"), (["-cpu"], "CPU"), (["-cs", "1.2.3.4"], "CSX")],
    ids=str,
)
def test_ways_to_say_the_device(arguments: list[str], device: str) -> None:
    assert parse_command_line([*arguments, "-p", "p.yaml", "-m", "train"]).device == device


def test_a_wrong_file_is_told_by_line_with_status_1(start: Start) -> None:
    wrong = changed(LEGACY, runconfig__max_step=3, optimizer__lerning_rate=1)
    with pytest.raises(SystemExit) as raised:
        start("--mode=train", params=wrong)
    told = str(raised.value.code)
    assert "max_step" in told
    assert "params.yaml:" in told


@pytest.mark.fits
@pytest.mark.parametrize("params", [LEGACY, NEW], ids=["old", "new"])
def test_the_model_dir_lies_beside_the_script_unless_something_says_where(
    params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    script = tmp_path / "run.py"
    script.write_text(
        "from test_runners_parts import Net, train_data\nfrom fulgurite.runners import run\n"
        "run(Net, train_data)\n",
        encoding="utf-8",
    )
    monkeypatch.setitem(sys.modules, "test_runners_parts", sys.modules[__name__])
    command = ["CPU", "--params", str(tmp_path / "params.yaml"), "--mode", "train"]
    monkeypatch.setattr(sys, "argv", [str(script), *command])
    runpy.run_path(str(script), run_name="__main__")
    assert list((tmp_path / "model_dir").rglob("*.ckpt"))


# -- models and parameters ---------------------------------------------------------------------


@pytest.mark.fits
def test_functions_read_the_flags_and_their_own_arguments_in_runconfig(start: Start) -> None:
    seen: list[dict[str, Any]] = []

    def extra() -> list[argparse.ArgumentParser]:
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("--depth", type=int, default=2)
        return [parser]

    def model_fn(params: dict[str, Any]) -> nn.Module:
        seen.append(params["runconfig"])
        return Net(params)

    def defaults(params: dict[str, Any]) -> None:
        params["train_input"].setdefault("rows", 16)

    options = {"extra_args_parser_fn": extra, "default_params_fn": defaults}
    start("CPU", "--mode=train", "--max_steps=1", "--depth=3", model_fn=model_fn, **options)
    [runconfig] = seen
    assert runconfig["mode"] == "train"
    assert (runconfig["target_device"], runconfig["max_steps"], runconfig["depth"]) == ("CPU", 1, 3)


@pytest.mark.fits
def test_defaults_may_be_returned(start: Start) -> None:
    def defaults(params: dict[str, Any]) -> dict[str, Any]:
        return {**params, "runconfig": {**params["runconfig"], "max_steps": 2}}

    assert len(start("CPU", "--mode=train", default_params_fn=defaults).losses) == 2


@pytest.mark.fits
@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: loss,
        lambda loss: (loss, torch.zeros(3)),
        lambda loss: {"loss": loss, "logits": torch.zeros(3)},
    ],
    ids=["a tensor", "a tuple", "a dict"],
)
def test_a_forward_returns_the_loss_in_one_of_three_ways(
    wrap: Callable[[Tensor], Any], start: Start
) -> None:
    class Wrapped(Net):
        def forward(self, data: Any) -> Any:
            return wrap(super().forward(data))

    plain = [float(loss) for loss in start("--mode=train").losses]
    assert [float(loss) for loss in start("--mode=train", model_fn=Wrapped).losses] == plain


@pytest.mark.fits
def test_a_forward_that_returns_no_loss_is_told(start: Start) -> None:
    class Logits(Net):
        def forward(self, data: Any) -> Any:
            return self.net(data[0])

    with pytest.raises(
        TypeError, match=r"has to return the loss.* It returned a tensor of shape \[16, 4\]"
    ):
        start("CPU", "--mode=train", model_fn=Logits)


@pytest.mark.fits
def test_a_model_of_an_older_script(start: Start) -> None:
    class Older(PyTorchBaseModel):
        tied = 0

        def __init__(self, params: dict[str, Any], device: Any = None) -> None:
            self.model = mlp(0.2)
            self.loss_fn = nn.CrossEntropyLoss()
            super().__init__(params=params, model=self.model, device=device)

        def _post_device_transfer(self) -> None:
            type(self).tied += 1

        def __call__(self, data: Any) -> Any:
            return self.loss_fn(self.model(data[0]), data[1])

    plain = [float(loss) for loss in start("--mode=train").losses]
    assert [float(loss) for loss in start("--mode=train", model_fn=Older).losses] == plain
    assert Older.tied == 1


@pytest.mark.fits
@pytest.mark.parametrize("device", ["CSX", "CPU"])
def test_a_model_that_makes_its_own_optimizer(device: str, start: Start) -> None:
    class Own(Net):
        def get_optimizer(self) -> Any:
            self.made = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return self.made

        def get_lr_scheduler(self) -> Any:
            return torch.optim.lr_scheduler.StepLR(self.made, 1, 0.5)

    runner = start(device, "--mode=train", "--max_steps=3", model_fn=Own)
    assert runner.trainer.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**3


@pytest.mark.fits
def test_a_model_fn_may_ask_for_the_device(start: Start) -> None:
    places = []

    def model_fn(params: dict[str, Any], device: torch.device) -> nn.Module:
        places.append(device)
        return Net(params)

    start("CPU", "--mode=train", "--max_steps=1", model_fn=model_fn)
    assert places == [torch.device("cpu")]


@pytest.mark.fits
def test_a_lightning_module_is_itself(start: Start) -> None:
    runner = start("--mode=train", model_fn=lambda params: Classifier(mlp()))
    assert isinstance(runner.module, Classifier)


def test_training_without_an_optimizer_is_told(start: Start) -> None:
    without = {key: value for key, value in LEGACY.items() if key != "optimizer"}
    with pytest.raises(ValueError, match="nothing to train Net with"):
        start("CPU", "--mode=train", params=without)


@pytest.mark.parametrize(
    ("model_fn", "text"),
    [
        (lambda params: 3, "model_fn returned int"),
        (lambda params, device, more: None, "asks for params, device, more"),
    ],
)
def test_other_models_are_refused(model_fn: Any, text: str, start: Start) -> None:
    model_fn.__name__ = "model_fn"
    with pytest.raises(TypeError, match=text):
        start("CPU", "--mode=train", model_fn=model_fn)


def test_a_new_file_that_names_another_model_is_refused(start: Start) -> None:
    params = changed(NEW, trainer__init__model={"class_path": "torch.nn.Linear"})
    with pytest.raises(SystemExit) as raised:
        start("CPU", "--mode=train", params=params)
    assert "model_fn makes another" in str(raised.value.code)


# -- runners -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", NOT_CALLED)
def test_overriding_what_is_not_called_is_an_error(method: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{method} would not be called: "):
        type("Mine", (PyTorchRunner,), {method: lambda self: None})


def test_overriding_what_older_models_had_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"_configure_optimizer would not be called"):
        type("Mine", (PyTorchBaseModel,), {"_configure_optimizer": lambda self: None})


@pytest.mark.parametrize(
    ("runner", "device", "other"),
    [(PyTorchCSRunner, "CPU", "PyTorchRunner"), (PyTorchRunner, "CSX", "PyTorchCSRunner")],
)
def test_a_runner_for_another_device_is_refused(
    runner: Any, device: str, other: str, start: Start
) -> None:
    with pytest.raises(ValueError, match=f"the parameters say {device}. Subclass {other}"):
        start(device, "--mode=train", runner=runner)


@pytest.mark.fits
def test_a_runner_works_without_a_command_line(tmp_path: Path) -> None:
    params = changed(LEGACY, runconfig__target_device="CPU", runconfig__model_dir=str(tmp_path))
    runner = PyTorchRunner(Net(params), params)
    runner.train(train_data(params))
    assert runner.trainer.global_step == 8


@pytest.mark.fits
def test_an_overridden_train_is_called(start: Start) -> None:
    class Twice(Recording):
        def train(self, train_dataloader: Any) -> None:
            super().train(train_dataloader)
            self.calls.append("trained")

    assert start("CPU", "--mode=train", runner=Twice).calls[-1] == "trained"


# -- stopping ----------------------------------------------------------------------------------


@pytest.mark.fits
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_ends_a_run_and_the_command_that_is_printed_goes_on(
    number: int, status: int, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped(Recording):
        def on_train_batch_start(self, data: Any) -> Any:
            if len(self.losses) == 5:
                os.kill(os.getpid(), number)
            return data

    whole = [float(loss) for loss in start("--mode=train").losses]
    capsys.readouterr()
    with pytest.raises(SystemExit) as raised:
        start("--mode=train", runner=Stopped)
    assert raised.value.code == status
    first = [float(loss) for loss in Recording.made.losses]
    assert len(first) == 6
    _, _, command = capsys.readouterr().err.partition("Stopped by ")
    checkpoint = command.split("--checkpoint_path ")[1].strip()
    second = start("--mode=train", "--checkpoint_path", checkpoint).losses
    assert [*first, *map(float, second)] == whole


@pytest.mark.fits
def test_the_command_that_goes_on_trains_what_is_left_of_num_steps(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped(Recording):
        def on_train_batch_start(self, data: Any) -> Any:
            if len(self.losses) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return data

    with pytest.raises(SystemExit):
        start("--mode=train", "--num_steps", "5", runner=Stopped, params=STEPS)
    command = capsys.readouterr().err.rpartition("run.py ")[2].split()
    options = command[command.index("--checkpoint_path") :]
    assert options[2:] == ["--num_steps", "2"]
    assert len(start("--mode=train", *options, params=STEPS).losses) == 2


@pytest.mark.fits
def test_the_command_that_goes_on_loads_a_checkpoint_whole(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped(Recording):
        def on_train_batch_start(self, data: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return data

    with pytest.raises(SystemExit):
        start("--mode=train", "--load_checkpoint_states", "model", runner=Stopped)
    command = capsys.readouterr().err.rpartition("run.py ")[2].split()
    assert command.count("--load_checkpoint_states") == 1
    assert command[command.index("--load_checkpoint_states") + 1] == "all"


@pytest.mark.fits
def test_the_documentation_is_that_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text


def test_every_mode_is_a_method() -> None:
    assert list(_STAGES) == list(MODES)
    assert all(hasattr(PyTorchBaseRunner, method) for method, _ in _STAGES.values())
