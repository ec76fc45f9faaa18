"""Traced functions of hand-written loops: numbers equal an eager loop's, names are the user's."""

from __future__ import annotations

import functools
import inspect
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_close, csx
from models import CLASSES, convnet, mlp, rows
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

import fulgurite
from fulgurite import TraceError
from fulgurite.backends.csx.diagnostics.trace_errors import (
    ConditionalOnTensor,
    HostRead,
    InputChanged,
    StateChanged,
    UnsupportedInput,
    UnsupportedState,
)

STEPS = 12
BATCHES = list(torch.utils.data.DataLoader(rows(STEPS * 8), batch_size=8))  # type: ignore[var-annotated]
PICTURES = torch.randn(STEPS, 8, 1, 8, 8, generator=torch.Generator().manual_seed(3))
cross_entropy = nn.functional.cross_entropy


class Loop:
    """A hand-written loop: a model, an optimizer and a step."""

    def __init__(self, net: nn.Module, make: Callable[..., Any] = torch.optim.AdamW) -> None:
        self.model = net
        self.optimizer = make(net.parameters(), lr=1e-2)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward, backward, update."""
        loss = cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def tensors(self) -> list[Tensor]:
        """All state."""
        states = self.optimizer.state_dict()["state"]
        return [*self.model.state_dict().values(), *torch.utils._pytree.tree_leaves(states)]


def both(
    make: Callable[[], Any],
    loop: Callable[[Any, Callable[..., Any]], Any],
    step: Callable[[Any], Callable[..., Any]] = lambda loop: loop.step,
) -> None:
    """Run a loop with its step traced and as it is; results and state are equal."""
    results = []
    for traced in (True, False):
        torch.manual_seed(0)
        one = make()
        function = step(one)
        torch.manual_seed(7)
        result = loop(one, fulgurite.trace(function) if traced else function)
        results.append((result, one.tensors()))
    for got, wanted in zip(*results, strict=True):
        assert_close(got, wanted)


def losses(loop: Any, step: Callable[..., Any]) -> list[Tensor]:
    """One pass over the batches."""
    return [step(x, y).detach() for x, y in BATCHES]


@pytest.fixture(autouse=True)
def _backend() -> None:
    csx()


@pytest.mark.parametrize(
    "make",
    [torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.RMSprop],
    ids=["AdamW", "SGD", "RMSprop"],
)
def test_a_loop_equals_the_eager_one(make: Any) -> None:
    both(lambda: Loop(mlp(), make), losses)


def test_dropout_masks_are_those_of_eager() -> None:
    both(lambda: Loop(mlp(dropout=0.3)), losses)


def test_batch_norm_keeps_its_statistics() -> None:
    make = functools.partial(torch.optim.SGD, momentum=0.9)
    labels = [y % 2 for _, y in BATCHES]

    def loop(one: Any, step: Any) -> list[Tensor]:
        return [step(x, y).detach() for x, y in zip(PICTURES, labels, strict=True)]

    both(lambda: Loop(convnet(), make), loop)


def test_dampening_makes_its_state_from_the_first_gradient() -> None:
    both(
        lambda: Loop(mlp(), functools.partial(torch.optim.SGD, momentum=0.9, dampening=0.1)), losses
    )


def test_zero_grad_may_come_first() -> None:
    class First(Loop):
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            return loss

    both(lambda: First(mlp()), losses)


def test_zero_grad_may_be_called_in_the_loop() -> None:
    class Outside(Loop):
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            return loss

    def loop(one: Any, step: Any) -> list[Tensor]:
        found = []
        for x, y in BATCHES:
            one.optimizer.zero_grad()
            found.append(step(x, y).detach())
        return found

    both(lambda: Outside(mlp()), loop)


class Accumulating(Loop):
    """Gradients of several batches, in two functions."""

    def accumulate(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward and backward."""
        loss = cross_entropy(self.model(x), y)
        loss.backward()
        return loss

    def update(self) -> None:
        """Use the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("update", ["traced", "on the host"])
def test_gradients_accumulate_between_functions(update: str) -> None:
    def loop(one: Any, step: Any) -> list[Tensor]:
        traced = step is not one.accumulate
        end = fulgurite.trace(one.update) if traced and update == "traced" else one.update
        found = []
        for i, (x, y) in enumerate(BATCHES):
            found.append(step(x, y).detach())
            if i % 3 == 2:
                found.append(one.model[0].weight.grad.clone())
                end()
        return found

    both(lambda: Accumulating(mlp()), loop, lambda one: one.accumulate)


def test_gradients_of_a_function_that_clears_first_are_left_for_the_next() -> None:
    class Split(Accumulating):
        def accumulate(self, x: Tensor, y: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            return super().accumulate(x, y)

    def loop(one: Any, step: Any) -> list[Tensor]:
        found = []
        for x, y in BATCHES:
            found.append(step(x, y).detach())
            one.optimizer.step()
        return found

    both(lambda: Split(mlp()), loop, lambda one: one.accumulate)


def test_a_gradient_that_was_none_and_no_longer_is_is_named() -> None:
    csx(max_programs=1)
    loop = Loop(mlp())
    step = fulgurite.trace(loop.step)
    step(*BATCHES[0])
    loop.model[0].weight.grad = torch.ones_like(loop.model[0].weight)
    with pytest.raises(StateChanged, match=r"self\.model\.0\.weight\.grad was None"):
        step(*BATCHES[1])


def test_a_step_on_the_host_that_has_nothing_to_do_is_refused() -> None:
    class Half(Loop):
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = super().step(x, y)
            return loss

    loop = Half(mlp())
    fulgurite.trace(loop.step)(*BATCHES[0])
    with pytest.raises(UnsupportedState, match="no parameter has a gradient"):
        loop.optimizer.step()


def test_parameters_that_no_backward_reaches_are_left_alone() -> None:
    class Unused(Loop):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.spare = nn.Linear(2, 2)
            everyone = [*self.model.parameters(), *self.spare.parameters()]
            self.optimizer = torch.optim.AdamW(everyone, lr=1e-2, weight_decay=0.5)

        def tensors(self) -> list[Tensor]:
            return [*super().tensors(), self.spare.weight.detach()]

    both(Unused, losses)


def test_a_scheduler_steps_in_the_function_or_in_the_loop() -> None:
    class Scheduled(Loop):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
            self.outer = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = super().step(x, y)
            self.schedule.step()
            return loss

    def loop(one: Any, step: Any) -> list[Any]:
        found: list[Any] = []
        for i, (x, y) in enumerate(BATCHES):
            found += [step(x, y).detach(), one.optimizer.param_groups[0]["lr"]]
            if i % 4 == 3:
                one.outer.step()
        return found

    both(Scheduled, loop)


def test_two_optimizers_and_a_metric() -> None:
    class Two(Loop):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.head = nn.Linear(CLASSES, CLASSES)
            self.other = torch.optim.SGD(self.head.parameters(), lr=0.1)
            self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            scores = self.head(self.model(x))
            loss = cross_entropy(scores, y)
            loss.backward()
            for optimizer in (self.optimizer, self.other):
                optimizer.step()
                optimizer.zero_grad()
            self.accuracy.update(scores.detach(), y)
            return loss

        def tensors(self) -> list[Tensor]:
            return [*super().tensors(), self.head.weight.detach(), self.accuracy.compute()]

    both(Two, losses)


def test_evaluation_computes_no_gradients_and_keeps_the_mode_it_was_traced_in() -> None:
    csx(max_programs=1)
    loop = Loop(mlp(dropout=0.5))

    @fulgurite.trace
    def evaluate(x: Tensor) -> Tensor:
        return loop.model(x)

    loop.model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(evaluate(BATCHES[0][0]), loop.model(BATCHES[0][0]))
    loop.model.train()
    with torch.no_grad(), pytest.raises(StateChanged, match="in train mode now"):
        evaluate(BATCHES[0][0])


def test_one_function_serves_training_and_evaluation() -> None:
    model = mlp()

    @fulgurite.trace
    def forward(x: Tensor) -> Tensor:
        return model(x)

    x = BATCHES[0][0]
    trained = forward(x)
    with torch.no_grad():
        assert_close(forward(x), trained)
    assert not trained.requires_grad


def test_results_may_be_any_structure() -> None:
    @fulgurite.trace
    def step(x: Tensor) -> dict[str, Any]:
        return {"sum": x.sum(), "parts": [x + 1, (x * 2, "text", 3)]}

    x = torch.ones(2)
    result = step(x)
    assert_close(result["sum"], torch.tensor(2.0))
    assert_close(result["parts"][0], x + 1)
    assert result["parts"][1][1:] == ("text", 3)


# -- names, signatures, static arguments -------------------------------------------------------


def test_trace_keeps_name_signature_and_text() -> None:
    @fulgurite.trace
    def training_step(inputs: Tensor, *, targets: Tensor, scale: float = 1.0) -> Tensor:
        """What it does."""
        return (inputs * scale - targets).sum()

    assert training_step.__name__ == "training_step"
    assert training_step.__doc__ == "What it does."
    assert list(inspect.signature(training_step).parameters) == ["inputs", "targets", "scale"]
    x = torch.ones(3)
    assert training_step(x, targets=x) == 0
    assert training_step(targets=x, inputs=x) == 0


@pytest.mark.filterwarnings("ignore:Traced.calls was changed")
def test_a_method_is_traced_in_the_class_body_once_for_each_object() -> None:
    class Traced(Loop):
        calls = 0

        @fulgurite.trace
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            Traced.calls += 1
            return super().step(x, y)

    both(lambda: Traced(mlp()), losses, lambda one: one.step.__wrapped__.__get__(one))
    first, second = Traced(mlp()), Traced(mlp())
    Traced.calls = 0
    for _ in range(2):
        first.step(*BATCHES[0])
        second.step(*BATCHES[0])
    assert Traced.calls == 2
    assert list(inspect.signature(first.step).parameters) == ["x", "y"]


def test_modules_and_optimizers_may_be_arguments() -> None:
    @fulgurite.trace
    def step(model: nn.Module, optimizer: Any, batch: list[Tensor]) -> Tensor:
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    both(
        lambda: Loop(mlp()),
        lambda one, own: [own(one.model, one.optimizer, batch).detach() for batch in BATCHES],
        lambda one: step.__wrapped__,  # type: ignore[attr-defined]
    )


def test_lambdas_partials_and_modules_can_be_traced() -> None:
    model, x = mlp(), BATCHES[0][0]
    wanted = model(x).detach()
    for function in (lambda x: model(x), functools.partial(nn.Module.__call__, model), model):
        with torch.no_grad():
            assert_close(fulgurite.trace(function)(x), wanted)


def helper(model: nn.Module, x: Tensor) -> Tensor:
    """Another function of the user's."""
    return model(x) + bias_of_all(x)


bias_of_all = nn.Linear(8, CLASSES)


def test_what_helpers_name_is_found() -> None:
    model = mlp()
    optimizer = torch.optim.SGD([*model.parameters(), *bias_of_all.parameters()], lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(helper(model, x), y)
        loss.backward()
        optimizer.step()
        return loss

    before = bias_of_all.weight.detach().clone()
    fulgurite.trace(step)(*BATCHES[0])
    assert not bias_of_all.weight.equal(before)


def test_a_name_that_means_another_model_gets_programs_of_its_own() -> None:
    loop = Loop(mlp())

    @fulgurite.trace
    def step(x: Tensor, y: Tensor) -> Tensor:
        return loop.step(x, y)

    step(*BATCHES[0])
    loop = Loop(mlp())
    before = loop.model[0].weight.detach().clone()
    step(*BATCHES[0])
    assert not loop.model[0].weight.equal(before)


def test_traced_functions_nest() -> None:
    loop = Loop(mlp())

    @fulgurite.trace
    def forward(x: Tensor) -> Tensor:
        return loop.model(x)

    class Outer(Loop):
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = cross_entropy(forward(x), y)
            loss.backward()
            loop.optimizer.step()
            return loss

    first = fulgurite.trace(Outer(mlp()).step)(*BATCHES[0])
    assert_close(first, cross_entropy(Loop(mlp()).model(BATCHES[0][0]), BATCHES[0][1]).detach(), 10)


def test_states_have_the_users_names() -> None:
    csx(max_programs=1)
    model = mlp()
    compiled_model = fulgurite.compile(model)
    optimizer = torch.optim.AdamW(model.parameters())

    @fulgurite.trace
    def training_step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(compiled_model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    training_step(*BATCHES[0])
    with pytest.raises(InputChanged, match=r"inputs has shape \[4, 8\]"):
        training_step(*(t[:4] for t in BATCHES[0]))
    model[0].weight = nn.Parameter(torch.zeros(16, 8, dtype=torch.float64))  # type: ignore[index]
    with pytest.raises(StateChanged, match=r"model\.0\.weight was float32"):
        training_step(*BATCHES[1])


# -- errors ------------------------------------------------------------------------------------


def test_misuse_is_an_error_with_the_users_line_and_leaves_everything_as_it_was() -> None:
    class Reads(Loop):
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = super().step(x, y)
            print(loss.item())
            return loss

    loop = Reads(mlp())
    before = [t.clone() for t in loop.tensors()]
    with pytest.raises(HostRead) as caught:
        fulgurite.trace(loop.step)(*BATCHES[0])
    assert caught.value.line is not None
    assert caught.value.line.source == "print(loss.item())"
    assert_close(loop.tensors(), before)
    assert not loop.optimizer.state


def test_a_branch_on_a_tensor_is_refused() -> None:
    @fulgurite.trace
    def step(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(ConditionalOnTensor, match=r"test_function\.py"):
        step(torch.ones(2))


def test_an_optimizer_that_cannot_be_found_is_named() -> None:
    loop, hidden = Loop(mlp()), {}
    vars(loop)["op" + "timiser"] = loop.optimizer
    del loop.optimizer

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(loop.model(x), y)
        loss.backward()
        getattr(loop, "op" + chr(116) + "imiser").step()
        return loss

    with pytest.raises(UnsupportedState, match=r"(?s)AdamW\.step\(\).*step\(\.\.\., optimizer\)"):
        fulgurite.trace(step)(*BATCHES[0])
    assert hidden == {}


def test_an_optimizer_is_not_stepped_without_gradients() -> None:
    loop = Loop(mlp())
    with torch.no_grad(), pytest.raises(UnsupportedState, match=r"torch\.no_grad"):
        fulgurite.trace(loop.optimizer.step.__func__)(loop.optimizer)


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (3, "got int"),
        (Loop, "got a class"),
        (staticmethod(len), "@staticmethod above @fulgurite.trace"),
        (classmethod(len), "@classmethod above @fulgurite.trace"),
    ],
)
def test_trace_refuses_what_is_no_function(function: Any, part: str) -> None:
    with pytest.raises(TypeError, match=part):
        fulgurite.trace(function)


def test_trace_refuses_generators() -> None:
    def steps(x: Tensor) -> Any:
        yield x

    with pytest.raises(TypeError, match="generator"):
        fulgurite.trace(steps)


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        (torch.ones(2).numpy(), r"x is a numpy ndarray.\n.*\n.*\n  Remedy: torch.as_tensor\(x\)"),
        (torch.ones(2, requires_grad=True), "x requires a gradient"),
    ],
)
def test_data_that_would_be_lost_is_refused(argument: Any, part: str) -> None:
    def step(x: Any) -> Any:
        return x + 1

    with pytest.raises(UnsupportedInput, match=part):
        fulgurite.trace(step)(argument)


def test_an_object_with_tensors_is_no_data() -> None:
    @fulgurite.trace
    def step(batch: Any) -> Tensor:
        return batch["x"] + 1

    with pytest.raises(UnsupportedInput, match=r"a UserDict with tensors(?s:.*): dict\(batch\)"):
        step(UserDict(x=torch.ones(2)))


def test_arguments_of_every_kind_have_their_names() -> None:
    csx(max_programs=1)

    @fulgurite.trace
    def step(x: Tensor, *more: Tensor, scale: Tensor, **others: Any) -> Tensor:
        return (x + sum(more)) * scale + others["last"][0]

    one, two = torch.ones(2), torch.ones(3)
    assert step(one, one, one, scale=one, last=[one]).tolist() == [4, 4]
    with pytest.raises(InputChanged) as caught:
        step(two, two, two, scale=two, last=[two])
    for name in ("x", "more[0]", "more[1]", "scale", "last[0]"):
        assert f" {name} has shape [3]" in str(caught.value)


def test_too_many_arguments_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="too many positional arguments"):
        fulgurite.trace(lambda x: x)(1, 2)


def test_a_failed_trace_looks_again_for_what_the_function_works_on() -> None:
    model = mlp()

    @fulgurite.trace
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y)
        loss.backward()
        late.step()
        return loss

    with pytest.raises(NameError, match="late"):
        step(*BATCHES[0])
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    step(*BATCHES[0])


def test_a_number_that_was_read_may_not_change() -> None:
    @fulgurite.trace
    def step(x: Tensor, scale: float) -> Tensor:
        return x * scale

    step(torch.ones(2), 2.0)
    with pytest.raises(InputChanged, match=r"scale was 2\.0"):
        step(torch.ones(2), 3.0)


def test_without_a_backend_it_says_how_to_make_one() -> None:
    fulgurite.backends.reset_backend()
    with pytest.raises(RuntimeError, match="no backend in this process"):
        fulgurite.trace(lambda x: x)(torch.ones(1))
    with pytest.raises(RuntimeError, match="no backend in this process"):
        fulgurite.compile(mlp())


def test_on_cpu_a_traced_function_is_the_eager_one() -> None:
    fulgurite.backends.reset_backend()
    fulgurite.backend("CPU")
    calls = []

    @fulgurite.trace
    def step(x: Tensor) -> float:
        calls.append(x)
        return x.sum().item()

    assert [step(torch.ones(2)), step(torch.ones(3))] == [2, 3]
    assert len(calls) == 2


# -- compile -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "CSX", "csx", "object"])
def test_compile_returns_the_module_itself(backend: Any) -> None:
    model = mlp()
    given = fulgurite.backend() if backend == "object" else backend
    assert fulgurite.compile(model, given) is model


def test_compile_refuses_another_backend_type() -> None:
    with pytest.raises(RuntimeError) as caught:
        fulgurite.compile(mlp(), "CPU")
    assert str(caught.value) == (
        "Cannot instantiate multiple backends. A backend with type CSX has already been"
        " instantiated."
    )


def test_compile_takes_modules_only() -> None:
    with pytest.raises(TypeError, match="got function"):
        fulgurite.compile(lambda x: x)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"went through torch\.compile"):
        fulgurite.compile(torch.compile(mlp(), backend="eager"))
    model = mlp()
    model.compile(backend="eager")
    with pytest.raises(TypeError, match=r"went through torch\.compile"):
        fulgurite.compile(model)
    with pytest.raises(TypeError, match="got int 3"):
        fulgurite.compile(mlp(), 3)  # type: ignore[arg-type]


def test_replacing_a_module_is_an_error_on_every_call() -> None:
    loop = Loop(mlp())
    step = fulgurite.trace(loop.step)
    step(*BATCHES[0])
    loop.model[3] = nn.Linear(16, CLASSES)  # type: ignore[operator]
    for _ in range(2):
        with pytest.raises(TraceError, match="modules of the model changed"):
            step(*BATCHES[0])
