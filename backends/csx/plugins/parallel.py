"""Strategy "csx" of several processes: each trains on a part of the data, on the same program.

What starts the processes, and how they meet, is Lightning's: this is its DDP strategy without
``DistributedDataParallel``. What that does is in the program: gradients become their mean in the
backward pass (``state/reduction``), and buffers those of the first process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from fulgurite.backends.csx.capture import Captured
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.diagnostics.errors import OtherRankEnded
from fulgurite.backends.csx.graph.collectives import has_collectives
from fulgurite.backends.csx.plugins.agreement import (
    agree,
    gathered,
    refuse_other_batches,
    refuse_other_models,
    refuse_other_runs,
    refuse_other_streams,
)
from fulgurite.backends.csx.plugins.collective import CollectiveStrategy
from fulgurite.backends.csx.plugins.consensus import Consensus
from fulgurite.backends.csx.plugins.fork_launcher import ForkLauncher
from fulgurite.backends.csx.plugins.heartbeats import Heartbeats
from fulgurite.backends.csx.plugins.launcher import Launcher
from fulgurite.backends.csx.plugins.meeting import meeting
from fulgurite.backends.csx.plugins.processes import RANKS, position_of_rank
from fulgurite.backends.csx.plugins.sync_batchnorm import SyncsBatchNorm
from fulgurite.backends.csx.state import Gradients


class CSXParallelStrategy(CollectiveStrategy):
    """CSX in several processes."""

    strategy_name = "csx"

    def __init__(self, backend: CSXBackend | None = None, **strategy_options: Any) -> None:
        start_method = "fork" if _IS_INTERACTIVE else "popen"
        super().__init__(backend=backend, **{"start_method": start_method, **strategy_options})
        self._holds_back = False  # gradients: the window goes on
        self._heartbeats: Heartbeats | None = None
        self.consensus: Consensus | None = None  # of a run
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
            nodes = self.num_processes, self.num_nodes
            self._launcher = Launcher(self.cluster_environment, *nodes)
        elif self._start_method == "fork":
            self._launcher = ForkLauncher(self, "fork")

    def setup_distributed(self) -> None:
        """Meet the other processes, and begin to look whether they live."""
        self.set_world_ranks()
        assert self.cluster_environment is not None
        of_all = self.global_rank, self.world_size
        with meeting(self.cluster_environment, *of_all, self._kill_children) as store:
            if store is not None:
                store.set_timeout(self._timeout)
                backend = self._get_process_group_backend()
                _init_dist_connection(
                    self.cluster_environment, backend, timeout=self._timeout, store=store
                )
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
    def telling(self) -> Iterator[None]:
        """Tell the others at once, before callbacks hear of it, which may ask them something."""
        try:
            yield
        except Exception as error:  # a signal ends all of them alike
            first = self._end(error)
            if first is None:
                raise
        else:
            return
        raise OtherRankEnded(first)  # and not what a collective says of it

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes why this one ends, or say which one ended first."""
        super().on_exception(exception)
        first = self._end(exception)
        if first is not None:
            exception.add_note(f"CSX: {first}")

    def _end(self, error: BaseException) -> str | None:
        """Tell the others; returns why one of them ended first, if that is so."""
        if self._heartbeats is None or self._has_ended:
            return None
        self._has_ended = True
        return self._heartbeats.tell_end(error)

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
        self.consensus = Consensus(self, trainer)

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

    @contextlib.contextmanager
    def reducing(self, gradients: Gradients) -> Iterator[None]:
        """Let gradients become the mean of all processes', unless more are added to them."""
        if self._holds_back:
            yield
            return
        assert self.consensus is not None
        assert self.lightning_module is not None
        once = self.lightning_module.automatic_optimization
        buffers = self.buffers if once else None
        with self.consensus.reducing(gradients, self.processes, buffers):
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

    def compare(self, stage: str, captured: Mapping[str, Captured]) -> None:
        """Verify that all processes have traced the same step."""
        agree(stage, captured)
        if any(has_collectives(one.graph) for one in captured.values()):
            refuse_other_batches(stage, self._evaluated)
        if self.consensus is not None:
            self.consensus.meet(captured)

    def on_validation_start(self) -> None:
        """See that a step in which all processes take part comes as often in each of them."""
        super().on_validation_start()
        trainer = self._trainer
        sanity = trainer.num_sanity_val_batches
        self._compare_batches(sanity if trainer.sanity_checking else trainer.num_val_batches)

    def on_test_start(self) -> None:
        """See that a step in which all processes take part comes as often in each of them."""
        super().on_test_start()
        self._compare_batches(self._trainer.num_test_batches)

    def on_predict_start(self) -> None:
        """See that a step in which all processes take part comes as often in each of them."""
        super().on_predict_start()
        self._compare_batches(self._trainer.num_predict_batches)

    def _compare_batches(self, counts: Sequence[float]) -> None:
        self._evaluated = gathered(list(counts))
        for (stage, _), step in self._evaluation.steps.items():
            if any(has_collectives(one.graph) for one in step.executables()):
                refuse_other_batches(stage, self._evaluated)

    def agree_on_batch(self, stage: str, loader: int, has_one: bool) -> None:
        """See that a stream has one more batch in all processes, or in none, where that matters."""
        if self._evaluation.is_of_all(stage, loader):
            refuse_other_streams(stage, loader, has_one)

    def with_others(self, position: dict[str, Any]) -> dict[str, Any]:
        """Where the run is, in every process, for a checkpoint."""
        return {**position, RANKS: gathered(position)}

    def own(self, path: object, checkpoint: Mapping[str, Any], position: Any) -> Any:
        """Where this process was, by what ``with_others`` put into a checkpoint."""
        return position_of_rank(path, checkpoint, position, self.global_rank, self.world_size)
