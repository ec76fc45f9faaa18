"""Attributes of modules: scalars that stay, state that begins with data, lists of outputs."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.utils._pytree as pytree
from harness import Run, assert_close, assert_same_run, both, fit
from models import Classifier, loader, mlp, tokens
from torch import Tensor, nn

from fulgurite.backends.csx.contract import frozen_reads as frozen
from fulgurite.backends.csx.contract.frozen_reads import FrozenValueWarning
from fulgurite.backends.csx.diagnostics.trace_errors import (
    ConditionalOnTensor,
    FrozenValueChanged,
    StateBornInStep,
    TraceError,
    UnsupportedState,
)

pytestmark = pytest.mark.fits

ONE = {"max_programs": 1}
OR = "; or backend('CSX', max_programs=2)"


class Steps(Classifier):
    """``work(module, loss)`` in the step; it returns another loss, or None for this one."""

    def __init__(self, work: Any, **attributes: Any) -> None:
        super().__init__(mlp(0.1))
        self.work = work
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value.clone())
            else:
                setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        worked = self.work(self, loss)
        return loss if worked is None else worked


def run(work: Any, *callbacks: pl.Callback, **attributes: Any) -> Run:
    """Four batches on CSX."""
    return fit(
        lambda: Steps(work, **attributes), lambda: (loader(64),), static=True, callbacks=callbacks
    )


def run_one(work: Any, *callbacks: pl.Callback, **attributes: Any) -> Run:
    """Four batches on CSX, where there may be one program only."""
    make = lambda: Steps(work, **attributes)  # noqa: E731
    return fit(make, lambda: (loader(64),), static=True, callbacks=callbacks, backend=ONE)


def assert_raised(error: TraceError, function: Any, offset: int, *parts: str) -> None:
    """The error names a line of ``function``'s, ``offset`` lines below its ``def``."""
    assert error.line is not None
    assert (error.line.file, error.line.line) == (
        __file__,
        function.__code__.co_firstlineno + offset,
    )
    for part in parts:
        assert part in str(error)


# -- scalars that the host changes -----------------------------------------------------------------


class Mode(Enum):
    """Of a step."""

    WARM, HOT = 1, 2


class Sets(pl.Callback):
    """Changes the module on the host, in ``hook``, after ``batch`` batches."""

    def __init__(self, hook: str, change: Callable[[Any], None], batch: int = 2) -> None:
        def changes(trainer: pl.Trainer, module: Any, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step >= batch:
                change(module)

        setattr(self, hook, changes)


def weighted(module: Any, loss: Tensor) -> Tensor:
    return loss * module.weight if module.weight else loss


@pytest.mark.parametrize(
    ("before", "after", "remedy"),
    [
        (
            0.1,
            0.2,
            'self.register_buffer("weight", torch.tensor(0.1)) in __init__ instead of'
            " self.weight = 0.1, and self.weight.fill_(value) on the host",
        ),
        (True, False, 'self.register_buffer("weight", torch.tensor(True))'),
        (None, 0.5, "set it before fit, and leave it"),
        (2, None, 'self.register_buffer("weight", torch.tensor(2))'),
        (2, 0.5, 'self.register_buffer("weight", torch.tensor(2.0))'),  # of int64 it would be 0
    ],
)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_batch_start"])
def test_a_scalar_that_a_hook_changes_is_an_error_before_the_next_step(
    hook: str, before: Any, after: Any, remedy: str
) -> None:
    callback = Sets(hook, lambda module: setattr(module, "weight", after))
    with pytest.raises(FrozenValueChanged) as caught:
        run_one(weighted, callback, weight=before)
    message = f"self.weight was {before!r} when the step was traced and read it, and now is {after}"
    assert_raised(caught.value, weighted, 1, message, f"Remedy: {remedy}", OR)


def test_the_message_is_one_that_can_be_acted_on() -> None:
    with pytest.raises(FrozenValueChanged) as caught:
        run_one(
            weighted, Sets("on_train_batch_end", lambda m: setattr(m, "weight", 0.2)), weight=0.1
        )
    assert str(caught.value).replace(str(caught.value.line), "model.py:3 in weighted") == (
        "self.weight was 0.1 when the step was traced and read it, and now is 0.2. The program"
        " keeps the value that it was traced with.\n"
        "  at model.py:3 in weighted\n"
        "      return loss * module.weight if module.weight else loss\n"
        '  Remedy: self.register_buffer("weight", torch.tensor(0.1)) in __init__ instead of'
        " self.weight = 0.1, and self.weight.fill_(value) on the host; or backend('CSX',"
        " max_programs=2)"
    )


def test_a_dropouts_probability_counts_though_torch_reads_it() -> None:
    def change(module: Any) -> None:
        module.net[2].p = 0.5

    with pytest.raises(FrozenValueChanged, match=r"self\.net\.2\.p was 0\.1 .* now is 0\.5") as e:
        run_one(lambda module, loss: None, Sets("on_train_batch_end", change))
    assert_raised(e.value, Steps.training_step, 1, f"Remedy: set it before fit, and leave it{OR}")


def test_enums_strings_and_tuples_count_too() -> None:
    def work(module: Any, loss: Tensor) -> Tensor:
        return loss * (2 if module.mode is Mode.WARM else 1) * module.sizes[0] * len(module.name)

    values = {"mode": Mode.WARM, "sizes": (1, 2), "name": "net"}
    for name, value in {"mode": Mode.HOT, "sizes": (2, 2), "name": "other"}.items():
        sets = Sets("on_train_batch_end", lambda m, n=name, v=value: setattr(m, n, v))
        with pytest.raises(FrozenValueChanged, match=rf"self\.{name} was "):
            run_one(work, sets, **values)


def test_an_attribute_that_was_removed_is_an_error() -> None:
    with pytest.raises(FrozenValueChanged, match=r"self\.weight was 1\.0 .* now is gone"):
        run_one(weighted, Sets("on_train_batch_end", lambda m: delattr(m, "weight")), weight=1.0)


def test_what_the_step_did_not_read_may_change_and_what_it_read_may_be_set_again() -> None:
    def change(module: Any) -> None:
        module.other += 1
        module.weight = float("0.5")  # equal, and another object

    assert run(weighted, Sets("on_train_batch_end", change), weight=0.5, other=1).module.other == 4


def test_a_change_at_an_epochs_start_is_found_without_batch_hooks() -> None:
    class Anneals(Steps):
        def on_train_epoch_start(self) -> None:
            self.weight = 1.0 + self.current_epoch

    with pytest.raises(FrozenValueChanged, match=r"self\.weight was 1\.0 .* now is 2\.0"):
        fit(
            lambda: Anneals(weighted), lambda: (loader(64),), static=True, max_epochs=2, backend=ONE
        )


def test_a_change_in_a_validation_within_the_epoch_is_found_before_the_next_training_step() -> None:
    class Validates(Steps):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.weight = 2.0

    made: list[Any] = []

    def make() -> Validates:
        made.append(Validates(weighted, weight=1.0))
        return made[0]

    with pytest.raises(FrozenValueChanged, match=r"self\.weight was 1\.0 .* now is 2\.0"):
        fit(make, lambda: (loader(64), loader(32)), static=True, val_check_interval=2, backend=ONE)
    assert made[0].trainer.global_step == 2


def test_evaluation_compares_when_it_starts() -> None:
    class Validates(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0]) * self.scale

    module = Validates(mlp())
    module.scale = 1.0
    trainer = fit(
        lambda: Classifier(mlp()), lambda: (loader(32),), static=True, backend=ONE
    ).trainer
    trainer.validate(module, loader(32), verbose=False)
    module.scale = 2.0
    with pytest.raises(FrozenValueChanged, match=r"self\.scale was 1\.0"):
        trainer.validate(module, loader(32), verbose=False)


def test_what_layers_use_in_training_alone_may_change_for_evaluation() -> None:
    class Norms(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

        def on_train_start(self) -> None:  # after the sanity check, which has read them
            self.net[1].p, self.net[2].momentum = 0.3, 0.2

    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 4))
    made = lambda: (loader(64), loader(32))  # noqa: E731
    run = fit(lambda: Norms(net), made, static=True, max_epochs=2, num_sanity_val_steps=1)
    assert len(run.losses) == 8


def test_a_change_is_found_where_lightning_calls_the_hooks_itself() -> None:
    change = Sets("on_train_batch_end", lambda m: setattr(m, "weight", 2.0))
    make = lambda: Steps(weighted, weight=1.0)  # noqa: E731
    options: dict[str, Any] = {
        "static": True,
        "backend": ONE,
        "callbacks": (change,),
        "profiler": "simple",
    }
    with pytest.raises(FrozenValueChanged, match=r"self\.weight was 1\.0 .* now is 2\.0"):
        fit(make, lambda: (loader(64),), **options)


def test_prediction_compares_before_every_batch() -> None:
    class Predicts(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0]) * self.scale

        def on_predict_batch_end(self, *args: Any) -> None:
            self.scale = 2.0

    module = Predicts(mlp())
    module.scale = 1.0
    trainer = fit(
        lambda: Classifier(mlp()), lambda: (loader(32),), static=True, backend=ONE
    ).trainer
    with pytest.raises(FrozenValueChanged, match=r"self\.scale was 1\.0 .* now is 2\.0"):
        trainer.predict(module, loader(64))


@pytest.mark.numbers
def test_a_buffer_that_the_host_fills_follows() -> None:
    class Fills(Steps):
        def on_train_batch_end(self, *args: Any) -> None:
            self.weight.mul_(0.5)

    work = lambda module, loss: loss * module.weight  # noqa: E731
    assert_same_run(*both(lambda: Fills(work, weight=torch.tensor(1.0)), lambda: (loader(64),)))


# -- scalars that the step changes -----------------------------------------------------------------


def warned(
    work: Any, *callbacks: pl.Callback, **attributes: Any
) -> tuple[Run, list[warnings.WarningMessage]]:
    """The run and its warnings about frozen values; the step has two entry points."""
    frozen._SHOWN.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", FrozenValueWarning)
        make = lambda: Steps(work, **attributes)  # noqa: E731
        windows = {"accumulate_grad_batches": 2, "callbacks": callbacks}
        done = fit(make, lambda: (loader(64),), static=True, **windows)
    return done, [warning for warning in seen if warning.category is FrozenValueWarning]


def counts(module: Any, loss: Tensor) -> None:
    module.n += 1


class SetsIt(pl.Callback):
    """Sets a number that the step halves: 0 for the first window."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.w = float(batch_idx // 2)


def halves(module: Any, loss: Tensor) -> Tensor:
    loss = loss * (1.0 + module.w)
    module.w = module.w * 0.5
    return loss


@pytest.mark.numbers
def test_a_write_that_changes_nothing_hides_no_later_one() -> None:
    made = lambda: Steps(halves, w=0.0)  # noqa: E731
    ours, stock = both(made, lambda: (loader(64),), callbacks=(SetsIt(),))
    assert_same_run(ours, stock)
    assert ours.module.w == stock.module.w == 0.5


def reads_buffers(module: Any, loss: Tensor) -> Tensor:
    if not module.ready:
        module.scale.copy_(loss.detach())
    if (module.sizes > 1).all():
        loss = loss * module.sizes[0].item()
    return loss * module.scale


BUFFERS = {
    "ready": torch.tensor(True),
    "sizes": torch.tensor([3, 2]),
    "scale": torch.tensor(0.5),
}


@pytest.mark.numbers
def test_python_may_read_buffers_that_the_step_does_not_write() -> None:
    make = lambda: Steps(reads_buffers, **BUFFERS)  # noqa: E731
    assert_same_run(*both(make, lambda: (loader(64),), backend={"audit": True}))


def writes_it(module: Any, loss: Tensor) -> None:
    if not module.ready:
        module.ready.fill_(True)


def writes_a_view(module: Any, loss: Tensor) -> None:
    if module.sizes[1] > 0:
        module.sizes.unbind()[0].add_(1)


def puts_other_data(module: Any, loss: Tensor) -> None:
    if module.sizes[0] > 0:
        module.sizes.data = module.sizes + 1


def puts_another(module: Any, loss: Tensor) -> None:
    if module.sizes[0] > 0:
        module.sizes = module.sizes + 1


def wrote_before(module: Any, loss: Tensor) -> None:
    module.sizes.add_(1)
    if module.sizes[0] > 0:
        loss.mul(2)


@pytest.mark.parametrize(
    ("work", "offset"),
    [
        *((work, 1) for work in (writes_it, writes_a_view, puts_other_data)),
        pytest.param(puts_another, 1, marks=pytest.mark.core),
        (wrote_before, 2),
    ],
)
def test_a_buffer_that_python_reads_and_the_step_writes_is_an_error(work: Any, offset: int) -> None:
    with pytest.raises(ConditionalOnTensor) as caught:
        run(work, **{**BUFFERS, "ready": torch.tensor(False)})
    assert_raised(caught.value, work, offset, "used as a Python condition")
    assert ("run one batch before fit" in str(caught.value)) == (work is not wrote_before)


def test_a_buffer_that_python_read_and_a_hook_changes_is_an_error() -> None:
    class Fills(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                module.sizes.fill_(5)

    with pytest.raises(FrozenValueChanged) as caught:
        run_one(reads_buffers, Fills(), **BUFFERS)
    assert_raised(caught.value, reads_buffers, 4, "self.sizes was [3, 2]", "now is [5, 5]")
    assert "tensor operations where Python reads it" in caught.value.remedy


def test_a_flag_in_a_buffer_that_a_hook_sets_is_asked_by_where() -> None:
    class Sets(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            module.ready.fill_(True)

    with pytest.raises(FrozenValueChanged) as caught:
        run_one(
            lambda module, loss: loss * (2 if module.ready else 1),
            Sets(),
            ready=torch.tensor(False),
        )
    assert "torch.where(condition, a, b) where Python asks" in caught.value.remedy


def reads_nan(module: Any, loss: Tensor) -> Tensor:
    return loss * 2 if module.bound.isnan() else loss


def test_a_buffer_of_nan_that_python_read_is_no_other_one() -> None:
    class Looks(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            """Code on the host, after which buffers are compared."""

    run(reads_nan, Looks(), bound=torch.tensor(float("nan")))


def test_a_word_is_changed_once_with_a_warning() -> None:
    def words(module: Any, loss: Tensor) -> None:
        module.phase = "late"

    done, [warning] = warned(words, phase="early")
    assert done.module.phase == "late"
    assert (warning.filename, warning.lineno) == (__file__, words.__code__.co_firstlineno + 1)
    text = str(warning.message)
    assert text.startswith(
        "self.phase was changed from 'early' to 'late' while the step was traced; that happens"
        " once, in "
    )
    assert text.endswith(" Use a host hook such as on_train_batch_start, which runs on every step.")


@pytest.mark.numbers
def test_a_counter_in_a_buffer_counts() -> None:
    def count(module: Any, loss: Tensor) -> Tensor:
        module.n.add_(1)
        return loss / module.n

    ours, stock = both(lambda: Steps(count, n=torch.tensor(0)), lambda: (loader(64),))
    assert_same_run(ours, stock)
    assert ours.module.n == 4


def test_other_values_and_lists_that_the_step_changes_warn_too() -> None:
    def work(module: Any, loss: Tensor) -> None:
        module.mode = Mode.HOT
        module.seen = f"{getattr(module, 'seen', '')}1"
        module.history.append(3)

    _, found = warned(work, mode=Mode.WARM, history=[])
    start = work.__code__.co_firstlineno
    assert sorted(w.lineno - start for w in found) == [1, 2, 3]
    texts = sorted(str(w.message) for w in found)
    assert texts[0].startswith("self.history was changed while the step was traced; that happens")
    assert texts[1].startswith("self.mode was changed from <Mode.WARM: 1> to <Mode.HOT: 2>")
    assert texts[2].startswith("self.seen was changed from nothing to '1'")


def test_flags_set_and_reset_and_values_only_left_for_the_host_do_not_warn() -> None:
    def work(module: Any, loss: Tensor) -> None:
        module.busy = True
        module.busy = False
        module.size = loss.ndim  # as it was: the same on every step

    assert run(work, busy=False).module.size == 0


# -- state that begins with data -------------------------------------------------------------------


def averaged(module: Any, loss: Tensor) -> None:
    if module.ema is None:
        module.ema = loss.detach()
    module.ema = 0.9 * module.ema + 0.1 * loss.detach()


def looked_up(module: Any, loss: Tensor) -> None:
    before = getattr(module, "rows", 1)
    module.rows = (loss.detach().expand(2, 3) + before).long()


def asked(module: Any, loss: Tensor) -> None:
    if not hasattr(module, "pair"):
        module.pair = (loss.detach(), module.net[0].weight.detach() * 2)


def beside_a_constant(module: Any, loss: Tensor) -> None:
    if module.ema is None:
        module.ema = (torch.ones(2), loss.detach())


def from_zero(module: Any, loss: Tensor) -> None:
    module.total += loss.detach()


def in_a_buffer(module: Any, loss: Tensor) -> None:
    if module.running is None:
        module.running = loss.detach()


BORN = [
    pytest.param(averaged, marks=pytest.mark.core),
    *(from_zero, looked_up, asked, beside_a_constant, in_a_buffer),
]


def name_of(value: Any) -> str:
    """A function's name, or the begin of a text: the same in every process."""
    return getattr(value, "__name__", str(value))[:24]


def born() -> dict[str, Any]:
    """What ``BORN`` find, besides what is missing."""
    return {"ema": None, "total": 0.0}


@pytest.mark.numbers
@pytest.mark.parametrize("work", BORN, ids=name_of)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_state_that_the_first_step_makes_is_that_of_stock(work: Any, accumulate: int) -> None:
    def make() -> Steps:
        module = Steps(work, **born())
        module.register_buffer("running", None)
        return module

    options = {"accumulate_grad_batches": accumulate}
    ours, stock = both(make, lambda: (loader(64),), **options)
    assert_same_run(ours, stock)
    for name in ("ema", "total", "rows", "pair", "running"):
        left = [getattr(run.module, name, None) for run in (ours, stock)]
        assert_close(*map(pytree.tree_leaves, left))


@pytest.mark.numbers
@pytest.mark.parametrize("rows", [64, 60])  # a smaller last batch has a program of its own
def test_state_that_the_host_takes_away_is_made_again(rows: int) -> None:
    class Forgets(Steps):
        def on_train_epoch_start(self) -> None:
            self.ema, self.total = None, 0.0

    def work(module: Any, loss: Tensor) -> Tensor:
        averaged(module, loss)
        from_zero(module, loss)
        module.last = loss.detach()
        return loss * module.ema / module.total

    ours, stock = both(lambda: Forgets(work, **born()), lambda: (loader(rows),), max_epochs=3)
    assert_same_run(ours, stock)


@pytest.mark.parametrize("retrace", [pytest.param(False, marks=pytest.mark.core), True])
def test_a_part_of_it_that_the_host_takes_away_is_an_error(retrace: bool) -> None:
    class Forgets(Steps):
        def on_train_epoch_start(self) -> None:
            self.ema = None

    def work(module: Any, loss: Tensor) -> Tensor:
        averaged(module, loss)
        from_zero(module, loss)
        return loss * module.ema / module.total

    with pytest.raises(TraceError, match=r"self\.ema"):
        fit(
            lambda: Forgets(work, **born()),
            lambda: (loader(64),),
            static=True,
            max_epochs=2,
            backend={"retrace_every_iteration": retrace},
        )


@pytest.mark.numbers
def test_three_steps_may_each_make_more_state() -> None:
    def work(module: Any, loss: Tensor) -> Tensor:
        lags = [module.past[name] for name in ("1", "2", "3") if name in module.past]
        for name, value in zip(("1", "2", "3"), (loss.detach(), *lags), strict=False):
            module.past[name] = value
        return loss + 0.1 * sum(lags)

    ours, stock = both(lambda: Steps(work, past={}), lambda: (loader(64),))
    assert_same_run(ours, stock)


@pytest.mark.numbers
def test_a_flag_says_whether_state_is_there() -> None:
    def work(module: Any, loss: Tensor) -> Tensor:
        if not module.is_there:
            module.center, module.is_there, module.weights = loss.detach(), True, [0.8, 0.2]
        else:
            module.center = module.center.lerp(loss.detach(), module.weights[1])
        return (loss - module.center).square()

    class Forgets(Steps):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch:
                self.is_there = False

    make = lambda: Forgets(work, is_there=False)  # noqa: E731
    ours, stock = both(make, lambda: (loader(64),), max_epochs=3)
    assert_same_run(ours, stock)
    assert ours.module.is_there


@pytest.mark.parametrize(("averages", "place"), [(True, "ema"), (False, "turned")])
def test_a_flag_that_turns_in_every_step_is_an_error(averages: bool, place: str) -> None:
    def work(module: Any, loss: Tensor) -> Tensor:
        if averages:
            averaged(module, loss)
        module.turned = not module.turned
        return loss * 2 if module.turned else loss

    with pytest.raises(StateBornInStep, match=rf"to self\.{place}, and reads it"):
        fit(lambda: Steps(work, turned=False, **born()), lambda: (loader(64),), static=True)


@pytest.mark.numbers
@pytest.mark.parametrize("rows", [64, 60])
def test_what_a_flag_says_is_written_in_the_first_step_of_each_epoch_alone(rows: int) -> None:
    class Begins(Steps):
        def on_train_epoch_start(self) -> None:
            self.is_there = self.current_epoch == 1

    def work(module: Any, loss: Tensor) -> Tensor:
        if not module.is_there:
            with torch.no_grad():
                module.net[0].bias.mul_(0.5)
            module.total.zero_()
            module.is_there = True
        module.total.add_(loss.detach())
        return loss * module.total

    make = lambda: Begins(work, is_there=False, total=torch.zeros(()))  # noqa: E731
    assert_same_run(*both(make, lambda: (loader(rows),), max_epochs=3))


LAST_TWO: dict[str, tuple[Any, Callable[[Any, Tensor], Any]]] = {
    "list": ([], lambda past, loss: (past + [loss])[-2:]),  # noqa: RUF005
    "tuple": ((), lambda past, loss: (*past, loss)[-2:]),
    "deque": (deque(maxlen=2), lambda past, loss: past.append(loss) or past),
}


@pytest.mark.numbers
@pytest.mark.parametrize("kind", LAST_TWO)
def test_the_last_two_losses_and_how_many_there_are_equal_stock(kind: str) -> None:
    empty, added = LAST_TWO[kind]

    def work(module: Any, loss: Tensor) -> Tensor:
        factor = 1.0 if len(module.past) < 2 else module.past[-1] / module.past[-2]
        module.past = added(module.past, loss.detach())
        return loss * factor

    ours, stock = both(lambda: Steps(work, past=copy.copy(empty)), lambda: (loader(64),))
    assert_same_run(ours, stock)
    assert len(ours.module.past) == 2


@pytest.mark.numbers
def test_lags_of_attributes_equal_stock() -> None:
    def work(module: Any, loss: Tensor) -> Tensor:
        factor = 1.0 if module.before is None else module.last / module.before
        module.before, module.last = module.last, loss.detach()
        return loss * factor

    assert_same_run(*both(lambda: Steps(work, last=None, before=None), lambda: (loader(64),)))


def another_name(module: Any, loss: Tensor) -> Tensor:
    if module.ema is None:
        module.ema = module.net[0].weight.detach()
    return loss + (module.net[0].weight - module.ema).square().sum()


def two_names(module: Any, loss: Tensor) -> Tensor:
    if module.ema is None:
        module.ema = module.total = loss.detach() * 1
    else:
        module.ema.mul_(0.9)
    return loss + module.total


@pytest.mark.parametrize(
    ("work", "offset", "other"),
    [
        pytest.param(another_name, 2, "self.net.0.weight", marks=pytest.mark.core),
        (two_names, 2, "self.ema"),
    ],
)
def test_what_changes_under_two_names_is_refused(work: Any, offset: int, other: str) -> None:
    with pytest.raises(UnsupportedState) as caught:
        fit(lambda: Steps(work, **born()), lambda: (loader(64),), static=True)
    what = f"be the memory of {other}, and changes it in place"
    assert_raised(caught.value, work, offset, what, ".clone()")


@pytest.mark.numbers
def test_the_average_with_a_buffer_equals_stock() -> None:
    def work(module: Any, loss: Tensor) -> Tensor:
        module.ema.mul_(0.9).add_(0.1 * loss.detach())
        return loss / (1 + module.ema)

    assert_same_run(*both(lambda: Steps(work, ema=torch.zeros([])), lambda: (loader(64),)))


@pytest.mark.numbers
def test_the_remedy_for_an_average_that_begins_with_a_value_equals_eager() -> None:
    def begins(module: Any, loss: Tensor) -> Tensor:
        value = loss.detach()
        before = torch.where(module.ema_known == 0, value, module.ema)
        module.ema_known.fill_(1)
        module.ema = 0.9 * before + 0.1 * value
        return loss / (1 + module.ema)

    def eager(module: Any, loss: Tensor) -> Tensor:
        value = loss.detach()
        before = value if module.ema is None else module.ema
        module.ema = 0.9 * before + 0.1 * value
        return loss / (1 + module.ema)

    def make() -> Steps:
        return Steps(begins, ema=torch.zeros([]), ema_known=torch.zeros(()))

    ours = fit(make, lambda: (loader(64),), static=True)
    stock = fit(lambda: Steps(eager, ema=None), lambda: (loader(64),), static=False)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


def test_what_is_only_written_or_written_first_is_an_output() -> None:
    def work(module: Any, loss: Tensor) -> Tensor:
        module.last = loss.detach()
        module.double = module.last * 2
        return loss + 0 * module.double

    done = run(work, last=None, double=None)
    assert float(done.module.double) == pytest.approx(2 * done.losses[-1])


@pytest.mark.numbers
def test_a_module_may_cache_what_follows_from_constants() -> None:
    def work(module: Any, loss: Tensor) -> Tensor:
        if module.mask is None:
            module.mask = torch.ones(4, 4).triu()
        return loss * module.mask.mean()

    assert_same_run(*both(lambda: Steps(work, mask=None), lambda: (loader(64),)))


class Recurrent(pl.LightningModule):
    """An LSTM whose state goes on from batch to batch: truncated backpropagation through time."""

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(12, 8), nn.LSTM(8, 8, batch_first=True)
        self.hidden = hidden

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out, hidden = self.lstm(self.embed(batch[0]), self.hidden)
        self.hidden = tuple(state.detach() for state in hidden)
        return out.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.numbers
@pytest.mark.parametrize("begins", ["None", "zeros"])
def test_an_lstms_state_equals_stock(begins: str) -> None:
    zeros = lambda: (torch.zeros([1, 8, 8]), torch.zeros([1, 8, 8]))  # noqa: E731
    make = lambda: Recurrent(zeros() if begins == "zeros" else None)  # noqa: E731
    ours, stock = both(make, lambda: (tokens(32),))
    assert_same_run(ours, stock)
    assert_close(list(ours.module.hidden), list(stock.module.hidden))


# -- lists -----------------------------------------------------------------------------------------


def stacked(module: Any, loss: Tensor) -> Tensor:
    module.outs.append(loss.detach())
    return loss + torch.stack(module.outs).mean()


def measured(module: Any, loss: Tensor) -> Tensor:
    module.outs.append(loss.detach())
    return loss + len(module.outs)


def summed(module: Any, loss: Tensor) -> Tensor:
    outs = module.outs
    outs += [loss.detach()]
    return loss + sum(outs)


def windowed(module: Any, loss: Tensor) -> None:
    module.outs.append(loss.detach())
    module.outs.pop(0) if module.outs[1:] else None


READ_AT = [(stacked, 2), (measured, 2), (summed, 3), (windowed, 2)]


@pytest.mark.parametrize(("work", "offset"), READ_AT, ids=lambda v: getattr(v, "__name__", ""))
def test_a_list_that_is_appended_to_and_read_is_an_error(work: Any, offset: int) -> None:
    made: list[Any] = []

    def make() -> Steps:
        made.append(Steps(work, outs=[]))
        return made[0]

    with pytest.raises(UnsupportedState) as caught:
        fit(make, lambda: (loader(64),), static=True)
    what = "puts tensors into self.outs and reads it: it would find what was there in the first"
    remedy = "Remedy: read it in a host hook such as on_train_epoch_end; or keep the last n in a"
    assert_raised(caught.value, work, offset, what, remedy)
    assert made[0].outs == []


@pytest.mark.numbers
def test_the_list_read_in_a_hook_and_a_ring_in_a_buffer_equal_stock() -> None:
    class Rings(Steps):
        def on_train_epoch_end(self) -> None:
            self.mean = float(torch.stack(self.outs).mean())
            self.outs.clear()

    def work(module: Any, loss: Tensor) -> Tensor:
        module.outs.append(loss.detach())
        module.outs += [loss.detach() * 2]
        module.ring.copy_(torch.cat([module.ring[1:], loss.detach().unsqueeze(0)]))
        return loss + module.ring.mean()

    make = lambda: Rings(work, outs=[], ring=torch.zeros(3))  # noqa: E731
    ours, stock = both(make, lambda: (loader(64),), max_epochs=2)
    assert_same_run(ours, stock)
    assert ours.module.mean == pytest.approx(stock.module.mean)


@pytest.mark.numbers
def test_a_list_that_the_step_fills_anew_holds_the_last_steps() -> None:
    def work(module: Any, loss: Tensor) -> Tensor:
        module.outs.clear()
        module.outs.append(loss.detach())
        return loss + torch.stack(module.outs).mean()

    ours, stock = both(lambda: Steps(work, outs=[]), lambda: (loader(64),))
    assert_same_run(ours, stock)
    assert type(ours.module.outs) is list
    assert_close(ours.module.outs, stock.module.outs)


def test_a_list_that_is_only_read_is_the_users_own() -> None:
    def work(module: Any, loss: Tensor) -> Tensor:
        return loss * torch.stack(module.weights).sum() * len(module.empty or [1])

    weights = [torch.tensor(0.5), torch.tensor(1.5)]
    done = run(work, weights=weights, empty=[])
    assert done.module.weights is weights
    assert type(done.module.empty) is list


@pytest.mark.fits
def test_a_value_of_the_class_may_be_another_one_in_the_next_fit() -> None:
    """A notebook that tries two of them."""

    class Squares(Classifier):
        power = 1

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0]).abs().pow(self.power).mean()

    losses = []
    for power in (1, 3, 1):
        Squares.power = power
        losses.append(fit(lambda: Squares(mlp()), lambda: (loader(),), static=True).losses)
    assert losses[0] == losses[2] != losses[1]
