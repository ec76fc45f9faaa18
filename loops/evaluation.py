"""Validation, test and predict: Lightning's loops, which refuse loaders that cannot be static."""

from __future__ import annotations

from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.utilities.seed import isolate_rng

from fulgurite.backends.csx.strategy import strategy_of
from fulgurite.loops.shapes import check_last_batch


class EvaluationLoop(_EvaluationLoop):
    """Lightning's ``_EvaluationLoop``."""

    def setup_data(self) -> None:
        """Make the loaders."""
        super().setup_data()
        backend = strategy_of(self.trainer).backend
        stage = {"validate": "validation"}.get(str(self._stage.value), str(self._stage.value))
        check_last_batch(self._combined_loader, backend, stage, self._max_batches)

    def increment_progress_to_evaluation_end(self) -> None:
        """Skip a validation that was done before a checkpoint; it must not draw again."""
        with isolate_rng(include_cuda=False):
            super().increment_progress_to_evaluation_end()


class PredictionLoop(_PredictionLoop):
    """Lightning's ``_PredictionLoop``."""

    def setup_data(self) -> None:
        """Make the loaders."""
        super().setup_data()
        backend = strategy_of(self.trainer).backend
        check_last_batch(self._combined_loader, backend, "predict", self.max_batches)
