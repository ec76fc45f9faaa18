"""The fit loop: Lightning's, which also refuses loaders that cannot be static."""

from __future__ import annotations

from lightning.pytorch.loops.fit_loop import _FitLoop

from fulgurite.backends.csx.rng import collect_with
from fulgurite.backends.csx.strategy import strategy_of
from fulgurite.loops import position
from fulgurite.loops.shapes import check_last_batch


class FitLoop(_FitLoop):
    """Lightning's ``_FitLoop``."""

    def setup_data(self) -> None:
        """Make the loader and its iterator, and remember the random states it was made from."""
        strategy, fetcher = strategy_of(self.trainer), self._data_fetcher
        states = collect_with([])
        strategy.loader_generators.clear()
        super().setup_data()
        if self._data_fetcher is not fetcher:
            check_last_batch(self._combined_loader, strategy.backend, "training")
            states["generators"] = list(strategy.loader_generators)
            strategy.data_position[position.ITERATOR] = states
