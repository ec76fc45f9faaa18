"""What processes that train together agree on at each step, by what travels with its gradients.

See ``graph/votes``: which code runs, whether an epoch ends, whether a signal ends or requeues the
run, and whether the next step is audited.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from fulgurite.backends.csx.capture import CapturedStep, Exchange, begin_mean
from fulgurite.backends.csx.distributed.agreement import (
    gathered,
    gradients_differ,
    refuse_other_ends,
    refuse_other_epochs,
    refuse_other_exchanges,
    refuse_other_states,
)
from fulgurite.backends.csx.distributed.heartbeats import Heartbeats, begin_wait, is_of_others
from fulgurite.backends.csx.distributed.reduction import ChangedBuffers, reduced
from fulgurite.backends.csx.graph.collectives import Processes
from fulgurite.backends.csx.graph.votes import AGREED, StepsDiffer, Vote, Votes, VotesCall, votes_of
from fulgurite.backends.csx.plugins.strategy import StaticGraph
from fulgurite.backends.csx.state import Gradients, ShardedTensor
from fulgurite.backends.step_context import step_context

_EXCHANGE = "exchange"  # what a process has left in the store


class Consensus:
    """What the processes of one run decide together, by the votes of each step.

    Args:
        strategy: asks all processes.
        trainer: whose run it is.
        heartbeats: reach the others where a collective fails.

    Attributes:
        begun: how many steps this process has begun.
    """

    def __init__(self, strategy: StaticGraph, trainer: pl.Trainer, heartbeats: Heartbeats) -> None:
        self._votes = Votes(dist.get_world_size(), strategy.reduce_boolean_decision)
        self._votes.say(Vote.FIRST, dist.get_rank() == 0)
        self._strategy, self._trainer, self.begun = strategy, trainer, 0
        self._exchange: Exchange | None = None  # of the step that runs, and its numbers
        self._numbers: Tensor | None = None
        self._epoch = 0  # in which it runs
        self._heartbeats = heartbeats
        self._told: dict[int, tuple[Exchange, int]] = {}  # and digests, by their identity
        self._is_one = False  # whether refused code has left no traces
        # Lightning's handlers send messages, or save, in the middle of a step of each process: here
        # a signal is noted, goes out with the next step, and is acted on at the same one by all
        self._signals: Any = trainer._signal_connector
        self._save_and_requeue: Any = self._signals._slurm_sigusr_handler_fn
        self._asked_to_requeue = False  # this process
        self._requeues: bool | None = None  # whether all are about to; None: nobody was asked yet
        vars(self._signals)["_sigterm_notifier_fn"] = self._note_signal
        vars(self._signals)["_slurm_sigusr_handler_fn"] = self._note_requeue

    def meet(self, captured: Mapping[str, CapturedStep]) -> None:
        """All processes have traced the same, and are about to load it."""
        if any(votes_of(one.outputs.calls) for one in captured.values()):
            self._votes.meets = True

    @contextlib.contextmanager
    def reducing(
        self, gradients: Gradients, processes: Processes, buffers: ChangedBuffers | None
    ) -> Iterator[None]:
        """Let gradients become the mean of all processes'.

        Values that were logged with ``sync_dist`` travel along, with a step's first the votes, and
        buffers that the step has changed, but under manual optimization. Weights in parts are
        updated as each gradient arrives, which then is let go: there the votes go ahead.
        """
        votes, calls = self._votes, step_context.get().calls
        assert calls is not None
        begun: Tensor | None = None
        shares: Tensor | None = None
        votes_now = votes_of(calls) is None  # a step of several backward passes: with the first
        if gradients.sharded and votes_now:
            begun = processes.begin_sum(votes.ballot / processes.count)
        is_first, window = votes.ballot[Vote.FIRST] > 0.5, self._trainer.accumulate_grad_batches
        with reduced(gradients, processes, is_first, window > 1 or gradients.held_back) as along:
            yield
            if begun is not None:
                shares = processes.wait(begun)
            elif votes_now:
                along.means.append(shares := votes.ballot.clone())
            along.means += [mean for call in calls if (mean := begin_mean(call)) is not None]
            if buffers is not None:
                along.firsts += buffers.take()
        if buffers is not None:
            buffers.mark_written()
        if shares is not None:
            calls.append(VotesCall(votes, AGREED(shares, processes.count), self._hear))

    def announce(self, exchange: Exchange, numbers: Tensor | None) -> None:
        """Say what the next step exchanges with the other processes, and with which numbers."""
        self.begun += 1
        epoch = self._trainer.current_epoch
        if exchange is not self._exchange or numbers is not self._numbers or epoch != self._epoch:
            self._exchange, self._numbers, self._epoch = exchange, numbers, epoch
            if id(exchange) not in self._told:  # its collective may fail where sizes differ
                said = repr((exchange.reduced, exchange.updated)).encode()
                self._told[id(exchange)] = exchange, zlib.crc32(said)
                self._heartbeats.tell(_EXCHANGE, json.dumps([self.begun, *exchange.reduced]))
            values = b"" if numbers is None else numbers.numpy().tobytes()
            digest = zlib.crc32(values, self._told[id(exchange)][1])
            self._votes.say_digest(zlib.crc32(epoch.to_bytes(8), digest))
        if exchange.reduced:
            begin_wait(f"training step {self.begun}")

    def refuse_others(self, error: Exception) -> None:
        """Raise if a step ended since another process has begun another one.

        Raises:
            GraphsDiffer: it exchanges other gradients, or has other numbers.
            BatchesDiffer: it is in another epoch.
        """
        if isinstance(error, StepsDiffer):
            self._votes.hear(error.shares)
            self._hear()
        if self._exchange is None or not is_of_others(error):
            return
        own = list(self._exchange.reduced)
        for rank, value in self._heartbeats.told(_EXCHANGE).items():
            since, *others = json.loads(value)
            if others != own and since <= self.begun:
                raise gradients_differ(dist.get_rank(), own, rank, others)

    def note_audit(self) -> None:
        """This process traces the next step again."""
        self._votes.say(Vote.LOOKS, True)

    def begin_step(self) -> None:
        """Say what this process has to say with the next step."""
        self._votes.say(Vote.LOOKS, False)
        is_last = self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self._votes.say(Vote.LAST, is_last)
        self._votes.say(Vote.STOPS, self._signals.received_sigterm)
        self._votes.say(Vote.REQUEUES, self._asked_to_requeue)

    def ask_for_audit(self) -> bool:
        """Have all processes audit the step after the next one; False: nobody would hear it."""
        if self._votes.are_counted:
            self._votes.say(Vote.AUDITS, True)
        return self._votes.are_counted

    def all_stop(self) -> bool:
        """Whether a signal ends the run now: all know of it, or none of them ever will."""
        return not self._votes.are_counted or self._votes.some_say(Vote.STOPS)

    def requeue_if_asked(self) -> None:
        """Between two steps: save the job and have it begin again, if a cluster asked for that."""
        if self._requeues:
            self._requeues = False
            self._save_and_requeue(signal.SIGUSR1, None)

    def _hear(self) -> None:
        begin_wait("")
        votes = self._votes
        if votes.differ:
            self._strategy.fabric.torn = True  # the step was wrong: no checkpoint is to hold it
            assert self._exchange is not None
            batch = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
            refuse_other_epochs(gathered((self._epoch, batch)))
            refuse_other_exchanges(self._exchange, self._numbers)
        if votes.all_say(Vote.LOOKS):
            assert self._exchange is not None
            module, optimizers = self._trainer.lightning_module, self._strategy.optimizers
            refuse_other_states(module, optimizers, self._exchange.own)
        if votes.some_say(Vote.REQUEUES):  # in every step from then on: the first of them counts
            self._requeues = self._requeues is None
        if votes.some_say(Vote.STOPS):
            self._signals.received_sigterm = True
        if votes.some_say(Vote.AUDITS):
            votes.say(Vote.AUDITS, False)
            assert self._strategy.training is not None
            self._strategy.training.audit_all()
        # before the next step, in whose collectives those that go on would wait for ever
        if votes.some_say(Vote.LAST) and not votes.all_say(Vote.LAST):
            progress = self._trainer.fit_loop.epoch_loop.batch_progress
            refuse_other_ends(gathered((progress.current.ready, progress.is_last_batch)))
        if votes.refused and not self._is_one:
            self._is_one = True
            self._be_one()
            if votes.others_say(Vote.REFUSES):
                self._strategy.say(
                    "CSX: another process has no compiled code for its batch (more shapes than are"
                    " compiled, no compiler, or wrong code), so all run operation by operation from"
                    " here on"
                )

    @torch.no_grad()
    def _be_one(self) -> None:
        """Let all go on with the first process's numbers: one ran other code in the last step."""
        optimizers = self._strategy.optimizers
        states = [value for one in optimizers for value in _tensors_of(one.state)]
        for tensor in (*self._trainer.lightning_module.parameters(), *states):
            if not isinstance(tensor, ShardedTensor):  # of which each has another part
                dist.broadcast(tensor.data, 0)

    def _note_signal(self, number: int, frame: object) -> None:
        """SIGTERM: all shall end."""
        if not self._signals.received_sigterm:
            for process in getattr(self._strategy.launcher, "procs", ()):
                # as Lightning's own handler does: the processes that this one started do not get
                # its signal
                os.kill(process.pid, number)
        self._signals.received_sigterm = True

    def _note_requeue(self, number: int, frame: object) -> None:
        """SLURM's signal: all save at one step."""
        if self._votes.are_counted:
            self._asked_to_requeue = True  # and stays so: they do it once
        else:
            self._save_and_requeue(number, frame)


def _tensors_of(state: Mapping[Any, Any]) -> Iterator[Tensor]:
    """The tensors of an optimizer's state, in the order in which they were made."""
    for values in state.values():
        if isinstance(values, Mapping):
            yield from (value for value in values.values() if isinstance(value, Tensor))
