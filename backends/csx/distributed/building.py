"""A module that is too large for one process: built in parts (weight streaming).

In ``configure_model`` each layer is cut as soon as another module takes it in, so that no process
holds more than one layer whole. A module of ``trainer.init_module(empty_init=True)`` is on the
meta device; its layers get memory one after the other, and ``reset_parameters()`` fills it. Both
draw the numbers that one process would, and what counts are the first process's.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerState, TrainerStatus
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy

from fulgurite.backends.csx.diagnostics.trace_errors import UnsupportedState
from fulgurite.backends.csx.distributed.reduction import share_first
from fulgurite.backends.csx.distributed.saved_parts import SavesParts
from fulgurite.backends.csx.graph.collectives import Processes
from fulgurite.backends.csx.state import ShardedTensor, shard_parameters, swap, writing_wholes


class BuildsParts(SavesParts, DDPStrategy):
    """The part of a strategy that sets a module up; in parts, where processes hold parts."""

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights, into parts where processes hold parts: the module has not been set up."""
        if self.holds_parts:
            assert self.lightning_module is not None
            _materialize_all(self.lightning_module, self.processes, self.root_device)
            _cut(self.lightning_module.parameters(), self.processes)
        super().load_model_state_dict(checkpoint, strict)

    def model_to_device(self) -> None:
        """Where it is on the meta device: give it memory."""
        assert self.model is not None
        if self.holds_parts:
            _materialize_all(self.model, self.processes, self.root_device)
        super().model_to_device()

    def configure_ddp(self) -> None:
        """Begin with the first process's parameters and buffers."""
        assert self.model is not None
        if self.holds_parts:
            _cut(self.model.parameters(), self.processes)
            share_first(list(self.model.buffers()), self.processes)
        else:
            _sync_module_states(self.model)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where a module is made: ``configure_model``, or ``trainer.init_module``."""
        runs = getattr(getattr(self._lightning_module, "_trainer", None), "state", TrainerState())
        with contextlib.ExitStack() as stack:
            stack.enter_context(super().tensor_init_context(empty_init and not self.holds_parts))
            if self.holds_parts and empty_init:
                stack.enter_context(torch.device("meta"))
            elif self.holds_parts and runs.status == TrainerStatus.RUNNING:
                stack.enter_context(_building_in_parts(self.processes))
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Cut the module for runs that exchange no gradients too."""
        super().setup(trainer)
        if not self.holds_parts:
            return
        if trainer.state.fn == TrainerFn.FITTING:
            # what torch lacks for checkpoints is said before anything was trained
            importlib.import_module("fulgurite.backends.checkpoints.folder_writer")
        else:
            self.configure_ddp()

    def teardown(self) -> None:
        """Leave a module alone that an error has left without memory."""
        module = self._lightning_module
        if module is not None and any(tensor.is_meta for tensor in _tensors_of(module)):
            self._lightning_module = None  # moving it would be one more error, and hide that
        super().teardown()
        self._lightning_module = module


@contextlib.contextmanager
def _building_in_parts(processes: Processes) -> Iterator[None]:
    """Cut the parameters of each module that another one takes in while the block runs."""

    def take_in(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None:
            _cut(module.parameters(), processes)

    taking_in: Any = take_in
    hook = register_module_module_registration_hook(taking_in)
    try:
        with writing_wholes(_of_first):
            yield
    finally:
        hook.remove()


def _cut(parameters: Iterable[nn.Parameter], processes: Processes) -> None:
    """Let each process hold its part of the first one's parameters; those that have no memory yet
    are left as they are."""
    ready = [p for p in parameters if not (p.is_meta or is_lazy(p) or isinstance(p, ShardedTensor))]
    for p in ready:
        _of_first(p.detach())
    shard_parameters(ready, processes)


def _of_first(tensor: Tensor) -> None:
    dist.broadcast(tensor, 0)


def _tensors_of(module: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    """Its parameters and buffers."""
    return itertools.chain(module.parameters(recurse), module.buffers(recurse))


def _materialize_all(module: nn.Module, processes: Processes, device: torch.device) -> None:
    """Give a module on the meta device values on another, layer by layer, and cut them.

    Raises:
        UnsupportedState: a layer does not say how its parameters or buffers begin.
    """
    with writing_wholes(_of_first):
        for name, layer in _from_the_leaves(module):
            if any(tensor.is_meta for tensor in _tensors_of(layer, recurse=False)):
                _materialize(name, layer, device)
                _cut(layer.parameters(recurse=False), processes)


def _materialize(name: str, layer: nn.Module, device: torch.device) -> None:
    # a tied weight begins as the layer says that had it first
    begun = [p for p in layer.parameters(recurse=False) if isinstance(p, ShardedTensor)]
    before = [p.part.detach().clone() for p in begun]
    empty: dict[str, Tensor] = {}
    for key, p in layer.named_parameters(recurse=False):
        if p.is_meta:
            real: Tensor = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
            vars(real).update(vars(p))
            swap(p, real)
            empty[key] = p
    for key, buffer in layer.named_buffers(recurse=False):
        if buffer.is_meta:
            empty[key] = layer._buffers[key] = torch.empty_like(buffer, device=device)
    versions = {key: tensor._version for key, tensor in empty.items()}
    reset = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
    if callable(reset):
        reset()
    now = dict(layer.named_parameters(recurse=False)) | dict(layer.named_buffers(recurse=False))
    left = [key for key, it in empty.items() if now[key] is it and it._version == versions[key]]
    if left:
        path = f"{name}." if name else ""
        raise UnsupportedState(
            f"{path}{left[0]} was made on the meta device, and"
            f" {type(layer).__name__}.reset_parameters() gives it no value.",
            remedy="a method reset_parameters() that fills all that it has; or make the module in"
            " configure_model(), where each layer is cut when it is there",
        )
    for p, part in zip(begun, before, strict=True):
        p.part.copy_(part)


def _from_the_leaves(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules, those inside of one before it, as they were built; each once."""
    seen = set[nn.Module]()

    def walk(one: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if one in seen:
            return
        seen.add(one)
        for key, child in one.named_children():
            yield from walk(child, f"{path}.{key}" if path else key)
        yield path, one

    return walk(module, name)
