"""What the loops and callbacks ask of a run's strategy, so that they need to know nothing else.

The mixin is a part of ``StaticGraph``: it puts together what the rooms below it know of a run.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
import torch.utils._pytree as pytree
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn

from fulgurite.backends.backend import note_built
from fulgurite.backends.csx.compile.fabric import Fabric
from fulgurite.backends.csx.config import CSXBackend
from fulgurite.backends.csx.contract import frozen_hook_arguments, frozen_index
from fulgurite.backends.csx.costs.stock import Stage, Used, estimate, unit_s
from fulgurite.backends.csx.graph.passes.hold import GUARD
from fulgurite.backends.csx.objects import Trees, holders_in
from fulgurite.backends.csx.plugins.checkpoint_position import Progress, position_of
from fulgurite.backends.csx.plugins.evaluation_steps import EvaluationSteps
from fulgurite.backends.csx.plugins.loader_sizes import check_last_batch, check_sizes
from fulgurite.backends.csx.plugins.unsupported import refuse_watched
from fulgurite.backends.csx.program import announcements
from fulgurite.backends.csx.program.audit import Budget
from fulgurite.backends.csx.program.description import Program
from fulgurite.backends.csx.program.first_bad import in_words
from fulgurite.backends.csx.program.fit_table import FitSummary, summarize
from fulgurite.backends.csx.program.step_function import StepFunction
from fulgurite.backends.csx.state import Place, brief, module_places
from fulgurite.backends.csx.streaming.residency import residency

_SELF = "self."  # begins the name of each place of the module


class LoopServices(Strategy):
    """The part of a strategy that loops and callbacks ask."""

    backend: CSXBackend
    fabric: Fabric
    training: StepFunction | None
    progress: Progress | None
    data_position: dict[str, Any]
    audit_budget: Budget
    fit_summary: FitSummary | None = None  # of the latest fit
    _evaluation: EvaluationSteps
    _used: Used  # of the processor, since the run began
    _unit_s: float  # of Python, when it did
    _before: dict[
        str, tuple[int, float]
    ]  # batches of each stage, and seconds in its steps, by then

    @property
    def step_functions(self) -> dict[str, StepFunction]:
        """The step of each stage that has run, by name."""
        found = {} if self.training is None else {"training": self.training}
        return found | {step.stage: step for step in self._evaluation.steps.values()}

    @property
    def programs(self) -> list[Program]:
        """Every program built so far."""
        return [program for step in self.step_functions.values() for program in step.programs]

    @property
    def only_builds(self) -> bool:
        """Whether the run builds its programs, and does nothing else."""
        return self.backend.only_builds

    # -- around a run --------------------------------------------------------------------------

    def begin_run(self) -> None:
        """A loop begins; a tuner lets one run many times, with batches of other sizes."""
        for step in self.step_functions.values():
            step.begin_run()

    def begin_measuring(self) -> None:
        """A run begins, with its sanity check: what it takes counts from here."""
        self.audit_budget.begin()
        fits = self._trainer.state.fn == TrainerFn.FITTING
        self._unit_s = unit_s() if fits else math.inf
        self._used, steps = Used(), self.step_functions.items()
        self._before = {name: (step.runs, step.speed.in_steps_s) for name, step in steps}

    def say(self, lines: str) -> None:
        """Print lines above the progress bar, or, where there is none, to the log."""
        announcements.say(self._trainer, lines)

    def say_built(self) -> None:
        """Say, as the last line of a run that only builds, that this was all."""
        self.say(announcements.closing(self.backend, self.programs))
        note_built()

    def say_fit(self, steps: int, data_s: float) -> None:
        """Say what a fit took, and add it to the report.

        Args:
            steps: how many it has done.
            data_s: how long it waited for batches, and for the loaders' iterators.
        """
        training, began = self.training, self.audit_budget.began
        assert training is not None
        trained = [one.cost for one in training.programs if one.cost]
        total_s, busy = perf_counter() - began, self._used.is_busy
        stages = {
            name: _stage(step, *self._before.get(name, (0, 0.0)))
            for name, step in self.step_functions.items()
        }
        self.fit_summary = summarize(
            batches=training.runs,
            steps=steps,
            total_s=total_s,
            data_s=data_s,
            speed=training.speed,
            # not those of an earlier fit of this Trainer, or of a validation before it
            costs=[one.cost for one in self.programs if one.cost and one.cost.began >= began],
            training=trained,
            why_not=training.why_not_compiled(),
            stock=None if busy else estimate(self._trainer, stages, total_s, self._unit_s),
            was_busy=busy,
            shapes=training.uncompiled(),
            streamed=replace(residency.traffic) if residency.is_open else None,
        )
        announcements.say_fit(self._trainer, self.fit_summary)
        of_training = training.stage, training.speed, self.fit_summary
        announcements.add_measured(self._trainer, self.backend, *of_training)

    # -- around a step -------------------------------------------------------------------------

    def refuse_watched(self) -> None:
        """Refuse hooks that somebody has put on the module since the run began."""
        refuse_watched(self._module)

    def traced_arguments(self, kwargs: dict[str, Any]) -> OrderedDict[str, Any]:
        """The arguments of ``training_step`` for a trace, which follows ``batch_idx``."""
        arguments = OrderedDict(kwargs)
        if "batch_idx" in arguments:
            arguments["batch_idx"] = frozen_index(arguments["batch_idx"])
        return arguments

    def traced_hooks(self) -> contextlib.AbstractContextManager[None]:
        """Let ``optimizer_step`` and ``optimizer_zero_grad`` get arguments that warn when read."""
        return frozen_hook_arguments(self._module)

    def what_is_not_finite(self, batch: Any) -> str | None:
        """The first tensor of a batch that is not finite, in words; None where all of it is."""
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
            words = isinstance(leaf, Tensor) and in_words(f"batch{pytree.keystr(path)}", leaf)
            if words:
                return words
        return None

    # -- loaders, and the place in the data ----------------------------------------------------

    def check_loaders(
        self, stage: str, loaders: CombinedLoader | None, limits: Sequence[float] | None = None
    ) -> None:
        """Refuse loaders whose batches have more sizes than there may be programs.

        Args:
            stage: for the message; batches of "training" may be looked at.
            loaders: all of the stage.
            limits: batches taken from each; None: those the loader itself knows.

        Raises:
            InputChanged: with the sizes, and the remedies.
        """
        check_last_batch(loaders, self.backend, stage, limits)
        # elsewhere batches beyond the limit are no error, and are told of when they come
        is_error = not isinstance(self.backend.max_programs, str) and self.fabric.waits
        if stage == "training" and (is_error or self.only_builds):
            check_sizes(loaders, self.backend, self._module, stage)

    def position(self) -> dict[str, Any]:
        """Random states, data position, and what the loops add, as a checkpoint has them."""
        return position_of(self._trainer, self.data_position, self.progress)

    # -- tensors that steps write, and that are no part of ``state_dict()`` --------------------

    def written_tensors(self, without: Collection[str]) -> dict[str, Tensor]:
        """Copies of the tensors that steps write and that no ``state_dict()`` holds, by name.

        Plain attributes, what is in lists, tuples, deques, dicts and objects of the module, and
        buffers with ``persistent=False``.

        Args:
            without: names of those that somebody else keeps.
        """
        module = self._module
        executables = [one for step in self.step_functions.values() for one in step.executables()]
        written = {place for one in executables for place in one.written_places}
        # CheckLoss sets its guard anew
        kept = {GUARD, *without, *module.state_dict(keep_vars=True)}
        named = {place.name.removeprefix(_SELF): place for place in written}
        own = {name: place.get() for name, place in named.items() if name not in kept}
        names = _places(module) if own else ()
        values = {name: own[name] for name in names if isinstance(own.get(name), Tensor)}
        return {name: value.detach().clone() for name, value in values.items()}

    def restore_written(self, written: dict[str, Tensor]) -> None:
        """Put back what ``written_tensors`` returned."""
        places = _places(self._module) if written else {}
        given: dict[int, Tensor] = {}  # what tensors of the module got, by their identity
        for name, value in written.items():
            tensor = places[name].get() if name in places else None
            if isinstance(tensor, Tensor) and tensor.shape == value.shape:
                shared = given.setdefault(id(tensor), value)
                if shared is not value and not torch.equal(shared, value):
                    tensor = tensor.detach().clone()  # by places that have different values by now
                    places[name].put(tensor)
                with torch.no_grad():
                    tensor.copy_(value)
            else:
                warnings.warn(
                    f"The run does not go on exactly: {_SELF}{name}, which steps write, was"
                    f" {brief(value)} in the checkpoint, and the module begins with {brief(tensor)}"
                    " there. Give it in __init__ the shape that it keeps.",
                    stacklevel=2,
                )

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> pl.Trainer:
        return self._module.trainer


def _stage(step: StepFunction, batches: int, in_steps_s: float) -> Stage:
    """What an estimate of stock Lightning needs, of what came after so many batches and seconds."""
    entries = [one.counts() for one in step.executables()]
    return Stage(entries, step.runs - batches, step.speed.in_steps_s - in_steps_s)


def _places(module: nn.Module) -> dict[str, Place]:
    """Where a module may hold tensors that a step writes, by their names without ``self``."""
    root = _SELF.rstrip(".")
    registered = {*map(id, module.modules()), *map(id, module.parameters())}
    inside = Trees(holders_in(module, root), registered).places
    found = [*module_places(module, root), *inside]
    return {place.name.removeprefix(_SELF): place for place in found}
