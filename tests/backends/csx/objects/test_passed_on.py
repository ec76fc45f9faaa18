"""What a step only passes on of its batch is that of each batch, never of the first."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import fit, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.backends import reset_backend
from fulgurite.backends.csx.contract import leaks
from fulgurite.backends.csx.contract.frozen_reads import FrozenValueWarning
from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged, UnsupportedInput


@dataclass
class Meta:
    """An object that no program works on."""

    name: str


def batches(count: int = 3) -> list[dict[str, Any]]:
    """Batches that differ in everything that is no tensor's layout."""
    return [
        {
            "x": torch.full((2, 3), float(i)),
            "file": f"{i}.png",
            "scale": i + 0.5,
            "count": i,
            "names": [f"a{i}", f"b{i}"],
            "more": {"id": i, "pair": (f"l{i}", i)},
            "meta": Meta(f"meta {i}"),
            "array": np.arange(i + 1),
        }
        for i in range(count)
    ]


def loader(count: int = 3) -> Any:
    return DataLoader(batches(count), batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]


class Steps(pl.LightningModule):
    """Every step calls ``does``; what it returned is recorded."""

    def __init__(self, does: Callable[[Any, Any, int], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.does = does
        self.seen: list[Any] = []
        self.files: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        extra = self.does(self, batch, batch_idx)
        return {"loss": self.layer(batch["x"]).sum(), "extra": extra}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["extra"])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.does(self, batch, batch_idx)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.does(self, batch, batch_idx)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.does(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Steps):
    """The same with manual optimization."""

    def __init__(self, does: Any) -> None:
        super().__init__(does)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        output = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(output["loss"])
        optimizer.step()
        return output


def run(does: Any, method: str, static: bool, kind: type[Steps] = Steps, **options: Any) -> Steps:
    """A module that ran a stage on three batches; ``seen`` has what its steps returned."""
    module = kind(does)
    trainer = make_trainer(static, max_epochs=1, **options)
    results = getattr(trainer, method)(module, loader())
    if method == "predict":
        module.seen = results
    return module


def everything(module: Any, batch: Any, batch_idx: int) -> Any:
    return {
        "file": batch["file"],
        "batch": batch_idx,
        "count": batch["count"],
        "scale": [batch["scale"], (batch["names"], batch["more"])],
        "meta": batch["meta"],
        "array": batch["array"],
        "y": batch["x"] * 2,
    }


STAGES = ("fit", "validate", "test", "predict")


@pytest.mark.numbers
@pytest.mark.parametrize("method", STAGES)
def test_results_keep_what_came_with_their_batch(method: str) -> None:
    ours, stock = (run(everything, method, static) for static in (True, False))
    assert len(ours.seen) == len(stock.seen) == 3
    for i, (a, b) in enumerate(zip(ours.seen, stock.seen, strict=True)):
        assert torch.equal(a.pop("y"), b.pop("y"))
        assert np.array_equal(a.pop("array"), b.pop("array"))
        assert repr(a) == repr(b)
        assert a == b
        assert a["file"] == f"{i}.png"
        assert [type(a[key]) for key in ("file", "batch", "count", "meta")] == [str, int, int, Meta]
        assert pickle.loads(pickle.dumps(a)) == a
        a.pop("meta")
        assert json.dumps(a)


@pytest.mark.process
def test_results_of_a_compiled_step_keep_what_came_with_their_batch() -> None:
    ours, stock = (
        run(everything, "predict", static, **({"policy": "default"} if static else {}))
        for static in (True, False)
    )
    assert [one["file"] for one in ours.seen] == [one["file"] for one in stock.seen]
    assert [one["batch"] for one in ours.seen] == [0, 1, 2]
    assert [one["y"].tolist() for one in ours.seen] == [one["y"].tolist() for one in stock.seen]


@pytest.mark.fits
def test_results_of_manual_optimization_keep_what_came_with_their_batch() -> None:
    ours = run(everything, "fit", True, Manual)
    assert [one["extra"] if "extra" in one else one["file"] for one in ours.seen] == [
        "0.png",
        "1.png",
        "2.png",
    ]
    assert [one["batch"] for one in ours.seen] == [0, 1, 2]


@pytest.mark.fits
def test_both_entry_points_of_a_window_pass_on() -> None:
    module = run(everything, "fit", True, accumulate_grad_batches=2)
    assert [one["file"] for one in module.seen] == ["0.png", "1.png", "2.png"]
    assert [one["batch"] for one in module.seen] == [0, 1, 2]


@pytest.mark.fits
def test_appended_dicts_keep_what_came_with_their_batch() -> None:
    def append(module: Any, batch: Any, batch_idx: int) -> None:
        module.files.append({"file": batch["file"], "y": batch["x"].sum(), "at": batch_idx})

    for method in ("fit", "validate", "test"):
        module = run(append, method, True)
        assert [one["file"] for one in module.files] == ["0.png", "1.png", "2.png"]
        assert [one["at"] for one in module.files] == [0, 1, 2]
        assert [float(one["y"]) for one in module.files] == [0.0, 6.0, 12.0]
        assert type(module.files[0]["file"]) is str


def test_appended_names_are_those_of_each_batch() -> None:
    def append(module: Any, batch: Any, batch_idx: int) -> None:
        module.files.append(batch["file"])
        module.files += batch["names"]

    module = run(append, "test", True)
    assert module.files == ["0.png", "a0", "b0", "1.png", "a1", "b1", "2.png", "a2", "b2"]


def append_to_a_new_list(module: Any, batch: Any, batch_idx: int) -> None:
    module.by.setdefault("file", []).append(batch["file"])
    module.by.setdefault("y", []).append(batch["x"].sum())


def begin_where_there_is_none(module: Any, batch: Any, batch_idx: int) -> None:
    if "file" not in module.by:
        module.by["file"] = []
    module.by["file"].extend(batch["names"])


def only_names(module: Any, batch: Any, batch_idx: int) -> None:
    module.by.setdefault("file", []).append(batch["file"])


def a_list_in_a_new_dict(module: Any, batch: Any, batch_idx: int) -> None:
    row = (batch["file"], batch["x"].sum())
    module.by.setdefault("more", {}).setdefault("rows", []).append(row)


def the_last_one(module: Any, batch: Any, batch_idx: int) -> None:
    module.by["last"] = {"files": batch["names"], "y": batch["x"].sum()}
    module.by["file"] = batch["file"]


def a_default_list(module: Any, batch: Any, batch_idx: int) -> None:
    module.lists["y"].append(batch["x"].sum())
    module.lists["file"].extend(batch["names"])


def the_most_recent(module: Any, batch: Any, batch_idx: int) -> Any:
    module.recent.append(batch["x"].sum())
    return batch["file"]


class Collects(Steps):
    """It begins with empty containers; with ``clears`` the host empties them after each epoch."""

    clears = False

    def __init__(self, does: Any) -> None:
        super().__init__(does)
        self.by: dict[str, Any] = {}
        self.lists: Any = defaultdict(list)
        self.recent: Any = deque(maxlen=2)
        self.epochs: list[Any] = []

    def kept(self) -> str:
        """All of it as text."""
        return repr((self.by, dict(self.lists), self.recent))

    def on_train_epoch_end(self) -> None:
        self.epochs.append(self.kept())
        if self.clears:
            self.by.clear()
            self.lists.clear()


class Clears(Collects):
    clears = True


@pytest.mark.numbers
@pytest.mark.parametrize("method", ["fit", "test"])
@pytest.mark.parametrize(
    "does",
    [
        *(append_to_a_new_list, begin_where_there_is_none, only_names, a_list_in_a_new_dict),
        *(the_last_one, a_default_list, the_most_recent),
    ],
)
def test_containers_that_begin_empty_hold_what_came_with_each_batch(does: Any, method: str) -> None:
    ours, stock = (run(does, method, static, kind=Collects) for static in (True, False))
    assert isinstance(ours, Collects)
    assert isinstance(stock, Collects)
    assert ours.kept() == stock.kept()
    assert ours.epochs == stock.epochs


@pytest.mark.numbers
@pytest.mark.parametrize("does", [append_to_a_new_list, only_names, a_list_in_a_new_dict])
def test_a_list_that_the_host_took_away_begins_again(does: Any) -> None:
    kept = []
    for static in (True, False):
        module = Clears(does)
        make_trainer(static, backend={"audit": True}, max_epochs=3).fit(module, loader())
        kept.append(module.epochs)
    assert kept[0] == kept[1]
    assert len(kept[0]) == 3


def test_a_list_of_names_may_be_shorter_in_another_program() -> None:
    def ragged() -> Any:
        batches = [{"x": torch.ones(n, 3), "names": [f"{n}{i}" for i in range(n)]} for n in (2, 1)]
        return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]

    def names(module: Any, batch: Any, batch_idx: int) -> Any:
        return batch["names"]

    trainer = make_trainer(True, backend={"max_programs": 2})
    assert trainer.predict(Steps(names), ragged()) == [["20", "21"], ["10"]]
    reset_backend()
    with pytest.raises(InputChanged, match=r"\[\*\](.|\n)*built for(.|\n)*max_programs=2"):
        make_trainer(True, backend={"max_programs": 1}).predict(Steps(names), ragged())


@pytest.mark.fits
def test_attributes_are_set_to_those_of_each_batch() -> None:
    def keep(module: Any, batch: Any, batch_idx: int) -> None:
        module.last_file, module.last_names = batch["file"], batch["names"]
        module.last_index, module.last_meta = batch_idx, batch["meta"]

    for method in ("fit", "validate", "test"):
        module = run(keep, method, True)
        assert (module.last_file, module.last_names, module.last_index) == (
            "2.png",
            ["a2", "b2"],
            2,
        )
        assert module.last_meta == Meta("meta 2")
        assert type(module.last_index) is int


def test_an_attribute_that_the_step_read_before_is_that_of_each_batch() -> None:
    def previous(module: Any, batch: Any, batch_idx: int) -> Any:
        before = module.previous
        module.previous = batch_idx
        return before

    class Previous(Steps):
        previous = -1

    module = run(previous, "validate", True, Previous)
    assert module.previous == run(previous, "validate", False, Previous).previous == 2


def test_closures_get_what_came_with_each_batch() -> None:
    got: list[Any] = []

    @fulgurite.step_closure
    def show(file: str, names: list[str], index: int, total: Tensor) -> None:
        got.append((file, names, index, float(total), type(file)))

    def call(module: Any, batch: Any, batch_idx: int) -> None:
        show(batch["file"], names=batch["names"], index=batch_idx, total=batch["x"].sum())

    run(call, "validate", True)
    assert got == [(f"{i}.png", [f"a{i}", f"b{i}"], i, 6.0 * i, str) for i in range(3)]


def test_results_of_a_traced_function_keep_what_came_with_its_arguments() -> None:
    reset_backend()
    fulgurite.backend("CSX", autogen_policy="disabled")

    @fulgurite.trace
    def step(batch: Any, name: str) -> Any:
        return {"file": batch["file"], "name": name, "y": batch["x"] * 2}

    data = [{"x": torch.full((2,), float(i)), "file": f"{i}.png"} for i in range(3)]
    results = [step(batch, f"call {i}") for i, batch in enumerate(data)]
    assert [(one["file"], one["name"]) for one in results] == [
        (f"{i}.png", f"call {i}") for i in range(3)
    ]
    assert [one["y"][0].item() for one in results] == [0.0, 2.0, 4.0]


def test_what_was_read_and_passed_on_may_not_change() -> None:
    def both(module: Any, batch: Any, batch_idx: int) -> Any:
        return {"file": batch["file"], "y": batch["x"] * len(batch["file"])}

    with pytest.raises(InputChanged, match=r"'0\.png' when the step was traced and read it"):
        run(both, "predict", True)


def test_a_bool_is_compared_on_each_call() -> None:
    data = [{"x": torch.ones(2, 3), "last": last} for last in (False, True)]
    module = Steps(lambda module, batch, _: {"last": batch["last"]})
    with pytest.raises(InputChanged, match=r"batch\['last'\] was False .* now is True"):
        make_trainer(True).predict(
            module, DataLoader(data, batch_size=None, collate_fn=lambda batch: batch)
        )


def test_a_stand_in_kept_elsewhere_becomes_its_value_and_may_not_change() -> None:
    kept: list[Any] = []

    def leak(module: Any, batch: Any, batch_idx: int) -> None:
        kept.append({"file": batch["file"]})

    with pytest.raises(InputChanged, match="when the step was traced and read it"):
        run(leak, "validate", True)
    assert kept == [{"file": "0.png"}]
    assert type(kept[0]["file"]) is str


@pytest.mark.parametrize(("depth", "seconds"), [(9, 1.0), (0, 0.0)], ids=["deep", "slow"])
def test_a_stand_in_whose_holder_is_not_found_may_not_change(
    depth: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for who keeps one goes a few levels up, for a second: it cannot deny it then."""
    monkeypatch.setattr(leaks, "_SECONDS", seconds)
    kept: list[Any] = []

    def leak(module: Any, batch: Any, batch_idx: int) -> None:
        held: Any = {"file": batch["file"]}
        for _ in range(depth):
            held = [held]
        kept.append(held)

    with pytest.raises(InputChanged, match="when the step was traced and read it"):
        run(leak, "validate", True)


def test_an_index_kept_elsewhere_warns_of_the_step() -> None:
    kept: dict[str, int] = {}

    def leak(module: Any, batch: Any, batch_idx: int) -> None:
        kept["index"] = batch_idx

    with pytest.warns(FrozenValueWarning, match=r"batch_idx was read .* in validation_step"):
        run(leak, "validate", True)
    assert kept == {"index": 0}
    assert type(kept["index"]) is int


@pytest.mark.fits
def test_arguments_of_optimizer_step_are_passed_on() -> None:
    class Keeps(Steps):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            self.at = epoch, batch_idx
            optimizer.step(closure=closure)

    ours = fit(lambda: Keeps(lambda *_: None), lambda: (loader(),), static=True, max_epochs=2)
    assert ours.module.at == (1, 2)


def test_each_of_several_loaders_has_its_own(tmp_path: Any) -> None:
    class Several(Steps):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch["file"], batch_idx, dataloader_idx

    results = make_trainer(True).predict(Several(everything), [loader(2), loader(3)])
    assert results == [[(f"{i}.png", i, k) for i in range(k + 2)] for k in range(2)]


def test_keys_of_results_are_plain() -> None:
    def by_name(module: Any, batch: Any, batch_idx: int) -> Any:
        return {batch["file"]: batch["x"]}

    module = Steps(by_name)
    [result] = make_trainer(True, limit_predict_batches=1).predict(module, loader())
    assert [type(key) for key in result] == [str]


def test_an_object_of_the_batch_that_is_used_is_an_error_on_that_line() -> None:
    def use(module: Any, batch: Any, batch_idx: int) -> Any:
        return batch["meta"].name

    with pytest.raises(UnsupportedInput, match=r"batch\['meta'\] is a Meta, which") as error:
        run(use, "predict", True)
    assert error.value.line is not None
    assert error.value.line.source == 'return batch["meta"].name'

    def turn(module: Any, batch: Any, batch_idx: int) -> Any:
        return torch.from_numpy(batch["array"])

    with pytest.raises(UnsupportedInput, match="An object of the batch went to") as error:
        run(turn, "predict", True)
    assert error.value.line is not None
    assert error.value.line.source == 'return torch.from_numpy(batch["array"])'


# Python 3.13 tells of an error that torch.tensor() has dropped while it looked for attributes
@pytest.mark.filterwarnings("ignore:Exception ignored in PyObject_HasAttrString")
@pytest.mark.parametrize(
    "use",
    [
        lambda o: np.asarray(o),
        lambda o: torch.as_tensor(o),
        lambda o: torch.tensor(o),
        lambda o: len(o),
        lambda o: o[0],
        lambda o: o + 1,
        lambda o: torch.ones(1) * o,
        lambda o: [*o],
        lambda o: f"{o}",
        lambda o: bool(o),
        lambda o: np.sum(o),
        lambda o: o.shape,
        lambda o: torch.stack([torch.from_numpy(o)]),
    ],
)
def test_every_use_of_an_array_is_an_error(use: Any) -> None:
    with pytest.raises(UnsupportedInput):
        run(lambda module, batch, _: use(batch["array"]), "predict", True)


@pytest.mark.numbers
def test_keys_added_to_the_batch_reach_the_hooks_after_the_step() -> None:
    class Adds(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch["pred"] = self.layer(batch["x"]).detach()
            batch["more"]["of"] = batch["file"]
            batch["x"] = batch["x"] + 1
            batch["names"].append(batch_idx)
            return self.layer(batch["x"]).sum()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(
                (batch["pred"].tolist(), batch["more"]["of"], batch["x"].tolist(), batch["names"])
            )

    ours, stock = (
        fit(lambda: Adds(everything), lambda: (loader(),), static=static).module
        for static in (True, False)
    )
    assert len(ours.seen) == len(stock.seen) == 3
    for a, b in zip(ours.seen, stock.seen, strict=True):
        np.testing.assert_allclose(a[0], b[0], rtol=1e-5)
        assert a[1:] == b[1:]


@pytest.mark.numbers
def test_keys_that_the_step_takes_out_of_the_batch_are_gone_in_the_hooks_after_it() -> None:
    class Removes(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            del batch["more"]["id"]
            return self.layer(batch.pop("x")).sum()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(([*batch], [*batch["more"]], batch["file"]))

    ours, stock = (
        fit(lambda: Removes(everything), lambda: (loader(),), static=static).module
        for static in (True, False)
    )
    rest = [key for key in batches(1)[0] if key != "x"]
    assert ours.seen == stock.seen == [(rest, ["pair"], f"{i}.png") for i in range(3)]


@pytest.mark.numbers
def test_a_batch_that_comes_again_with_added_keys_is_the_same_batch() -> None:
    class Adds(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch["pred"] = self.layer(batch["x"]).detach()
            return self.layer(batch["x"]).sum()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(batch["pred"].sum().item())

    data = [{"x": torch.full((2, 3), float(i))} for i in range(3)]

    def again() -> Any:
        return (DataLoader(data, batch_size=None, collate_fn=lambda batch: batch),)

    ours = fit(lambda: Adds(everything), again, static=True, max_epochs=2)
    stock = fit(lambda: Adds(everything), again, static=False, max_epochs=2)
    assert ours.module.seen == pytest.approx(stock.module.seen, rel=1e-5)
