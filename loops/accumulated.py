"""What an epoch has accumulated when a checkpoint is written in its middle, and how it comes back.

Lightning's checkpoints hold none of it, so its means and metrics of an epoch that was gone on with
are those of its rest. Kept here: the results of ``self.log`` (sums, counts, the last step's value),
the values that callbacks and loggers see, the states of metrics, and tensors that the step writes
and that are no part of ``state_dict()`` (the strategy knows them).
Everything is in tensors and plain Python values, for checkpoints load with ``weights_only=True``.

Private parts of Lightning and torchmetrics are those of Lightning 2.6.6 and torchmetrics 1.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from torch import Tensor, nn
from torchmetrics import Metric

from fulgurite.backends.csx import strategy_of

_DICTS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph")
_OF_LOADERS = ("add_dataloader_idx", "dataloader_idx", "metric_attribute")
_STATE = ("_update_count", "has_reset", "_forward_cache")
_SUMS = ("value", "cumulated_batch_size")


def collect(trainer: Any) -> dict[str, Any]:
    """What has been accumulated up to now.

    Args:
        trainer: a ``pl.Trainer``, whose attributes have no types.
    """
    module, epoch_loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    if not trainer.validating:
        # in a validation the dicts have its values by now: the training's last step was copied
        # before it
        epoch_loop.store_metrics()
    connector = trainer._logger_connector
    # a validation is done anew from its first batch, and so are its metrics
    of_validation = {id(one.value) for one in epoch_loop.val_loop._results.values()}
    return {
        "results": {key: _of_result(one) for key, one in epoch_loop._results.items()},
        "shown": {name: _copied(dict(getattr(connector, name))) for name in _DICTS},
        "flags": {
            "_first_loop_iter": epoch_loop.val_loop.first_loop_iter
            if trainer.validating
            else connector._first_loop_iter,
            "_current_fx": None if trainer.validating else connector._current_fx,
        },
        "metrics": {
            path: _of_metric(metric)
            for path, metric in _metrics(module)
            if not (trainer.validating and id(metric) in of_validation)
        },
        "written": strategy_of(trainer).written_tensors(without=_states(module)),
    }


def restore(trainer: Any, states: dict[str, Any]) -> None:
    """Put back what ``collect`` returned."""
    module = trainer.lightning_module
    for path, metric in _metrics(module):
        if path in states["metrics"]:
            _put_metric(metric, states["metrics"][path])
    strategy_of(trainer).restore_written(states["written"])
    results, connector = trainer.fit_loop.epoch_loop._results, trainer._logger_connector
    for key, state in states["results"].items():
        result = _result(trainer, state, dict(_metrics(module)))
        if result is not None:
            results[key] = result
    for name, values in states["shown"].items():
        setattr(connector, name, dict(values))
    for name, value in states["flags"].items():
        setattr(connector, name, value)


def _copied(value: Any) -> Any:
    """Tensors as they are now, in a list, a dict or alone."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _metrics(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    for path, one in module.named_modules():
        if isinstance(one, Metric):
            yield path, one


def _states(module: nn.Module) -> list[str]:
    """The names of all states of metrics."""
    return [f"{path}.{name}" for path, metric in _metrics(module) for name in metric._defaults]


def _of_metric(metric: Metric) -> dict[str, Any]:
    values = {name: _copied(getattr(metric, name)) for name in metric._defaults}
    return {"values": values, "updates": metric._update_count}


def _put_metric(metric: Metric, state: dict[str, Any]) -> None:
    values = state["values"]
    if values.keys() == metric._defaults.keys():
        for name, value in values.items():
            setattr(metric, name, value)
        metric._update_count, metric._computed = state["updates"], None


def _of_result(result: _ResultMetric) -> dict[str, Any]:
    meta = result.meta
    return {
        "meta": {name: getattr(meta, name) for name in (*_META, *_OF_LOADERS)},
        "reduce": meta.reduce_fx.__name__,
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": result.is_tensor,
        "state": {name: _copied(getattr(result, name)) for name in _STATE},
        "sums": {
            name: _copied(getattr(result, name))
            for name in _SUMS
            if result.is_tensor and hasattr(result, name)
        },
    }


def _result(
    trainer: Any, state: dict[str, Any], metrics: dict[str, Metric]
) -> _ResultMetric | None:
    """The result of a name that was logged; None where its metric is no attribute of the module."""
    meta = _Metadata(**state["meta"], reduce_fx=state["reduce"])
    meta.sync = _Sync(fn=trainer.strategy.reduce, **state["sync"])
    result = _ResultMetric(meta, state["is_tensor"])
    for name, value in {**state["state"], **state["sums"]}.items():
        setattr(result, name, value)
    if not result.is_tensor:
        if meta.metric_attribute not in metrics:
            return None
        result.value = metrics[meta.metric_attribute]
    return result
