"""The steps of validation, test and predict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from fulgurite.backends.csx.contract import frozen_index
from fulgurite.backends.csx.graph.graph import Graph
from fulgurite.backends.csx.program.description import STEP
from fulgurite.backends.csx.program.step_function import StepFunction


class EvaluationSteps:
    """A step for each stage and each of its loaders, whose batches may have other shapes.

    Args:
        make: makes the step of a stage; takes the name that messages have for it.

    Attributes:
        steps: those made so far, by stage and number of the loader.
    """

    def __init__(self, make: Callable[[str], StepFunction]) -> None:
        self._make = make
        self._trainer: pl.Trainer | None = None
        self._module: pl.LightningModule | None = None
        self.steps: dict[tuple[str, int | None], StepFunction] = {}
        self._to_check = set[StepFunction]()  # before they run

    def __getstate__(self) -> dict[str, Any]:
        """A copied or pickled Trainer has no steps yet."""
        return {**vars(self), "steps": {}, "_to_check": set()}

    def begin(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin a run; steps of another module are forgotten."""
        if module is not self._module:
            self.steps.clear()
        self._trainer, self._module = trainer, module

    def run(self, stage: str, run: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """Run the program of a stage on a batch.

        Args:
            stage: "validation", "test" or "predict".
            run: Lightning's own code, to be traced.
            batch: the batch.
            rest: numbers of the batch and of its loader, where the module's step takes them.
        """
        assert self._trainer is not None
        results = self._trainer._results
        known = results.dataloader_idx if results is not None else None
        # a step without dataloader_idx has several loaders too: then Lightning's results know which
        loader = rest[1] if len(rest) > 1 else known
        step = self.steps.get((stage, loader))
        if step is None:
            step = self._make(stage if loader is None else f"{stage} {loader}")
            self.steps[stage, loader] = step

        if step in self._to_check:
            self._to_check.discard(step)
            step.check_state()

        def trace(batch: Any) -> Any:
            index = [frozen_index(index, stage) for index in rest[:1]]
            return run(batch, *index, *rest[1:])

        return step(batch, lambda: {STEP: trace}, batch_idx=rest[0] if rest else None)

    def traced(self, stage: str, loader: int) -> list[Graph]:
        """What has been traced of a loader's step."""
        step = self.steps.get((stage, loader), self.steps.get((stage, None)))
        return [] if step is None else [one.graph for one in step.executables()]

    def begin_loop(self) -> None:
        """A loop begins: when it runs a step, see that the model is still the one that was traced.

        Not before: hooks may put other weights in, an average's, and the next one takes them out.
        """
        self._to_check = set(self.steps.values())
