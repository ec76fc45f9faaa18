"""What processes exchange in a traced step: operations of its program.

Lightning's DDP strategy sends messages on the host. Here what a step reduces and gathers, and the
buffers that it changes, are collectives of the graph; outside of steps they are as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fulgurite.backends.csx.diagnostics.errors import UnsupportedInput
from fulgurite.backends.csx.diagnostics.user_lines import user_line
from fulgurite.backends.csx.graph.collectives import Processes
from fulgurite.backends.csx.plugins.strategy import StaticGraph
from fulgurite.backends.csx.state import share_first
from fulgurite.backends.step_context import step_context


class CollectiveStrategy(StaticGraph, DDPStrategy):
    """Several processes whose steps have collectives; the base of strategy "csx"."""

    _has_ended = False  # by an error: nobody answers any more
    buffers: ChangedBuffers | None = None  # of a step that is traced

    @property
    def processes(self) -> Processes:
        """Those that train together."""
        assert dist.group.WORLD is not None
        return Processes(group=dist.group.WORLD.group_name, count=self.world_size)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor of all processes, reduced; in a traced step an operation of its program."""
        if step_context.get().trace is None or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        return self._of(group).reduced(tensor, _name_of(reduce_op))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """A tensor of all processes; in a traced step an operation of its program."""
        if step_context.get().trace is None:
            return super().all_gather(tensor, group, sync_grads)
        return self._of(group).gathered(tensor, with_gradient=sync_grads and tensor.requires_grad)

    def _of(self, group: Any) -> Processes:
        """Those of a process group; None or Lightning's WORLD: all."""
        if group is None or group is dist.group.WORLD:
            return self.processes
        return Processes(group=group.group_name, count=group.size())

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes, on the host."""
        _refuse_in_step("barrier")
        if not self._has_ended:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of one process, on the host."""
        _refuse_in_step("broadcast")
        return obj if self._has_ended else super().broadcast(obj, src)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Buffers that a traced step changes become the first process's, as in DDP."""
        assert self.lightning_module is not None
        self.buffers = ChangedBuffers(self.lightning_module)
        yield
        left, self.buffers = self.buffers.take(is_last=True), None
        if left:
            share_first(left, self.processes)


class ChangedBuffers:
    """The buffers that a step changes, from its beginning on."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._seen = [_versions(one) for one in self._modules]
        self._are_taken = False

    def take(self, is_last: bool = False) -> list[Tensor]:
        """Those that were changed since they were taken last.

        A normalization's statistics change unseen: they are taken until the step's last backward
        pass, before which it changes them.
        """
        unseen = not (is_last and self._are_taken)
        changed = [
            module
            for module, was in zip(self._modules, self._seen, strict=True)
            if _versions(module) != was or (unseen and _keeps_statistics(module))
        ]
        self._are_taken = True
        return list({id(b): b for one in changed for b in one.buffers(recurse=False)}.values())

    def note(self) -> None:
        """Those that were taken have been written."""
        self._seen = [_versions(one) for one in self._modules]


def _name_of(reduce_op: Any) -> str:
    """A reduction as functional collectives call it."""
    if reduce_op is None:
        return "sum"
    return str(reduce_op).rpartition(".")[2].lower()


def _refuse_in_step(what: str) -> None:
    if step_context.get().trace is not None:
        raise UnsupportedInput(
            f"The step calls the strategy's {what}(), which is no operation of a program.",
            line=user_line(),
            remedy="self.all_gather(x), or self.trainer.strategy.reduce(x), which are; or a hook"
            " between steps, such as on_train_batch_end",
        )


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """What tells whether Python changed a module's buffers."""
    return [(id(buffer), buffer._version) for buffer in module.buffers(recurse=False)]


def _keeps_statistics(module: nn.Module) -> bool:
    """Whether a normalization changes its buffers by itself, which Python does not see."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats
