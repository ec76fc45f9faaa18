"""What a parameter file may write: names, arguments, defaults."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from harness import fit
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback
from models import Classifier, loader, mlp

from fulgurite import callbacks
from fulgurite.callbacks.checkpoint_states import STATES
from fulgurite.callbacks.low_level_flags import KNOWN

ARGUMENTS: dict[str, dict[str, Any]] = {
    "CheckLoss": {"gradients": False, "max_consecutive_skips": 0},
    "Checkpoint": {
        "steps": "end",
        "autoload_last_checkpoint": True,
        "disable_strict_checkpoint_loading": False,
        "save_initial_checkpoint": False,
        "checkpoint_name": "checkpoint_{step}.ckpt",
    },
    "ComputeNorm": {},
    "CountParams": {"search_and_replace": None, "order_by": None, "descending": False},
    "DurationProfiler": {},
    "FlopUtilization": {"peak_flops_per_sec": None},
    "GlobalFlags": {},
    "KeepNCheckpoints": {"n": None},
    "LoadCheckpointStates": {"load_checkpoint_states": "all"},
    "LogInputSummaries": {},
    "LogOptimizerParamGroup": {"keys": inspect.Parameter.empty},
    "ModelEvalMetrics": {},
    "RateProfiler": {},
    "SamplesStreamedInfo": {},
    "SaveCheckpointState": {
        "k": inspect.Parameter.empty,
        "checkpoint_states": "model",
        "checkpoint_name": "{checkpoint_states}_{ckpt_name}",
    },
    "SavePerformanceData": {},
    "ScopedTrainFlags": {},
    "ScopedValidateFlags": {},
    "SelectiveGrad": {"selective_grads": inspect.Parameter.empty},
}
DOCS = Path(__file__).parents[2] / "docs" / "callbacks.md"


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_the_names_and_defaults_of_parameter_files(name: str) -> None:
    kind = getattr(callbacks, name)
    assert issubclass(kind, Callback)
    parameters = inspect.signature(kind).parameters.values()
    given = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    assert given == ARGUMENTS[name]
    assert all(p.annotation is not p.empty for p in parameters)
    assert all(re.search(rf"\b{p.name}: ", kind.__doc__ or "") for p in parameters)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("LogOptimizerParamGroup", {"keys": "lr"}),
        ("LogOptimizerParamGroup", {"keys": ["lr", "weight_decay"]}),
        ("Checkpoint", {"steps": 100}),
        ("Checkpoint", {"steps": None}),
        ("SelectiveGrad", {"selective_grads": {"param_filter": "decoder.*"}}),
        ("SelectiveGrad", {"selective_grads": [{"param_filter": ["a.*", "b.*"]}]}),
        ("CountParams", {"search_and_replace": [["a", "b"]], "order_by": "Size"}),
        ("LoadCheckpointStates", {"load_checkpoint_states": ["model", "optimizer"]}),
        ("SaveCheckpointState", {"k": 5, "checkpoint_states": "model,optimizer"}),
        ("KeepNCheckpoints", {"n": 3}),
    ],
)
def test_jsonargparse_makes_them(name: str, arguments: dict[str, Any]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Callback, "callback")
    path = f"fulgurite.callbacks.{name}"
    parsed = parser.parse_object({"callback": {"class_path": path, "init_args": arguments}})
    made = parser.instantiate(parsed).callback
    assert type(made) is getattr(callbacks, name)


@pytest.mark.fits
@pytest.mark.parametrize("static", [True, False], ids=["CSX", "stock"])
def test_the_defaults_run_together(static: bool, tmp_path: Path) -> None:
    made = tuple(
        getattr(callbacks, name)(**arguments)
        for name, arguments in callbacks.DEFAULT_CALLBACKS.items()
    )
    run = fit(
        lambda: Classifier(mlp()),
        lambda: (loader(160),),
        static=static,
        callbacks=made,
        log_every_n_steps=5,
        default_root_dir=tmp_path,
    )
    assert {"lr/0", "avg_samples_per_sec", "time_remaining"} <= set(run.final)


def test_the_page_has_them_all() -> None:
    page = DOCS.read_text()
    for name in (*ARGUMENTS, *KNOWN, *STATES):
        assert f"`{name}`" in page, name
    for flag, why in KNOWN.items():
        assert why is None or f"| `{flag}` | {why} |" in page
