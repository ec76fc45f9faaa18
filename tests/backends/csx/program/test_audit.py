"""Audits: the step is traced again now and then, and what would be another program is told."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import inspect
import itertools
import logging
import sys
import types
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from harness import Run, assert_same_run, both, defaults, fit, make_trainer
from models import Classifier, loader, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fulgurite
from fulgurite.backends.csx.contract.frozen_reads import (
    FrozenValueNote,
    FrozenValueWarning,
    forget_warned_lines,
)
from fulgurite.backends.csx.diagnostics.trace_errors import GraphChanged, TraceError
from fulgurite.backends.csx.graph import rng
from fulgurite.backends.csx.objects.python_state import PythonState
from fulgurite.backends.csx.program import audit

pytestmark = pytest.mark.fits

BATCHES, CHANGES_AT = 6, 4


@pytest.fixture(autouse=True)
def there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are audits, and they may take all the time there is."""
    monkeypatch.setitem(defaults, "audit", True)
    monkeypatch.setattr(audit, "SHARE", 1e9)


def batches(count: int = BATCHES) -> Any:
    return loader(16 * count)


class Changing(Classifier):
    """What a step reads; ``change`` is what the host does to it before a batch."""

    def prepare(self) -> None:
        """Make what the step reads."""

    def __init__(self) -> None:
        super().__init__(mlp(), torch.optim.SGD)
        self.prepare()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == CHANGES_AT:
            self.change()

    def change(self) -> None:
        """Change it."""

    def weigh(self, loss: Tensor) -> Any:
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        return self.weigh(nn.functional.cross_entropy(logits, batch[1]))


class Hparams(Changing):
    def prepare(self) -> None:
        self.save_hyperparameters({"beta": 0.5})

    def change(self) -> None:
        self.hparams.beta = 0.75

    def weigh(self, loss: Tensor) -> Any:
        return loss * self.hparams.beta  # here


class InAList(Changing):
    def prepare(self) -> None:
        self.weights = [0.5, 1.0]

    def change(self) -> None:
        self.weights[0] = 0.75

    def weigh(self, loss: Tensor) -> Any:
        return loss * self.weights[0]  # here


class InADict(Changing):
    def prepare(self) -> None:
        self.weights = {"a": 0.5}

    def change(self) -> None:
        self.weights["a"] = 0.75

    def weigh(self, loss: Tensor) -> Any:
        return loss * self.weights["a"]  # here


class OfAnArray(Changing):
    def prepare(self) -> None:
        self.array = np.array([0.5, 1.0], dtype=np.float32)

    def change(self) -> None:
        self.array = np.array([0.75, 1.0], dtype=np.float32)

    def weigh(self, loss: Tensor) -> Any:
        return loss * torch.tensor(self.array).sum()  # here


class AnotherLoss(Changing):
    def prepare(self) -> None:
        self.loss_fn = nn.functional.mse_loss

    def change(self) -> None:
        self.loss_fn = nn.functional.l1_loss

    def weigh(self, loss: Tensor) -> Any:
        return self.loss_fn(loss, torch.zeros(()))  # here


class AForwardHook(Changing):
    def change(self) -> None:
        self.net.register_forward_hook(self.double)

    @staticmethod
    def double(module: Any, args: Any, output: Tensor) -> Tensor:
        return output * 2  # here


class ABackwardHook(Changing):
    def change(self) -> None:
        self.net[0].weight.register_hook(lambda gradient: gradient * 2)  # here


def closure() -> Any:
    weight = 0.5

    def change() -> None:
        nonlocal weight
        weight = 0.75

    return lambda loss: loss * weight, change  # here


class AClosure(Changing):
    def prepare(self) -> None:
        self.scale, self.change = closure()  # type: ignore[method-assign]

    def weigh(self, loss: Tensor) -> Any:
        return self.scale(loss)


class OwnGenerator(Changing):
    def prepare(self) -> None:
        self.rng = np.random.default_rng(3)

    def weigh(self, loss: Tensor) -> Any:
        return loss * (1 + self.rng.normal())  # here


class HiddenTeacher(Changing):
    def prepare(self) -> None:
        self._teacher = [copy.deepcopy(self.net)]

    def change(self) -> None:
        self._teacher = [copy.deepcopy(self.net)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            wanted = self._teacher[0](batch[0])
        return nn.functional.mse_loss(self.net(batch[0]), wanted + 1)


@dataclasses.dataclass
class Holder:
    weight: Tensor


class AnObject(Changing):
    def prepare(self) -> None:
        self.holder = Holder(torch.tensor(0.5))

    def change(self) -> None:
        self.holder = Holder(torch.tensor(0.75))

    def weigh(self, loss: Tensor) -> Any:
        return loss * self.holder.weight


TOLD = [
    Hparams,
    InAList,
    InADict,
    OfAnArray,
    AnotherLoss,
    AForwardHook,
    ABackwardHook,
    AClosure,
    OwnGenerator,
]


def marked(*kinds: Any) -> list[int]:
    found = []
    for kind in kinds:
        lines, first = inspect.getsourcelines(kind)
        found += [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return found


@pytest.mark.numbers
@pytest.mark.parametrize("kind", [HiddenTeacher, AnObject])
def test_tensors_that_the_host_replaces_in_containers_and_objects_are_followed(kind: Any) -> None:
    ours, stock = both(kind, lambda: (batches(),))
    assert_same_run(ours, stock)


@pytest.mark.parametrize("kind", TOLD)
def test_what_the_host_changed_is_an_error_with_line_and_steps(kind: type[Changing]) -> None:
    with pytest.raises(GraphChanged) as caught:
        fit(kind, lambda: (batches(),), static=True)
    error, text = caught.value, str(caught.value)
    at = 1 if kind is OwnGenerator else CHANGES_AT
    assert f"changed: between step {at} and step {at + 1}" in text
    assert "before: " in text
    assert "now: " in text
    assert error.line is not None
    assert error.line.line in marked(kind, closure)
    assert error.remedy


def uneven(*sizes: int) -> Any:
    """Batches of these sizes."""
    drawn = torch.Generator().manual_seed(0)
    rows = [(torch.randn(n, 8, generator=drawn), torch.arange(n) % 4) for n in sizes]
    return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("at_first_s", [audit.AT_FIRST_S, 0.0], ids=["at once", "when it is rare"])
def test_another_programs_first_trace_hides_no_change(
    at_first_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's own code runs to be traced: what changed before is no doing of that."""
    monkeypatch.setattr(audit, "SHARE", 0.0)
    monkeypatch.setattr(audit, "AT_FIRST_S", at_first_s)
    monkeypatch.setattr(audit, "COMPARING", 1e-9)
    sizes = [16] * (CHANGES_AT + 1) + [8] + ([] if at_first_s else [16, 8])
    with pytest.raises(GraphChanged, match=r"weights\['a'\]") as caught:
        fit(InADict, lambda: (uneven(*sizes),), static=True)
    seen_at = CHANGES_AT + (1 if at_first_s else 3)
    assert f"and step {seen_at};" in str(caught.value)


@pytest.mark.parametrize("kind", [InAList, InADict, Hparams])
def test_old_and_new_value_are_said(kind: type[Changing]) -> None:
    with pytest.raises(GraphChanged, match=r"before: mul\(.*0.5\)(.|\n)*now: +mul\(.*0.75\)"):
        fit(kind, lambda: (batches(),), static=True)


@pytest.mark.parametrize("kind", TOLD)
def test_without_audits_it_runs_on_in_silence(kind: type[Changing]) -> None:
    run = fit(kind, lambda: (batches(),), static=True, backend={"audit": False})
    assert len(run.losses) == BATCHES


# -- Python values that would change on every step -------------------------------------------------


class Counts(Changing):
    def prepare(self) -> None:
        self.box = self.make()

    def make(self) -> Any:
        return {"n": 0}

    def count(self) -> None:
        self.box["n"] += 1  # here

    def weigh(self, loss: Tensor) -> Any:
        self.count()
        return loss


class ASet(Counts):
    def make(self) -> Any:
        return set()

    def count(self) -> None:
        self.box.add(len(self.box))  # here


class ADeque(Counts):
    def make(self) -> Any:
        return collections.deque()

    def count(self) -> None:
        self.box.append(3)  # here


class AnObjects(Counts):
    def make(self) -> Any:
        return types.SimpleNamespace(n=0)

    def count(self) -> None:
        self.box.n += 1  # here


def warnings_of(make: Any, **options: Any) -> tuple[Run, list[warnings.WarningMessage]]:
    forget_warned_lines()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", FrozenValueWarning)
        run = fit(make, lambda: (batches(),), static=True, **options)
    return run, [one for one in seen if issubclass(one.category, FrozenValueWarning)]


@pytest.mark.parametrize("kind", [ASet, ADeque, AnObjects])
def test_a_counter_warns_once_with_its_line(kind: type[Counts]) -> None:
    run, [warning] = warnings_of(kind)
    assert "self.box" in str(warning.message)
    assert "in the run it happens once" in str(warning.message)
    assert warning.category is FrozenValueNote
    assert [warning.lineno] == marked(kind.count)
    box = run.module.box
    assert len(vars(box) if kind is AnObjects else box) == 1  # audits are undone


OF_THE_FILE = np.random.RandomState(3)


class Draws(Counts):
    """From a generator whose methods nobody can watch; what it drew takes one branch."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def count(self) -> None:
        self.drew = self.rng.random() < 2  # here


class DrawsFromAGlobal(Counts):
    def count(self) -> None:
        self.drew = OF_THE_FILE.rand() < 2  # here


@pytest.mark.parametrize(("kind", "name"), [(Draws, "self.rng"), (DrawsFromAGlobal, "OF_THE_FILE")])
def test_a_generator_that_drew_warns_once_with_its_line(kind: type[Counts], name: str) -> None:
    _, [warning] = warnings_of(kind)
    text = str(warning.message)
    assert text.startswith(f"{name} drew while the step was traced; the program keeps what it drew")
    assert "Use torch.rand, torch.randint or torch.randperm" in text
    assert warning.category is FrozenValueWarning
    assert [warning.lineno] == marked(kind.count)


class InAnArray(Counts):
    def make(self) -> Any:
        return np.zeros(1, int)

    def count(self) -> None:
        self.box[0] += 1  # here


class AnArrayAnew(InAnArray):
    def count(self) -> None:
        self.box = self.box + 1  # here


class Bytes(InAnArray):
    def make(self) -> Any:
        return bytearray(1)


class SeenBytes(InAnArray):
    def make(self) -> Any:
        return memoryview(bytearray(1))


class Machines(InAnArray):
    def make(self) -> Any:
        return array.array("i", [0])


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class InSlots(AnObjects):
    def make(self) -> Any:
        return Slotted()

    def count(self) -> None:
        self.box.n += 1  # here


class Iterated(Counts):
    def make(self) -> Any:
        return itertools.count()

    def count(self) -> None:
        next(self.box)  # here


class Cycled(Iterated):
    def make(self) -> Any:
        return itertools.cycle([1, 2, 3])


class Zipped(Iterated):
    def make(self) -> Any:
        return zip(itertools.count(), iter(range(99)), strict=False)


class Generated(Iterated):
    def make(self) -> Any:
        n = 0
        while True:
            n += 1
            yield n


class PastTheModule(InAnArray):
    def make(self) -> Any:
        return 0

    def count(self) -> None:
        vars(self)["box"] += 1  # here


class PastItsSetattr(PastTheModule):
    def count(self) -> None:
        object.__setattr__(self, "box", vars(self)["box"] + 1)  # here


@pytest.mark.parametrize(
    "kind",
    [
        *(InAnArray, AnArrayAnew, Bytes, SeenBytes, Machines, PastTheModule, PastItsSetattr),
        *(InSlots, Iterated, Cycled, Zipped, Generated),
    ],
)
def test_what_is_no_container_is_told_too(kind: type[Counts]) -> None:
    _, [warning] = warnings_of(kind)
    assert "self.box" in str(warning.message)
    assert "in the run it happens once" in str(warning.message)


class ADefault(Counts):
    def count(self, calls: list[int] = [0], *, of: dict[str, int] = {}) -> None:  # noqa: B006
        calls[0] += 1  # here
        of["n"] = of.get("n", 0) + 1


def test_a_default_of_an_argument_is_told_too() -> None:
    _, told = warnings_of(ADefault)
    names = [str(one.message).partition(" was changed")[0] for one in told]
    assert names == ["calls[0]", "of['n']"]
    assert told[0].lineno == marked(ADefault.count)[0]


class Counting(pl.Callback):
    n = 0

    def __init__(self) -> None:
        self.n = 0

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.n += 1  # here


def test_a_callbacks_counter_in_a_traced_hook_warns_once() -> None:
    counting = Counting()
    _, [warning] = warnings_of(Changing, callbacks=(counting,))
    assert "Counting.n was changed from 1 to 2" in str(warning.message)
    assert [warning.lineno] == marked(Counting)
    assert counting.n == 1


# -- when, and what it leaves ----------------------------------------------------------------------


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Stage and step of each audit."""
    found: list[tuple[str, int]] = []
    look = audit.Audits._look

    def noted(self: Any, ready: Any, again: Any, step: int) -> None:
        found.append((self._stage, step))
        look(self, ready, again, step)

    monkeypatch.setattr(audit.Audits, "_look", noted)
    return found


class Validated(Classifier):
    def __init__(self) -> None:
        super().__init__(mlp(0.5))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    test_step = predict_step = validation_step


OPTIONS: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0}


def test_the_second_and_the_last_batch_of_each_stage_whatever_it_takes(
    looked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "SHARE", 0.0)
    run = fit(Validated, lambda: (batches(), batches()), static=True, **OPTIONS)
    for stage in ("test", "predict"):
        getattr(run.trainer, stage)(run.module, batches())
    fitted = [("training", 2), ("validation", 2), ("training", 12), ("validation", 12)]
    assert looked == [*fitted, ("test", 2), ("test", 6), ("predict", 2)]


def test_while_there_is_time_the_first_and_the_last_batch_of_each_epoch(
    looked: list[Any],
) -> None:
    make_trainer(True, **OPTIONS).fit(Validated(), batches())
    assert looked == [("training", step) for step in (2, BATCHES, BATCHES + 1, 2 * BATCHES)]


def test_after_host_code(looked: list[Any]) -> None:
    fit(Changing, lambda: (batches(),), static=True)
    assert looked == [("training", step) for step in range(2, BATCHES + 1)]


def test_each_entry_point_and_each_program(looked: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(audit, "SHARE", 0.0)
    fit(lambda: Classifier(mlp()), lambda: (batches(),), static=True, accumulate_grad_batches=3)
    assert looked == [("training", 2), ("training", 3), ("training", 6)]
    looked.clear()
    backend = {"max_programs": 2}
    fit(lambda: Classifier(mlp()), lambda: (loader(40),), static=True, backend=backend, **OPTIONS)
    assert looked == [("training", 2), ("training", 6)]


@pytest.mark.parametrize(
    "backend", [{"audit": False}, {"retrace_every_iteration": True}, {"validate_only": True}]
)
def test_none_where_nothing_is_looked_at_again(looked: list[Any], backend: dict[str, Any]) -> None:
    fit(lambda: Classifier(mlp()), lambda: (batches(),), static=True, backend=backend)
    assert looked == []


def test_a_function_is_looked_at_too(looked: list[Any]) -> None:
    net, scale = mlp(), [1.0]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    fulgurite.backend("CSX", autogen_policy="disabled")

    @fulgurite.trace
    def step(x: Tensor) -> Tensor:
        loss = net(x).square().mean() * scale[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(4, 8)
    for _ in range(3):
        step(x)
    assert looked[:1] == [("step", 2)]
    scale[0] = 2.0
    with pytest.raises(GraphChanged, match="between step 3 and step 4"):
        step(x)


class Noisy(Validated):
    """Has every kind of effect in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}
        self.rng = np.random.default_rng(3)
        self.deque: collections.deque[int] = collections.deque()
        self.space = types.SimpleNamespace(n=0)
        self.array = np.zeros(2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        print("a print")
        print("an error", file=sys.stderr)
        warnings.warn("a warning", RuntimeWarning, stacklevel=1)
        logging.getLogger("mine").error("a record")
        self.seen.setdefault("all", []).append(1)
        self.rng.normal()
        self.deque.append(1)
        self.space.n += 1
        self.array += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::fulgurite.FrozenValueWarning")
def test_nothing_happens_twice(
    capfd: pytest.CaptureFixture[str], looked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[str] = []
    monkeypatch.setattr(logging.getLogger("mine"), "handle", lambda one: records.append(one.msg))
    with pytest.warns(RuntimeWarning, match="a warning") as seen:
        run = fit(Noisy, lambda: (batches(),), static=True)
    assert len(looked) > 1
    out, err = capfd.readouterr()
    assert (out.count("a print"), err.count("an error")) == (1, 1)
    assert records == ["a record"]
    assert sum(one.category is RuntimeWarning for one in seen) == 1
    module, once = run.module, np.random.default_rng(3)
    once.normal()
    assert module.rng.normal() == once.normal()
    assert (module.seen, list(module.deque), module.space.n) == ({"all": [1]}, [1], 1)
    assert module.array.tolist() == [1.0, 1.0]


def counter() -> Any:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


class Elsewhere(Changing):
    """Counts where neither a snapshot of the module nor one of its trees looks."""

    of_class = 0

    def prepare(self) -> None:
        self.count, self.array = counter(), np.zeros(1)
        self.rng = np.random.default_rng(3)

    def weigh(self, loss: Tensor) -> Any:
        self.count()
        self.array += 1
        self.rng.normal()
        Elsewhere.of_class += 1
        return loss


@pytest.mark.filterwarnings("ignore::fulgurite.FrozenValueWarning")
def test_a_second_trace_leaves_closures_arrays_generators_and_classes_alone(
    looked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Elsewhere, "of_class", 0)
    module: Any = fit(Elsewhere, lambda: (batches(3),), static=True).module
    assert len(looked) > 1
    once = np.random.default_rng(3)
    once.normal()
    assert (module.count(), module.array[0], module.of_class) == (2, 1.0, 1)
    assert module.rng.normal() == once.normal()


class Registry(dict[str, Any]):
    """A dict whose own methods know its elements by other keys, as transformers has one."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key.upper(), value)

    def get(self, key: str) -> Any:  # type: ignore[override]
        return super().get(key.upper())


class Registered(Changing):
    """Notes in such a dict, and takes out of it, what it did."""

    def prepare(self) -> None:
        self.known = Registry(A=1, b=2)

    def weigh(self, loss: Tensor) -> Any:
        self.known["a"] = 5
        self.known.pop("b", None)
        return loss * self.known.get("a")


def test_a_dict_with_methods_of_its_own_is_compared_and_put_back(looked: list[Any]) -> None:
    run = fit(Registered, lambda: (batches(),), static=True)
    assert len(looked) > 1
    assert dict(run.module.known) == {"A": 5}


def test_what_a_second_trace_took_out_of_such_a_dict_is_there_again() -> None:
    module = Registered()
    state = PythonState(module, "self", ())
    module.weigh(torch.ones(()))
    assert dict(module.known) == {"A": 5}
    state.restore()
    assert dict(module.known) == {"A": 1, "b": 2}


class Classes(collections.OrderedDict[str, Any]):
    """Has classes and gives instances of them, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def test_a_dict_that_makes_what_it_gives_keeps_what_it_has(looked: list[Any]) -> None:
    class Activated(Changing):
        def prepare(self) -> None:
            self.known = Classes(silu=nn.SiLU, relu=nn.ReLU)

        def weigh(self, loss: Tensor) -> Any:
            return self.known["silu"](loss)

    run = fit(Activated, lambda: (batches(),), static=True)
    assert len(looked) > 1
    assert list(run.module.known.items()) == [("silu", nn.SiLU), ("relu", nn.ReLU)]


@pytest.mark.long
@pytest.mark.numbers
def test_the_numbers_are_those_without_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "EVERY_STEP", True)
    ends = []
    for backend in ({}, {"audit": False}):
        run = fit(Validated, lambda: (batches(),), static=True, backend=backend)
        ends.append((run.losses, rng.collect()["torch"].tolist()))
    assert ends[0] == ends[1]
    assert_same_run(*both(Validated, lambda: (batches(),), max_epochs=2))


def test_what_cannot_be_traced_again_is_one_warning_and_goes_on() -> None:
    class Exhausted(Changing):
        def prepare(self) -> None:
            self.once = iter([1.0])

        def weigh(self, loss: Tensor) -> Any:
            return loss * next(self.once)  # here

    run, [warning] = warnings_of(Exhausted)
    assert "could not be traced again" in str(warning.message)
    assert "StopIteration" in str(warning.message)
    assert len(run.losses) == BATCHES


def test_a_step_that_is_no_longer_static_is_its_own_error() -> None:
    class Branching(Changing):
        def prepare(self) -> None:
            self.flags = {"branch": False}

        def change(self) -> None:
            self.flags["branch"] = True

        def weigh(self, loss: Tensor) -> Any:
            if self.flags["branch"] and loss > 0:  # here
                return loss * 2
            return loss

    with pytest.raises(TraceError, match=r"between step 4 and step 5") as caught:
        fit(Branching, lambda: (batches(),), static=True)
    assert [caught.value.line.line] == marked(Branching)


class Grows(Changing):
    """A hook adds a module that no step uses."""

    def change(self) -> None:
        self.copy = nn.Linear(8, 4)


def test_a_module_that_a_hook_adds_is_no_change_of_the_step() -> None:
    assert len(fit(Grows, lambda: (batches(),), static=True).losses) == BATCHES


class Uses(Grows):
    """The steps after it use what no optimizer holds."""

    def weigh(self, loss: Tensor) -> Any:
        return loss + self.copy.weight.square().sum() if hasattr(self, "copy") else loss


@pytest.mark.numbers
def test_a_module_that_a_hook_adds_is_used_from_then_on() -> None:
    assert_same_run(*both(Uses, lambda: (batches(),)))


class Ends(Changing):
    """Ends the run in the middle of an epoch, some steps after what the step reads has changed."""

    def prepare(self) -> None:
        self.box = types.SimpleNamespace(scale=1.0)

    def change(self) -> None:
        self.box.scale = 2.0

    def weigh(self, loss: Tensor) -> Any:
        return loss * self.box.scale

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = batch_idx == CHANGES_AT + 2


class EndsUnchanged(Ends):
    def change(self) -> None:
        self.unread = 2.0


@pytest.mark.parametrize("kind", [Ends, EndsUnchanged])
def test_what_changed_before_a_run_ends_early_is_told(
    kind: type[Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "SHARE", 0.0)  # there is no time to look again
    monkeypatch.setattr(audit, "COMPARING", 1e-9)
    monkeypatch.setattr(audit, "AT_FIRST_S", 0.0)
    forget_warned_lines()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = fit(kind, lambda: (batches(40),), static=True)
    assert len(run.losses) == CHANGES_AT + 3
    told = [str(one.message) for one in seen if one.category is FrozenValueWarning]
    assert [text.split(" changed")[0] for text in told] == ["self.box.scale"] * (kind is Ends)


class SharesGradients(Changing):
    """Somebody else holds gradients while autograd takes them over, so that it copies them."""

    def configure_model(self) -> None:
        weight, held = self.net[0].weight, list[Tensor]()
        weight.register_hook(lambda gradient: held.append(gradient) if SHARING else None)
        weight.register_post_accumulate_grad_hook(lambda p: held.clear())

    def change(self) -> None:
        SHARING.append(True)


SHARING: list[bool] = []


@pytest.mark.numbers
@pytest.mark.parametrize("is_first", [False, True])
def test_a_copy_that_autograd_makes_of_a_gradient_is_no_difference(
    monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SHARING", [True] if is_first else [])
    if is_first:
        monkeypatch.setattr(SharesGradients, "change", lambda self: SHARING.clear())
    monkeypatch.setattr(audit, "EVERY_STEP", True)
    ours, stock = both(SharesGradients, lambda: (batches(),))
    assert_same_run(ours, stock)
