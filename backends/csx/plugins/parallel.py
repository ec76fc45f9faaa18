"""Strategy "csx" of several processes: each trains on a part of the data, on the same program.

What starts the processes, and how they meet, is Lightning's: this is its DDP strategy without
``DistributedDataParallel``. What that does is in the program: gradients become their mean in the
backward pass (``state/reduction``), and buffers those of the first process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fulgurite.backends.csx.capture.captured import Captured
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.diagnostics.errors import UnsupportedInput
from fulgurite.backends.csx.diagnostics.user_lines import user_line
from fulgurite.backends.csx.graph.collectives import Processes
from fulgurite.backends.csx.plugins.agreement import agree, gathered
from fulgurite.backends.csx.plugins.heartbeats import Heartbeats
from fulgurite.backends.csx.plugins.launcher import Launcher
from fulgurite.backends.csx.plugins.processes import RANKS, position_of_rank
from fulgurite.backends.csx.plugins.strategy import StaticGraph
from fulgurite.backends.csx.state.gradients import Gradients
from fulgurite.backends.csx.state.reduction import reduced, share_first
from fulgurite.backends.step_context import step_context


class CSXParallelStrategy(StaticGraph, DDPStrategy):
    """CSX in several processes."""

    strategy_name = "csx"

    def __init__(self, backend: CSXBackend | None = None, **strategy_options: Any) -> None:
        start_method = "fork" if _IS_INTERACTIVE else "popen"
        super().__init__(backend=backend, **{"start_method": start_method, **strategy_options})
        self._holds_back = False  # gradients: the window goes on
        self._heartbeats: Heartbeats | None = None

    @property
    def processes(self) -> Processes:
        """Those that train together."""
        assert dist.group.WORLD is not None
        return Processes(group=dist.group.WORLD.group_name, count=self.world_size)

    def _configure_launcher(self) -> None:
        """Let ours start the processes, where the script is run again for each."""
        super()._configure_launcher()
        if self._start_method == "popen" and self.cluster_environment is not None:
            nodes = self.num_processes, self.num_nodes
            self._launcher = Launcher(self.cluster_environment, *nodes)

    def setup_distributed(self) -> None:
        """Meet the other processes, and begin to look whether they live."""
        super().setup_distributed()
        if self._heartbeats is None:
            self._heartbeats = Heartbeats(self._kill_children)

    def _kill_children(self) -> None:
        """Kill the processes that this one has started, which wait for it, or are stopped."""
        for process in getattr(self._launcher, "procs", ()):
            process.kill()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes why this one ends, or say which one ended first."""
        super().on_exception(exception)
        if self._heartbeats is not None:
            self._heartbeats.tell_end(exception)

    def teardown(self) -> None:
        """This process has done its part."""
        super().teardown()
        if self._heartbeats is not None:
            self._heartbeats.stop()
            self._heartbeats = None

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up as one process does."""
        if self._layer_sync is not None:
            raise MisconfigurationException(
                "CSX does not support sync_batchnorm=True: torch's SyncBatchNorm does not run on"
                " CPUs. Leave it out: each process then normalizes with its own batch, and the"
                " statistics of the first one are kept, as in Lightning's DDP. Or use GroupNorm or"
                " LayerNorm, which do not look at other rows."
            )
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Begin with the first process's parameters and buffers."""
        assert self.model is not None
        _sync_module_states(self.model)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let each process keep its own gradients: more will be added to them."""
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False

    def reducing(self, gradients: Gradients) -> contextlib.AbstractContextManager[None]:
        """Let gradients become the mean of all processes', unless more are added to them."""
        if self._holds_back:
            return contextlib.nullcontext()
        return reduced(gradients, self.processes)

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
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of one process, on the host."""
        _refuse_in_step("broadcast")
        return super().broadcast(obj, src)

    def compare(self, stage: str, captured: Mapping[str, Captured]) -> None:
        """Verify that all processes have traced the same step."""
        agree(stage, captured)

    def with_others(self, position: dict[str, Any]) -> dict[str, Any]:
        """Where the run is, in every process, for a checkpoint."""
        return {**position, RANKS: gathered(position)}

    def own(self, path: object, checkpoint: Mapping[str, Any], position: Any) -> Any:
        """Where this process was, by what ``with_others`` put into a checkpoint."""
        return position_of_rank(path, checkpoint, position, self.global_rank, self.world_size)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Buffers that a traced step changes become the first process's, as in DDP."""
        assert self.lightning_module is not None
        modules = list(self.lightning_module.modules())
        before = [_versions(module) for module in modules]
        yield
        changed = [
            module
            for module, was in zip(modules, before, strict=True)
            if _versions(module) != was or _keeps_statistics(module)
        ]
        buffers = {id(b): b for module in changed for b in module.buffers(recurse=False)}
        if buffers:
            share_first(list(buffers.values()), self.processes)


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
