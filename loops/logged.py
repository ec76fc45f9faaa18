"""What an epoch has accumulated when a checkpoint is written in its middle, and how it comes back.

Lightning's checkpoints hold none of it, so its means and metrics of an epoch that was gone on with
are those of its rest. Kept here: the results of ``self.log`` (sums, counts, the last step's value),
the values that callbacks and loggers see, the states of metrics, and tensors that the step writes
and that are no part of ``state_dict()``: plain attributes, what is in lists, tuples, deques,
dicts and objects of the module, and buffers with ``persistent=False``.
Everything is in tensors and plain Python values, for checkpoints load with ``weights_only=True``.

Private parts of Lightning and torchmetrics are those of Lightning 2.6.6 and torchmetrics 1.8.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from torch import Tensor, nn
from torchmetrics import Metric

from fulgurite.backends.csx.capture import Trees, holders_in
from fulgurite.backends.csx.graph.passes.hold import GUARD
from fulgurite.backends.csx.plugins.strategy import strategy_of
from fulgurite.backends.csx.state import Place, brief, module_places

_DICTS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph")
_OF_LOADERS = ("add_dataloader_idx", "dataloader_idx", "metric_attribute")
_STATE = ("_update_count", "has_reset", "_forward_cache")
_SUMS = ("value", "cumulated_batch_size")
_SELF = "self."  # begins the name of each place of the module


def collect(trainer: Any) -> dict[str, Any]:
    """What has been accumulated up to now.

    Args:
        trainer: a ``pl.Trainer``, whose attributes have no types.
    """
    module, epoch_loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    if not trainer.validating:
        epoch_loop.store_metrics()
    connector = trainer._logger_connector
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
        "written": _written(trainer),
    }


def restore(trainer: Any, states: dict[str, Any]) -> None:
    """Put back what ``collect`` returned."""
    module = trainer.lightning_module
    for path, metric in _metrics(module):
        if path in states["metrics"]:
            _put_metric(metric, states["metrics"][path])
    _put_written(module, states["written"])
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


def _written(trainer: Any) -> dict[str, Tensor]:
    """Tensors that steps write and that nothing else in the checkpoint holds, by name."""
    module, steps = trainer.lightning_module, strategy_of(trainer).step_functions
    executables = [one for step in steps.values() for one in step.executables()]
    written = {place for one in executables for place in one.written_places}
    kept = {GUARD, *module.state_dict(keep_vars=True)}  # CheckLoss sets its guard anew
    kept |= {f"{path}.{name}" for path, metric in _metrics(module) for name in metric._defaults}
    named = {place.name.removeprefix(_SELF): place for place in written}
    own = {name: place.get() for name, place in named.items() if name not in kept}
    places = _places(module) if own else {}
    return {name: _copied(own[name]) for name in places if isinstance(own.get(name), Tensor)}


def _put_written(module: nn.Module, written: dict[str, Tensor]) -> None:
    places = _places(module) if written else {}
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


def _places(module: nn.Module) -> dict[str, Place]:
    """Where a module may hold tensors that a step writes, by their names without ``self``."""
    root = _SELF.rstrip(".")
    registered = {*map(id, module.modules()), *map(id, module.parameters())}
    inside = Trees(holders_in(module, root), registered).places
    found = [*module_places(module, root), *inside]
    return {place.name.removeprefix(_SELF): place for place in found}
