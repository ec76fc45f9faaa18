"""Strategy "csx" of several processes: each trains on a part of the data, on the same program.

What starts the processes, and how they meet, is Lightning's: this is its DDP strategy without
``DistributedDataParallel``. What that does is in the program: gradients become their mean in the
backward pass (``reduction``), and buffers those of the first process. What a step reduces and
gathers are collectives of its graph too; outside of steps they are messages of the host, as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from fulgurite.backends.csx.capture import CapturedStep, Exchange
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.diagnostics.trace_errors import (
    OtherRankEnded,
    UnsupportedInput,
    UnsupportedState,
)
from fulgurite.backends.csx.diagnostics.user_lines import user_line
from fulgurite.backends.csx.distributed.agreement import (
    agree,
    gathered,
    refuse_other_batches,
    refuse_other_models,
    refuse_other_runs,
    refuse_other_streams,
)
from fulgurite.backends.csx.distributed.building import BuildsParts
from fulgurite.backends.csx.distributed.consensus import Consensus
from fulgurite.backends.csx.distributed.heartbeats import Heartbeats, waiting_for
from fulgurite.backends.csx.distributed.launchers import ForkLauncher, Launcher
from fulgurite.backends.csx.distributed.reduction import (
    ChangedBuffers,
    reducing_parts,
    share_first,
)
from fulgurite.backends.csx.distributed.rendezvous import rendezvous
from fulgurite.backends.csx.distributed.sync_batchnorm import SyncsBatchNorm
from fulgurite.backends.csx.graph.collectives import Processes, has_collectives
from fulgurite.backends.csx.graph.votes import StepsDiffer
from fulgurite.backends.csx.plugins.checkpoint_position import RANKS, position_of_rank
from fulgurite.backends.csx.plugins.strategy import StaticGraph
from fulgurite.backends.csx.state import Gradients
from fulgurite.backends.step_context import step_context


class CollectiveStrategy(StaticGraph, BuildsParts):
    """Several processes whose steps have collectives; the base of strategy "csx"."""

    _has_ended = False  # by an error: nobody answers any more
    buffers: ChangedBuffers | None = None  # of a step that is traced
    consensus: Consensus | None = None  # of a run
    _holds_back = _has_held_back = False  # gradients: the window goes on
    _heartbeats: Heartbeats | None = None

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor of all processes, reduced; in a traced step an operation of its program."""
        if step_context.get().trace is None or not isinstance(tensor, Tensor):
            with waiting_for("a message of the host"):
                return super().reduce(tensor, group, reduce_op)
        name = "sum" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
        return self._of(group).reduced(tensor, name)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """A tensor of all processes; in a traced step an operation of its program."""
        if step_context.get().trace is None:
            return super().all_gather(tensor, group, sync_grads)
        return self._of(group).gathered(tensor, with_gradient=sync_grads and tensor.requires_grad)

    def announcer(self) -> Callable[[Exchange, Tensor | None], None] | None:
        """What tells the others what a step exchanges with them."""
        return None if self.consensus is None else self.consensus.announce

    def note_audit(self) -> None:
        """Have all compare weights and optimizer state after this step, if all trace it again."""
        if self.consensus is not None:
            self.consensus.note_audit()

    def _of(self, group: Any) -> Processes:
        """Those of a process group; None or Lightning's WORLD: all."""
        if group is None or group is dist.group.WORLD:
            return self.processes
        return Processes(group=group.group_name, count=group.size())

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes, on the host."""
        _refuse_in_step("barrier")
        if not self._has_ended:
            with waiting_for("a message of the host"):
                super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of one process, on the host."""
        _refuse_in_step("broadcast")
        with waiting_for("a message of the host"):
            return obj if self._has_ended else super().broadcast(obj, src)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Buffers that a traced step changes become the first process's, as in DDP.

        Not under manual optimization: there DDP's processes keep their own.
        """
        assert self.lightning_module is not None
        self.buffers = ChangedBuffers(self.lightning_module)
        yield
        left, self.buffers = self.buffers.take(is_last=True), None
        if left:
            share_first(left, self.processes)


def _refuse_in_step(what: str) -> None:
    if step_context.get().trace is not None:
        raise UnsupportedInput(
            f"The step calls the strategy's {what}(), which is no operation of a program.",
            line=user_line(),
            remedy="self.all_gather(x), or self.trainer.strategy.reduce(x), which are; or a hook"
            " between steps, such as on_train_batch_end",
        )


class CSXParallelStrategy(CollectiveStrategy):
    """CSX in several processes."""

    strategy_name = "csx"

    def __init__(self, backend: CSXBackend | None = None, **strategy_options: Any) -> None:
        start_method = "fork" if _IS_INTERACTIVE else "popen"
        super().__init__(backend=backend, **{"start_method": start_method, **strategy_options})
        if self.backend.max_resident_bytes is not None:
            raise NotImplementedError(
                f"max_resident_bytes={self.backend.max_resident_bytes} with several processes: each"
                " keeps its part of all weights in memory. Leave max_resident_bytes out, or train"
                " in one process."
            )
        self._evaluated: list[list[float]] = []  # batches of each rank, in the latest evaluation

    @classmethod
    def register(cls) -> None:
        """Have ``lightning.Trainer(strategy="csx", devices=2)`` get this strategy.

        Lightning's registry makes a strategy from its name alone, so it knows one for each name.
        """
        lightnings: Any = _AcceleratorConnector
        own = lightnings._init_strategy

        def init_strategy(connector: Any) -> None:
            own(connector)
            count = len(connector._parallel_devices) * connector._num_nodes_flag
            if connector._strategy_flag == cls.strategy_name and count > 1:
                connector.strategy = cls(connector.strategy.backend)

        lightnings._init_strategy = init_strategy

    def _configure_launcher(self) -> None:
        """Let ours start the processes: the script again for each, or forked from a notebook."""
        super()._configure_launcher()
        if self._start_method == "popen" and self.cluster_environment is not None:
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        elif self._start_method == "fork":
            self._launcher = ForkLauncher(self, "fork")

    def setup_distributed(self) -> None:
        """Meet the other processes, and begin to look whether they live."""
        self.set_world_ranks()
        assert self.cluster_environment is not None
        of_all = self.global_rank, self.world_size
        with rendezvous(self.cluster_environment, *of_all, self._kill_children) as store:
            if store is not None:
                store.set_timeout(self._timeout)
                backend = self._get_process_group_backend()
                _init_dist_connection(
                    self.cluster_environment, backend, timeout=self._timeout, store=store
                )
            # Lightning finds that the processes are connected, and does the rest of its part
            super().setup_distributed()
        if self._heartbeats is None:
            self._has_ended = False
            self._heartbeats = Heartbeats(
                self._kill_children, lambda: 0 if self.consensus is None else self.consensus.begun
            )

    def _kill_children(self) -> None:
        """Kill the processes that this one has started, which wait for it, or are stopped."""
        for process in getattr(self._launcher, "procs", ()):
            process.kill()

    @contextlib.contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Tell the others at once, before callbacks hear of it, which may ask them something."""
        try:
            try:
                yield
            except (RuntimeError, StepsDiffer) as error:
                if self.consensus is not None:
                    self.consensus.refuse_others(error)
                raise
        except Exception as error:  # a signal ends all of them alike
            error.__suppress_context__ |= isinstance(error.__context__, StepsDiffer)
            if (first := self._end(error)) is None:
                raise
            raise OtherRankEnded(first) from None  # and not what a collective says of it

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes why this one ends, or say which one ended first."""
        super().on_exception(exception)
        if (first := self._end(exception)) is not None:
            exception.add_note(f"CSX: {first}")

    def _end(self, error: BaseException) -> str | None:
        """Tell the others; returns why one of them ended first, if that is so."""
        if self._heartbeats is None or self._has_ended:
            return None
        self._has_ended = True
        return self._heartbeats.publish_end(error)

    def teardown(self) -> None:
        """This process has done its part."""
        super().teardown()
        if self._heartbeats is not None:
            self._heartbeats.stop()
            self._heartbeats = None

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up as one process does."""
        if isinstance(self._layer_sync, TorchSyncBatchNorm):
            self._layer_sync = SyncsBatchNorm(self.processes)
        refuse_other_runs(trainer, self.backend)
        refuse_other_models(trainer.lightning_module)
        super().setup(trainer)
        if self.keeps_gradients and self.holds_parts:
            raise UnsupportedState(
                "Code on the host names .grad (a hook, or the code that called fit), of which each"
                " process holds a part.",
                remedy="self.log_dict(grad_norm(self, 2)) in on_before_optimizer_step, which is"
                " traced; fit() in a function that does not name .grad; or execution='pipeline'",
            )
        assert self._heartbeats is not None
        self.consensus = Consensus(self, trainer, self._heartbeats)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let each process keep its own gradients: more will be added to them."""
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False

    @contextlib.contextmanager
    def reducing(self, gradients: Gradients) -> Iterator[None]:
        """Let gradients become the mean of all processes', unless more are added to them."""
        if self._holds_back:
            self._has_held_back = gradients.held_back = True
            with reducing_parts(gradients, self.processes):
                yield
            return
        assert self.consensus is not None
        gradients.held_back |= self._has_held_back  # in a step before
        with self.consensus.reducing(gradients, self.processes, self.buffers):
            yield

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Tell the others what they have to know of this step."""
        super().on_train_batch_start(batch, batch_idx)
        assert self.consensus is not None
        self.consensus.begin_step()

    def requeue_if_asked(self) -> None:
        """Between two steps: save the job and have it begin again, if a cluster asked for that."""
        if self.consensus is not None:
            self.consensus.requeue_if_asked()

    def ask_for_audit(self) -> bool:
        """Have all processes audit the training's step after the next."""
        return self.consensus is not None and self.consensus.ask_for_audit()

    def all_stop(self) -> bool:
        """Whether all processes know of a signal that one of them got."""
        return self.consensus is None or self.consensus.all_stop()

    def compare(self, stage: str, captured: Mapping[str, CapturedStep]) -> None:
        """Verify that all processes have traced the same step."""
        agree(stage, captured)
        if any(has_collectives(one.graph) for one in captured.values()):
            refuse_other_batches(stage, self._evaluated)
        if self.consensus is not None:
            self.consensus.meet(captured)

    def begin_evaluation(self) -> None:
        """See that a step in which all processes take part comes as often in each of them."""
        super().begin_evaluation()
        trainer = self._trainer
        counts: dict[RunningStage | None, Any] = {
            RunningStage.SANITY_CHECKING: trainer.num_sanity_val_batches,
            RunningStage.TESTING: trainer.num_test_batches,
            RunningStage.PREDICTING: trainer.num_predict_batches,
        }
        own = list(counts.get(trainer.state.stage, trainer.num_val_batches))
        begun = 0 if self.consensus is None else self.consensus.begun
        with waiting_for(f"the beginning of an evaluation, after {begun} training steps"):
            self._evaluated = gathered(own)
        for (stage, _), step in self._evaluation.steps.items():
            if any(has_collectives(one.graph) for one in step.executables()):
                refuse_other_batches(stage, self._evaluated)

    def agree_on_batch(self, stage: str, loader: int, has_one: bool) -> None:
        """See that a stream has one more batch in all processes, or in none, where that matters."""
        refuse_other_streams(stage, loader, has_one, self._evaluation.traced(stage, loader))

    def with_other_positions(self, position: dict[str, Any]) -> dict[str, Any]:
        """Where the run is, in every process, for a checkpoint."""
        self.note_shapes(position)
        return {**position, RANKS: gathered(position)}

    def own_position(self, path: object, checkpoint: Mapping[str, Any], position: Any) -> Any:
        """Where this process was, by what ``with_other_positions`` put into a checkpoint."""
        cut = self.own_part if self.holds_parts else None
        return position_of_rank(path, checkpoint, position, self.global_rank, self.world_size, cut)
