"""Where gradients are between steps: in ``p.grad``, or in buffers that only programs see.

Under automatic optimization, where every step clears them first, a Lightning step keeps none unless
a hook on the host reads ``.grad``. Where none is kept, or in a buffer, ``p.grad`` is a
``DroppedGradient``, which raises when it is used: None would say that there was none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fulgurite.backends.csx.diagnostics.trace_errors import GradientNotKept
from fulgurite.backends.csx.diagnostics.user_lines import user_line
from fulgurite.backends.csx.graph.graph import Graph, Input, Kind
from fulgurite.backends.csx.graph.passes.prune import read_inputs
from fulgurite.backends.csx.state.gradients import GradientHandover, StageGradients

_ATEN = torch.ops.aten
_COPIES = (  # Module.to, .double, .cpu and deepcopy take gradients along
    *(_ATEN.detach.default, _ATEN.clone.default, _ATEN._to_copy.default, _ATEN.alias.default),
)
_ACCUMULATE = _ATEN.add_.Tensor


class DroppedGradient(Tensor):
    """A gradient without values, and without memory; every use of it is an error.

    Args:
        p: the parameter.
        name: its name.
    """

    of: str

    @staticmethod
    def __new__(cls, p: Tensor, name: str) -> DroppedGradient:
        """One of the layout of ``p``."""
        made: DroppedGradient = Tensor._make_wrapper_subclass(
            cls, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device
        )
        made.of = name
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copy it, or say what it is.

        Raises:
            GradientNotKept: its values are needed.
        """
        if func in _COPIES and type(args[0]) is cls:
            return DroppedGradient(_layout(args[0], kwargs or {}), args[0].of)
        if func is _ACCUMULATE and type(args[0]) is cls:
            return args[0]  # a backward pass after fit adds to what nobody knows
        leaves = pytree.tree_leaves((args, kwargs))
        _refuse(next(leaf for leaf in leaves if type(leaf) is cls))

    def share_memory_(self) -> DroppedGradient:
        """There is no memory to share; ``Module.share_memory`` asks gradients for it too."""
        return self

    def untyped_storage(self) -> torch.UntypedStorage:
        """Memory of no device, by which ``torch.export`` knows its layout; nobody reads that."""
        return _layout(self, {"device": "meta"}).untyped_storage()

    def _refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self)

    __repr__ = tolist = numpy = data_ptr = _refused  # type: ignore[assignment]
    __array__ = __iter__ = __dlpack__ = _refused


def forget_dropped(parameters: Iterable[nn.Parameter]) -> None:
    """Put zeros in place of dropped gradients, which are about to be cleared."""
    for p in parameters:
        if type(p.grad) is DroppedGradient:
            p.grad = torch.zeros_like(p, requires_grad=False)


def _layout(gradient: Tensor, options: dict[str, Any]) -> Tensor:
    return torch.empty_strided(
        gradient.shape,
        gradient.stride(),
        dtype=options.get("dtype") or gradient.dtype,
        device=options.get("device") or gradient.device,
    )


def _refuse(gradient: DroppedGradient) -> NoReturn:
    raise GradientNotKept(
        f"{gradient.of}.grad was used on the host. Gradients live in the training program, which"
        " keeps them where the code of a hook, or of the function that called fit, reads .grad;"
        " here it found none.",
        line=user_line(),
        remedy="self.log_dict(grad_norm(self, 2)) in on_before_optimizer_step, which is traced; or"
        " write p.grad in the host hook's own code; zero_grad() clears it",
    )


class GradientBuffers:
    """Gradients that only programs see: those of a window of accumulation.

    Args:
        inputs: those of the program that are gradients.
        parameters: by name.
        stage: holds the buffers, which the stage's programs share.
        read: names of the parameters whose gradients the program reads.
    """

    def __init__(
        self,
        inputs: list[Input],
        parameters: dict[str, nn.Parameter],
        stage: StageGradients,
        read: frozenset[str],
    ) -> None:
        self._stage, self._read, self._tensors = stage, read, list[Tensor]()
        for item in inputs:
            name = item.name.removesuffix(".grad")
            if (kept := stage.kept.get(item.name)) is None:
                kept = stage.kept[item.name] = _zeros(item.example)
                found = parameters[name].grad
                if name in stage.there and type(found) is Tensor:  # from before the run
                    kept.copy_(found)
            self._tensors.append(kept)

    def before(self) -> list[Tensor]:
        """Those to be given to the program.

        Raises:
            GradientNotKept: it reads one that the steps before have not kept.
        """
        if lost := self._stage.lost & self._read:
            raise GradientNotKept(
                f"The step reads {min(lost)}.grad of a step before, whose program does not keep it:"
                " its code did not look at .grad.",
                remedy="read .grad in every step, not under a condition; or in a host hook, such as"
                " on_train_batch_end, whose code then makes all programs keep gradients",
            )
        return self._tensors

    def after(self, gradients: list[Tensor]) -> None:
        """They were updated in place."""


class FunctionGradients:
    """Gradients of a function, which the host sees in ``p.grad``."""

    def __init__(self, inputs: list[Input], handover: GradientHandover) -> None:
        names = list(handover.parameters)
        self._parameters = [handover.parameters[names[item.index]] for item in inputs]
        self._tensor_after = [handover.tensor_after.get(names[item.index]) for item in inputs]
        self._examples = [item.example for item in inputs]
        # zeros that the program left where the step cleared: the next step begins with them
        self._spare: list[Tensor | None] = [None] * len(inputs)

    def before(self) -> list[Tensor]:
        """What is in ``p.grad``; zeros for None."""
        found = []
        for i, p in enumerate(self._parameters):
            gradient, example = p.grad, self._examples[i]
            if gradient is None:
                gradient = self._spare[i]
                gradient = _zeros(example) if gradient is None else gradient
            elif not _fits(gradient, example):  # the loop may put any gradient there
                gradient = _zeros(example).copy_(gradient)
            found.append(gradient)
        return found

    def after(self, gradients: list[Tensor]) -> None:
        """Put them into ``p.grad``, or None where the step cleared them, which made them zero."""
        for i, (p, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            left = self._tensor_after[i]
            if left is False:
                p.grad, self._spare[i] = None, gradient
            elif left or p.grad is not None:
                p.grad, self._spare[i] = gradient, None


class LightningGradients:
    """Gradients that the host sees in ``p.grad`` between Lightning's steps, and may change there.

    ``read`` are positions of those that the program reads; others it only overwrites.
    """

    def __init__(self, inputs: list[Input], handover: GradientHandover, read: set[int]) -> None:
        names = [list(handover.parameters)[item.index] for item in inputs]
        self._parameters = [handover.parameters[name] for name in names]
        self._tensor_after = [handover.tensor_after.get(name) for name in names]
        self._examples = [item.example for item in inputs]
        self._read = [i in read for i in range(len(inputs))]
        # eagerly the next step's is another tensor, and what the host keeps of this one stays
        self._fresh = [name in handover.fresh for name in names]

        self._zeros: list[Tensor] = []  # of a step that clears all: it leaves them zero
        if not any(self._tensor_after):
            self._zeros = list(map(_zeros, self._examples))

    def before(self) -> list[Tensor]:
        """What is in ``p.grad``; zeros for None."""
        if self._zeros and not any(p.grad is not None for p in self._parameters):
            return self._zeros
        return list(map(self._found, range(len(self._parameters))))

    def _found(self, i: int) -> Tensor:
        gradient, example = self._parameters[i].grad, self._examples[i]
        # only overwritten: memory will do, and what was dropped has no values to be asked for
        if not self._read[i] and (self._fresh[i] or type(gradient) is DroppedGradient):
            return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype)
        if gradient is None:
            return _zeros(example)
        if self._fresh[i] or not _fits(gradient, example):
            return _zeros(example).copy_(gradient)
        return gradient

    def after(self, gradients: list[Tensor]) -> None:
        """Put them into ``p.grad``, or None where the step cleared them."""
        if gradients is self._zeros:
            return
        for p, left, gradient in zip(self._parameters, self._tensor_after, gradients, strict=True):
            if left is not None:
                p.grad = gradient if left else None
            elif p.grad is not None:
                p.grad = gradient


def _fits(gradient: Tensor, example: Tensor) -> bool:
    """Whether a program takes a gradient as it is; copying one that was dropped is an error."""
    same = gradient.stride() == example.stride() and gradient.dtype == example.dtype
    return same and type(gradient) is not DroppedGradient


def _zeros(example: Tensor) -> Tensor:
    return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype).zero_()


def held_gradients(
    graph: Graph, handover: GradientHandover
) -> GradientBuffers | FunctionGradients | LightningGradients | None:
    """The gradients among a program's inputs, None where there are none."""
    positions = [i for i, item in enumerate(graph.inputs) if item.kind is Kind.GRADIENT]
    if not positions:
        return None
    gradients = [graph.inputs[i] for i in positions]
    if handover.on_host:
        return FunctionGradients(gradients, handover)
    read = read_inputs(graph)
    if handover.shown:
        own = {k for k, i in enumerate(positions) if i in read}
        return LightningGradients(gradients, handover, own)
    names = frozenset(graph.inputs[i].name.removesuffix(".grad") for i in positions if i in read)
    return GradientBuffers(gradients, handover.parameters, handover.scope.stage_gradients, names)


class UnseenGradients:
    """Gradients that the host does not see in ``p.grad``, and what it finds there after a step.

    A ``DroppedGradient`` where there is one: None would say that there was none.
    """

    def __init__(self, graph: Graph, handover: GradientHandover) -> None:
        held = {
            item.name.removesuffix(".grad") for item in graph.inputs if item.kind is Kind.GRADIENT
        }
        self._handover = handover
        after = {} if handover.on_host else handover.tensor_after
        self._made = frozenset(name for name, is_tensor in after.items() if is_tensor)
        self._cleared = frozenset(after) - self._made
        seen = held if handover.shown else set[str]()
        self._lost, self._gone = self._made - held, self._cleared - seen
        self._elsewhere = self._cleared - held  # in buffers that other programs have
        self._dropped = {
            name: DroppedGradient(handover.parameters[name], name) for name in self._made - seen
        }
        self._results: dict[tuple[Any, Any], tuple[frozenset[str], frozenset[str]]] = {}

    def put(self) -> None:
        """Put None there, or a tensor that raises when it is used."""
        stage, parameters = self._handover.scope.stage_gradients, self._handover.every
        before = stage.there, stage.lost
        if (after := self._results.get(before)) is None:
            there = (stage.there | self._made) - self._cleared
            lost = (stage.lost - self._made | self._lost) - self._cleared
            after = self._results[before] = (there, lost)
        if after != before:
            if not self._elsewhere.isdisjoint(stage.there):
                stage.clear(self._elsewhere)
            stage.there, stage.lost = after
        # where host code names .grad, it may put something else there
        if stage.shown == stage.there and not self._handover.shown:
            return
        stage.shown = stage.there
        for name, dropped in self._dropped.items():
            parameters[name].grad = dropped
        for name in self._gone:
            parameters[name].grad = None
