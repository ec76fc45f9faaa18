"""Tensors in lists, tuples, dicts and objects that a module holds: as stock, or an error."""

from __future__ import annotations

import collections
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_close, assert_same_run, both, fit
from models import Classifier, loader, mlp
from torch import Tensor, nn

import fulgurite
from fulgurite.backends import reset_backend
from fulgurite.backends.csx.diagnostics.trace_errors import (
    StateBornInStep,
    StateChanged,
    TraceError,
)

FEW: dict[str, Any] = {"limit_train_batches": 4, "max_epochs": 2}


class Holds(Classifier):
    """``work(module, loss)`` in the step; it returns another loss, or None for this one."""

    def __init__(self, start: Callable[[Any], None], work: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(mlp())
        self.work = work
        start(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        worked = self.work(self, loss)
        return loss if worked is None else worked


class Pair(NamedTuple):
    old: Any
    new: Any


@dataclasses.dataclass
class Means:
    slow: Any
    fast: Any


class Slotted:
    __slots__ = ("unset", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Meter:
    """A mean that begins with the first value."""

    def __init__(self) -> None:
        self.value: Any = None
        self.sum: Any = 0.0

    def begin(self, x: Tensor) -> None:
        if self.value is None:
            self.value = x
        self.value = 0.9 * self.value + 0.1 * x


class Average:
    """Averages of all parameters, as libraries keep them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module  # which is registered: not searched again
        self.shadow = [p.detach().clone() for p in module.parameters()]

    def update(self) -> None:
        with torch.no_grad():
            for mean, p in zip(self.shadow, self.module.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)


def zero() -> Tensor:
    return torch.zeros(())


def leaves(value: Any) -> Any:
    """What is in a container or an object, as lists and dicts."""
    if isinstance(value, Slotted):
        return [leaves(value.value)]
    if isinstance(value, (Meter, Means, SimpleNamespace)):
        return leaves(vars(value))
    if isinstance(value, dict):
        return {key: leaves(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [leaves(item) for item in value]
    return value.shadow if isinstance(value, Average) else value


# -- what equals stock -----------------------------------------------------------------------------


def rotates_a_tuple(m: Any, loss: Tensor) -> Tensor:
    m.past = (m.past[1], loss.detach())
    return loss + 0.1 * m.past[0]


def rotates_a_namedtuple(m: Any, loss: Tensor) -> Tensor:
    m.past = Pair(m.past.new, loss.detach())
    return loss + 0.1 * m.past.old


def rotates_a_list(m: Any, loss: Tensor) -> Tensor:
    total = 0.1 * m.past[0]
    m.past = [m.past[1], loss.detach()]
    return loss + total


def shifts_a_list(m: Any, loss: Tensor) -> Tensor:
    total = 0.1 * m.past[0] + 0.2 * m.past[-1]
    m.past.pop(0)
    m.past.append(loss.detach())
    return loss + total


def replaces_an_element(m: Any, loss: Tensor) -> Tensor:
    m.past[0] = 0.9 * m.past[0] + loss.detach()
    return loss + 0.1 * m.past[0]


def changes_elements_in_place(m: Any, loss: Tensor) -> Tensor:
    m.past[1].mul_(0.9).add_(loss.detach())
    return loss + 0.1 * m.past[1]


def replaces_in_a_dict(m: Any, loss: Tensor) -> Tensor:
    m.d["k"] = 0.9 * m.d["k"] + loss.detach()
    return loss + 0.1 * m.d["k"]


def gets_what_is_there(m: Any, loss: Tensor) -> Tensor:
    m.d["k"] = 0.9 * m.d.get("k", loss.detach()) + loss.detach()
    return loss + 0.1 * m.d["k"]


def changes_a_dict_in_place(m: Any, loss: Tensor) -> Tensor:
    m.d["k"].mul_(0.9).add_(loss.detach())
    return loss + 0.1 * m.d["k"]


def makes_a_dict_anew(m: Any, loss: Tensor) -> Tensor:
    m.d = {**m.d, "k": 0.5 * m.d["k"] + loss.detach()}
    return loss + 0.1 * m.d["k"] + 0.1 * m.d["n"]


def fills_a_defaultdict(m: Any, loss: Tensor) -> Tensor:
    m.d["k"] += loss.detach()
    return loss + 0.1 * m.d["k"]


def moves_a_deque(m: Any, loss: Tensor) -> Tensor:
    total = torch.stack(list(m.past)).mean()
    m.past.append(loss.detach())
    return loss + 0.1 * total


def moves_a_deque_left(m: Any, loss: Tensor) -> Tensor:
    m.past.appendleft(loss.detach())
    return loss + 0.1 * m.past[-1]


def an_object_s_attribute(m: Any, loss: Tensor) -> Tensor:
    m.o.value = 0.9 * m.o.value + loss.detach()
    return loss + 0.1 * m.o.value


def a_dataclass(m: Any, loss: Tensor) -> Tensor:
    m.o.slow = 0.99 * m.o.slow + 0.01 * loss.detach()
    m.o.fast["x"].mul_(0.5).add_(loss.detach())
    return loss + 0.1 * m.o.fast["x"] - m.o.slow


def nested(m: Any, loss: Tensor) -> Tensor:
    inner = m.d["a"][0].value
    inner["z"] = (inner["z"][1], loss.detach())
    return loss + 0.1 * inner["z"][0]


def averages(m: Any, loss: Tensor) -> Tensor:
    m.o.update()
    return loss + 0.01 * sum(mean.square().sum() for mean in m.o.shadow)


def the_hyperparameters(m: Any, loss: Tensor) -> Tensor:
    m.hparams.scale.mul_(0.9)
    return loss * m.hparams.scale


def a_hidden_module(m: Any, loss: Tensor) -> Tensor:
    with torch.no_grad():
        for mean, p in zip(m.hidden[0].parameters(), m.net.parameters(), strict=True):
            mean.lerp_(p, 0.1)
    return loss + 0.1 * sum(p.square().sum() for p in m.hidden[0].parameters())


def two_share(m: Any, loss: Tensor) -> Tensor:
    m.d["k"] = 0.9 * m.d["k"] + loss.detach()
    return loss + 0.1 * m.net.d["k"]


def swaps(m: Any, loss: Tensor) -> Tensor:
    m.d["a"], m.d["b"] = m.d["b"], m.d["a"] + loss.detach()
    return loss + 0.1 * m.d["a"]


def past(kind: Any) -> Callable[[Any], None]:
    return lambda m: setattr(m, "past", kind([torch.tensor(0.1), torch.tensor(0.5)]))


def with_d(make: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda m: setattr(m, "d", make())


def with_o(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda m: setattr(m, "o", make(m))


def k() -> dict[str, Tensor]:
    return {"k": zero(), "n": torch.ones(())}


def hides(m: Any) -> None:
    m.hidden = [mlp().requires_grad_(False)]


def shared(m: Any) -> None:
    m.d = m.net.d = k()


SAME = [
    (rotates_a_tuple, past(tuple)),
    (rotates_a_namedtuple, past(Pair._make)),
    (rotates_a_list, past(list)),
    (shifts_a_list, past(list)),
    (replaces_an_element, past(list)),
    (replaces_an_element, past(deque)),
    (changes_elements_in_place, past(list)),
    (changes_elements_in_place, past(tuple)),
    (changes_elements_in_place, past(deque)),
    (replaces_in_a_dict, with_d(k)),
    (replaces_in_a_dict, with_d(lambda: OrderedDict(k()))),
    (gets_what_is_there, with_d(k)),
    (changes_a_dict_in_place, with_d(k)),
    (makes_a_dict_anew, with_d(k)),
    (fills_a_defaultdict, with_d(lambda: defaultdict(zero, k()))),
    (moves_a_deque, past(lambda items: deque(items, maxlen=2))),
    (moves_a_deque_left, past(lambda items: deque(items, maxlen=2))),
    (an_object_s_attribute, with_o(lambda m: SimpleNamespace(value=zero()))),
    (an_object_s_attribute, with_o(lambda m: Slotted(zero()))),
    (a_dataclass, with_o(lambda m: Means(zero(), {"x": zero()}))),
    (nested, with_d(lambda: {"a": [Slotted({"z": (torch.ones(()), zero())})]})),
    (averages, with_o(lambda m: Average(m.net))),
    (the_hyperparameters, lambda m: m.hparams.update(scale=torch.tensor(2.0))),
    (a_hidden_module, hides),
    (two_share, shared),
    (swaps, with_d(lambda: {"a": zero(), "b": torch.ones(())})),
]
HELD = ("past", "d", "o")


def name_of(value: Any) -> str:
    return getattr(value, "__name__", "")


def assert_same_leaves(ours: Any, stock: Any) -> None:
    for name in HELD:
        if hasattr(stock, name):
            assert type(getattr(ours, name)) is type(getattr(stock, name))
            assert_close(leaves(getattr(ours, name)), leaves(getattr(stock, name)))


@pytest.mark.numbers
@pytest.mark.parametrize(("work", "start"), SAME, ids=name_of)
def test_what_a_module_holds_is_state(work: Any, start: Any) -> None:
    ours, stock = both(lambda: Holds(start, work), lambda: (loader(),), **FEW)
    assert_same_run(ours, stock)
    assert_same_leaves(ours.module, stock.module)


@pytest.mark.long
@pytest.mark.numbers
@pytest.mark.compiler
def test_compiled_programs_keep_it_too() -> None:
    works = [rotates_a_tuple, replaces_in_a_dict, an_object_s_attribute]

    def start(m: Any) -> None:
        past(tuple)(m)
        m.d, m.o = k(), SimpleNamespace(value=zero())

    def work(m: Any, loss: Tensor) -> Tensor:
        m.last = {"loss": loss.detach()}
        m.d["seen"] = loss.detach()
        return sum(one(m, loss) for one in works)  # type: ignore[return-value]

    ours, stock = both(lambda: Holds(start, work), lambda: (loader(),), policy="default", **FEW)
    assert_same_run(ours, stock)
    assert_same_leaves(ours.module, stock.module)
    assert_close(ours.module.last, stock.module.last)


def one_tensor_in(kind: Any) -> Callable[[Any], None]:
    return lambda m: setattr(m, "past", kind([torch.tensor(0.5)] * 2))


TIED = [
    (rotates_a_tuple, one_tensor_in(tuple)),
    (shifts_a_list, one_tensor_in(list)),
    (replaces_an_element, one_tensor_in(list)),
    (moves_a_deque, one_tensor_in(lambda items: deque(items, maxlen=2))),
]


@pytest.mark.numbers
@pytest.mark.parametrize(("work", "start"), TIED, ids=name_of)
def test_one_tensor_in_several_places_becomes_several(work: Any, start: Any) -> None:
    ours, stock = both(lambda: Holds(start, work), lambda: (loader(),), **FEW)
    assert_same_run(ours, stock)
    assert_same_leaves(ours.module, stock.module)


@pytest.mark.numbers
def test_one_that_is_changed_in_place_stays_one() -> None:
    def work(m: Any, loss: Tensor) -> Tensor:
        m.past[0].mul_(0.9).add_(loss.detach())
        return loss + 0.1 * m.past[1]

    start = one_tensor_in(list)
    ours, stock = both(lambda: Holds(start, work), lambda: (loader(),), **FEW)
    assert_same_run(ours, stock)


@pytest.mark.fits
def test_a_gradient_that_would_be_lost_is_an_error() -> None:
    def start(m: Any) -> None:
        m.d = {"w": nn.Parameter(torch.ones(()))}

    with pytest.raises(TraceError, match=r"self\.d\['w'\] requires a gradient, but is no param"):
        fit(lambda: Holds(start, lambda m, loss: loss * m.d["w"]), lambda: (loader(),), static=True)


# -- what is only written: outputs -----------------------------------------------------------------


def writes_a_dict(m: Any, loss: Tensor) -> None:
    m.d["x"] = loss.detach()
    m.d["more"] = {"y": loss.detach() * 2, "n": 3}


def writes_an_object(m: Any, loss: Tensor) -> None:
    m.o.value = loss.detach()


def makes_longer(m: Any, loss: Tensor) -> None:
    m.d = m.d + [loss.detach()]  # noqa: RUF005  # as people write it


def makes_a_tuple_longer(m: Any, loss: Tensor) -> None:
    m.d += (loss.detach(),)


def makes_longer_by_a_star(m: Any, loss: Tensor) -> None:
    m.d = [*m.d, loss.detach(), loss.detach() * 2]


def makes_anew(m: Any, loss: Tensor) -> None:
    m.d = [loss.detach(), loss.detach() * 2]


def merges(m: Any, loss: Tensor) -> None:
    m.d = {**m.d, "x": loss.detach()}


def appends(m: Any, loss: Tensor) -> None:
    m.o.append(loss.detach())


def appends_inside(m: Any, loss: Tensor) -> None:
    m.d["losses"].append(loss.detach())


def caches(m: Any, loss: Tensor) -> Tensor:
    m.d["seen"] = loss.detach()
    if "mask" not in m.d:
        m.d["mask"] = torch.ones(3, 3).triu()
    return loss * m.d["mask"].sum()


OUTPUTS = [
    (writes_a_dict, with_d(dict)),
    (writes_an_object, with_o(lambda m: Meter())),
    (writes_an_object, with_o(lambda m: SimpleNamespace())),
    (writes_an_object, with_o(lambda m: Slotted(None))),
    (makes_longer, with_d(list)),
    (makes_a_tuple_longer, with_d(tuple)),
    (makes_longer, with_d(lambda: [zero()])),
    (makes_longer_by_a_star, with_d(list)),
    (makes_anew, with_d(list)),
    (makes_anew, with_d(lambda: [zero()])),
    (merges, with_d(dict)),
    (appends, with_o(lambda m: deque())),
    (appends, with_o(lambda m: deque(maxlen=3))),
    (appends_inside, with_d(lambda: {"losses": []})),
    (caches, with_d(dict)),
]


@pytest.mark.numbers
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("work", "start"), OUTPUTS, ids=name_of)
def test_what_is_only_written_is_an_output(work: Any, start: Any, accumulate: int) -> None:
    options = {**FEW, "accumulate_grad_batches": accumulate}
    ours, stock = both(lambda: Holds(start, work), lambda: (loader(),), **options)
    assert_same_run(ours, stock)
    assert_same_leaves(ours.module, stock.module)


@pytest.mark.numbers
@pytest.mark.parametrize(("work", "start"), [*SAME, *OUTPUTS], ids=name_of)
def test_retracing_finds_the_same_program(work: Any, start: Any) -> None:
    options = {"backend": {"retrace_every_iteration": True}, **FEW}
    ours, stock = both(lambda: Holds(start, work), lambda: (loader(),), **options)
    assert_same_run(ours, stock)
    assert_same_leaves(ours.module, stock.module)


@pytest.mark.numbers
def test_a_list_that_the_host_empties_each_epoch_grows_again() -> None:
    class Empties(Holds):
        def on_train_epoch_start(self) -> None:
            self.d = []

    make = lambda: Empties(with_d(list), makes_longer)  # noqa: E731
    for options in (FEW, {**FEW, "backend": {"retrace_every_iteration": True}}):
        ours, stock = both(make, lambda: (loader(),), **options)
        assert_close(ours.module.d, stock.module.d)


@pytest.mark.fits
def test_the_step_runs_no_more_often_than_it_is_seen_to(capsys: Any) -> None:
    def work(m: Any, loss: Tensor) -> None:
        print("in the step")
        m.phase += "+"
        m.d["x"] = loss.detach()

    def start(m: Any) -> None:
        m.d, m.phase = {}, ""

    with pytest.warns(fulgurite.FrozenValueWarning):
        run = fit(lambda: Holds(start, work), lambda: (loader(),), static=True, **FEW)
    assert run.module.phase == "+"
    assert capsys.readouterr().out.count("in the step") == 1


# -- state that begins with data -------------------------------------------------------------------


def gets_a_default(m: Any, loss: Tensor) -> Tensor:
    m.d["k"] = 0.9 * m.d.get("k", loss.detach()) + 0.1 * loss.detach()
    return loss + m.d["k"]


def keeps_the_first(m: Any, loss: Tensor) -> None:
    if "k" not in m.d:
        m.d["k"] = loss.detach()


def begins(m: Any, loss: Tensor) -> Tensor:
    m.o.begin(loss.detach())
    return loss + m.o.value


def sums_up(m: Any, loss: Tensor) -> None:
    m.o.sum += loss.detach()


def reads_what_it_makes_longer(m: Any, loss: Tensor) -> Tensor:
    m.d = [*m.d, loss.detach()]
    return loss + torch.stack(m.d).mean()


def reads_what_it_appends(m: Any, loss: Tensor) -> Tensor:
    m.o.append(loss.detach())
    return loss + sum(m.o)


def hands_on(m: Any, loss: Tensor) -> None:
    m.d["now"], m.d["before"] = loss.detach(), m.d.get("now")


BORN = [
    (gets_a_default, with_d(dict)),
    (keeps_the_first, with_d(dict)),
    (begins, with_o(lambda m: Meter())),
    (sums_up, with_o(lambda m: Meter())),
    (hands_on, with_d(dict)),
]


@pytest.mark.numbers
@pytest.mark.parametrize(("work", "start"), BORN, ids=name_of)
@pytest.mark.parametrize("retrace", [False, True])
def test_state_that_the_first_step_makes_is_that_of_stock(
    work: Any, start: Any, retrace: bool
) -> None:
    options = {"backend": {"retrace_every_iteration": retrace}, **FEW}
    ours, stock = both(lambda: Holds(start, work), lambda: (loader(),), **options)
    assert_same_run(ours, stock)
    assert_same_leaves(ours.module, stock.module)


READ = [
    (reads_what_it_makes_longer, with_d(list), 2, "to self.d, and reads", "maxlen=n"),
    (reads_what_it_appends, with_o(lambda m: deque()), 2, "to self.o, and reads", "maxlen=n"),
]


@pytest.mark.fits
@pytest.mark.parametrize(("work", "start", "offset", "what", "remedy"), READ, ids=name_of)
def test_what_grows_with_every_step_and_is_read_is_an_error(
    work: Any, start: Any, offset: Any, what: str, remedy: str
) -> None:
    made: list[Any] = []

    def make() -> Holds:
        made.append(Holds(start, work))
        return made[0]

    with pytest.raises(StateBornInStep) as caught:
        fit(make, lambda: (loader(),), static=True, **FEW)
    assert what in str(caught.value)
    assert remedy in str(caught.value)
    line = caught.value.line
    assert line is not None
    assert line.file == __file__
    if offset is not None:
        assert line.line == work.__code__.co_firstlineno + offset
    empty = Holds(start, work)
    for name in HELD:
        if hasattr(empty, name):
            assert_close(leaves(getattr(made[0], name)), leaves(getattr(empty, name)))


# -- the host --------------------------------------------------------------------------------------


def reads_only(m: Any, loss: Tensor) -> Tensor:
    return loss * m.d["k"]


def reads_deep(m: Any, loss: Tensor) -> Tensor:
    return loss * m.d["a"][0].value


class Changes(pl.Callback):
    """Gives the module another number after each batch."""

    def __init__(self, change: Callable[[Any, Tensor], None]) -> None:
        self.change = change

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.change(module, torch.tensor(1.0 + trainer.global_step))


def puts(m: Any, x: Tensor) -> None:
    m.d["k"] = x


def puts_another_dict(m: Any, x: Tensor) -> None:
    m.d = {"k": x}


def fills(m: Any, x: Tensor) -> None:
    m.d["k"].copy_(x)


def puts_another_object(m: Any, x: Tensor) -> None:
    m.d = {"a": [Slotted(x)]}


HOST = [
    (puts, reads_only, with_d(k)),
    (puts_another_dict, reads_only, with_d(k)),
    (fills, reads_only, with_d(k)),
    (puts, replaces_in_a_dict, with_d(k)),
    (fills, changes_a_dict_in_place, with_d(k)),
    (puts_another_object, reads_deep, with_d(lambda: {"a": [Slotted(zero())]})),
]


@pytest.mark.numbers
@pytest.mark.parametrize(("change", "work", "start"), HOST, ids=name_of)
def test_what_the_host_puts_there_is_read(change: Any, work: Any, start: Any) -> None:
    changes = (Changes(change),)
    make = lambda: Holds(start, work)  # noqa: E731
    assert_same_run(*both(make, lambda: (loader(),), callbacks=changes, **FEW))


@pytest.mark.numbers
def test_references_that_the_host_keeps_stay_what_they_were() -> None:
    class Keeps(Holds):
        def on_train_batch_end(self, *args: Any) -> None:
            self.kept.append((self.d["k"], self.past[1]))

    def start(m: Any) -> None:
        past(tuple)(m)
        m.d, m.kept = k(), []

    def work(m: Any, loss: Tensor) -> Tensor:
        return rotates_a_tuple(m, loss) + replaces_in_a_dict(m, loss)

    ours, stock = both(lambda: Keeps(start, work), lambda: (loader(),), **FEW)
    assert_close(ours.module.kept, stock.module.kept)


def start_queue(m: Any) -> None:
    m.queue, m.pair = torch.zeros(8), (torch.zeros(8), 0)


def keeps_the_last(m: Any, loss: Tensor) -> Tensor:
    m.queue = torch.cat([m.queue, loss.detach()[None]])[-8:]
    m.pair = (torch.cat([m.pair[0], loss.detach()[None]])[-8:], 0)
    return loss + m.queue.mean() * 0.1 + m.pair[0].mean() * 0.1


@pytest.mark.numbers
@pytest.mark.parametrize(
    "policy", ["disabled", pytest.param("default", marks=pytest.mark.compiler)]
)
def test_a_queue_that_is_cut_to_its_length_is_state(policy: str) -> None:
    options: dict[str, Any] = {"policy": policy, **FEW}
    ours, stock = both(lambda: Holds(start_queue, keeps_the_last), lambda: (loader(),), **options)
    assert_same_run(ours, stock)
    assert_close(ours.module.queue, stock.module.queue)
    assert_close(ours.module.pair[0], stock.module.pair[0])


@pytest.mark.fits
def test_a_place_that_the_host_empties_is_an_error_before_the_next_step() -> None:
    changes = (Changes(lambda m, x: m.d.clear()),)
    with pytest.raises(StateChanged, match=r"self\.d\['k'\] held a tensor .* now is gone"):
        fit(
            lambda: Holds(with_d(k), reads_only),
            lambda: (loader(),),
            static=True,
            callbacks=changes,
            **FEW,
        )


@pytest.mark.fits
def test_what_the_step_takes_away_is_an_error() -> None:
    def work(m: Any, loss: Tensor) -> Tensor:
        return loss + m.d.pop("k")

    with pytest.raises(TraceError, match=r"takes self\.d\['k'\] away"):
        fit(lambda: Holds(with_d(k), work), lambda: (loader(),), static=True, **FEW)


@pytest.mark.numbers
@pytest.mark.parametrize("of", ["class", "object"])  # of the object, as LambdaCallback's
def test_a_callback_s_tensors_are_state_in_its_traced_hooks(of: str) -> None:
    class Norm(pl.Callback):
        def __init__(self) -> None:
            self.mean = {"norm": zero()}
            self.last: Any = None
            if of == "object":
                self.on_before_optimizer_step = self.scale

        def scale(self, trainer: Any, module: Any, optimizer: Any) -> None:
            norm = module.net[0].weight.grad.norm()
            self.mean["norm"] = 0.9 * self.mean["norm"] + 0.1 * norm
            self.last = norm
            module.net[0].weight.grad.mul_(self.mean["norm"])

    if of == "class":
        Norm.on_before_optimizer_step = Norm.scale
    made: list[Norm] = []
    runs = []
    for static in (True, False):
        made.append(Norm())
        make = lambda: Classifier(mlp(), torch.optim.SGD, lr=0.1)  # noqa: E731
        runs.append(fit(make, lambda: (loader(),), static=static, callbacks=(made[-1],), **FEW))
    assert_same_run(runs[0], runs[1])
    assert_close([made[0].mean, made[0].last], [made[1].mean, made[1].last])


def test_a_traced_function_works_on_objects() -> None:
    losses = []
    for static in (True, False):
        torch.manual_seed(0)
        net, meter, queue = nn.Linear(8, 1), SimpleNamespace(mean=zero(), last=None), deque()
        queue.extend([zero(), zero() + 1])
        holder = Slotted({"queue": queue})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        class Loop:
            """Of a hand-written script."""

            def __init__(self, *args: Any) -> None:
                self.net, self.meter, self.holder, self.optimizer = args

            def step(self, x: Tensor) -> Tensor:
                old = self.holder.value["queue"].popleft()
                loss = self.net(x).square().mean() + old
                self.holder.value["queue"].append(loss.detach() * 0.1)
                self.meter.mean = 0.9 * self.meter.mean + loss.detach()
                self.meter.last = loss.detach()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                return loss + self.meter.mean

        loop: Any = Loop(net, meter, holder, optimizer)
        step = loop.step
        if static:
            reset_backend()
            backend = fulgurite.backend("CSX", autogen_policy="disabled")
            fulgurite.compile(net, backend)
            step = fulgurite.trace(loop.step)
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(6, 4, 8, generator=generator)
        losses.append(
            [float(step(x).detach()) for x in rows] + [float(meter.last), float(queue[0])]
        )
    assert_close(losses[0], losses[1])


@pytest.mark.numbers
def test_a_run_is_resumed_as_stock_s_is(tmp_path: Any) -> None:
    """What is in containers is in no checkpoint, in stock neither: it begins anew."""
    weights = []
    for static in (True, False):
        module = fit(
            lambda: Holds(with_d(k), replaces_in_a_dict),
            lambda: (loader(),),
            static=static,
            limit_train_batches=4,
        )
        path = tmp_path / f"{static}.ckpt"
        module.trainer.save_checkpoint(path)
        resumed = fit_from(path, static)
        weights.append([p.detach() for p in resumed.parameters()])
    assert_close(weights[0], weights[1])


def fit_from(path: Any, static: bool) -> Any:
    """Another epoch, from a checkpoint."""
    from harness import make_trainer

    torch.manual_seed(0)
    module = Holds(with_d(k), replaces_in_a_dict)
    trainer = make_trainer(static, max_epochs=2, limit_train_batches=4)
    trainer.fit(module, loader(), ckpt_path=path, weights_only=False)
    return module


@pytest.mark.numbers
def test_counters_and_other_values_beside_tensors_stay() -> None:
    """A Counter, a set and a file name do not disturb."""

    def start(m: Any) -> None:
        m.d = {"n": collections.Counter(a=1), "s": {1, 2}, "name": "x", "t": zero()}

    def work(m: Any, loss: Tensor) -> None:
        m.d["t"] = m.d["t"] + loss.detach()

    ours, stock = both(lambda: Holds(start, work), lambda: (loader(),), **FEW)
    assert_close(ours.module.d.pop("t"), stock.module.d.pop("t"))
    assert ours.module.d == stock.module.d
