"""Callbacks that log what goes into a step, what it computes with, and what validation found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.utils._pytree as pytree
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from fulgurite.backends.patches import patched
from fulgurite.callbacks.sparse import (
    SparseCallback,
    Undoing,
    is_log_step,
    is_static,
    log_steps,
    log_values,
    logs_in_step,
)

_LAYER = re.compile(r".*\blayers\.(\d+)\.")


class ComputeNorm(pl.Callback):
    """Logs the 2-norms of parameters and gradients, computed inside the step.

    Logged: ``model_wise_params_norm`` (parameters that require grad, before the update),
    ``model_wise_grad_norm`` (gradients before they are clipped, whole windows of accumulation,
    unscaled), and ``per_layer_grad_norm/layer_<n>`` of all parameters with ``layers.<n>.`` in their
    names. With several optimizers, each has its own, of its parameters: ``/optimizer_<i>`` follows
    the name. Norms are float32 whatever the parameters are. Off CSX only log steps compute them.
    """

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Compute and log."""
        if not logs_in_step(trainer):
            return
        optimizers = trainer.optimizers
        parameters = dict(pl_module.named_parameters())
        suffix = ""
        if len(optimizers) > 1:
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            parameters = {name: p for name, p in parameters.items() if id(p) in mine}
            index = next(i for i, one in enumerate(optimizers) if _is(one, optimizer))
            suffix = f"/optimizer_{index}"
        for name, norm in norms(parameters).items():
            pl_module.log(f"{name}{suffix}", norm)


def _is(one: Optimizer, other: Optimizer) -> bool:
    """Whether two objects are one optimizer; manual optimization sees Lightning's wrappers."""
    return getattr(one, "optimizer", one) is getattr(other, "optimizer", other)


@torch.no_grad()
def norms(parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """Every norm that is logged, by name, [] each."""
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    layers: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        match = _LAYER.match(name)
        if match:
            layers.setdefault(match.group(1), []).append(gradient)
    trained = [p for p in parameters.values() if p.requires_grad]
    found = {
        "model_wise_params_norm": total_norm(trained),
        "model_wise_grad_norm": total_norm(gradients.values()),
    }
    for layer, of_layer in layers.items():
        found[f"per_layer_grad_norm/layer_{layer}"] = total_norm(of_layer)
    return found


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all elements together, float32 []."""
    each = [torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors]
    return torch.linalg.vector_norm(torch.stack(each)) if each else torch.zeros(())


class LogOptimizerParamGroup(SparseCallback):
    """Logs numbers of the optimizer's param groups as the step uses them.

    Logged on log steps: ``<key>/<group>``, such as ``lr/0``. With several optimizers groups count
    on from one to the next. Of a tuple (``betas``) each number is logged, as ``betas/0/1``. Under
    manual optimization: the numbers as they are when the step begins.

    Args:
        keys: one key of the param groups, or several.
    """

    def __init__(self, keys: str | Iterable[str]) -> None:
        given = [keys] if isinstance(keys, str) else keys
        wanted = list(given) if isinstance(given, Iterable) else []
        if not wanted or not all(isinstance(key, str) and key for key in wanted):
            raise ValueError(
                "LogOptimizerParamGroup: keys is a key of the optimizer's param groups or a list of"
                f" keys; got {keys!r}. For instance keys='lr', or keys=['lr', 'weight_decay']."
            )
        self.keys = wanted

    def every_n_steps(self, trainer: pl.Trainer) -> int:
        """Numbers are looked at on log steps."""
        return log_steps(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that an optimizer has these keys.

        Raises:
            ValueError: none of them has one.
        """
        groups = [group for o in trainer.optimizers for group in o.param_groups]
        known = sorted({key for group in groups for key in group} - {"params"})
        for key in self.keys:
            if groups and key not in known:
                raise ValueError(
                    f"LogOptimizerParamGroup: no param group has {key!r}. The optimizers have"
                    f" {', '.join(known)}."
                )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Log on CSX: the host shows the numbers that the step is about to use."""
        if is_static(trainer) and is_log_step(trainer):
            log_values(trainer, self._numbers(trainer))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Log eager steps here: ``optimizer_step`` of the module may have set numbers."""
        if not is_static(trainer) and is_log_step(trainer):
            log_values(trainer, self._numbers(trainer))

    def _numbers(self, trainer: pl.Trainer) -> dict[str, float]:
        found: dict[str, float] = {}
        groups = [group for o in trainer.optimizers for group in o.param_groups]
        for i, group in enumerate(groups):
            for key in self.keys:
                value = group.get(key)
                if isinstance(value, (tuple, list)):
                    found |= {f"{key}/{i}/{k}": float(one) for k, one in enumerate(value)}
                elif value is not None:
                    found[f"{key}/{i}"] = float(value)
        return found


class LogInputSummaries(Undoing):
    """Logs mean, standard deviation, minimum and maximum of each floating tensor of a batch.

    They are computed inside the training step. Logged: ``input.<where>/mean``, ``/std``, ``/min``
    and ``/max``; ``<where>`` is the place in the batch: ``0`` of a tuple, ``image`` of a dict, and
    of nested ones ``views.0``. The standard deviation divides by the number of elements.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Wrap the training step: no hook inside a step is given the batch."""
        if stage != "fit":
            return
        step = trainer.strategy.training_step

        def training_step(batch: Any, *rest: Any) -> Any:
            if logs_in_step(trainer):
                pl_module.log_dict(summaries(batch))
            return step(batch, *rest)

        self.undo.enter_context(patched([(trainer.strategy, "training_step", training_step)]))


@torch.no_grad()
def summaries(batch: Any) -> dict[str, Tensor]:
    """The values that are logged of a batch, by name, float32 [] each."""
    found: dict[str, Tensor] = {}
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
            continue
        name = ".".join(["input", *(_place(key) for key in path)])
        values = leaf.detach().float()
        std, mean = torch.std_mean(values, correction=0)
        found |= {f"{name}/mean": mean, f"{name}/std": std}
        found |= {f"{name}/min": values.min(), f"{name}/max": values.max()}
    return found


def _place(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


_OWN = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
)


class ModelEvalMetrics(pl.Callback):
    """Logs the torchmetrics of a model that only updates them, at the end of validation.

    Every Metric among the submodules that no ``self.log`` took begins anew with validation, and is
    computed and logged at its end, under its name in the module, if validation updated it; then it
    goes on with what it had before. One of several values (a MetricCollection, values per class) is
    logged as ``<name>/<part>``. A module that overrides a hook around validation
    (``on_validation_epoch_end`` and its kin) looks after its metrics itself: nothing happens then.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Metric, dict[str, Any]]] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the values that metrics hold, and reset them."""
        if not _looks_after_itself(pl_module):
            for _, metric in _unlogged(trainer, pl_module):
                # metrics that training updates as well go on with their epoch after the validation
                self._before += [(part, _held(part)) for part in _parts(metric)]
                metric.reset()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the metrics that validation updated."""
        if not _looks_after_itself(pl_module):
            for name, metric in _unlogged(trainer, pl_module):
                if any(part.update_called for part in _parts(metric)):
                    pl_module.log_dict(dict(_values(name, metric.compute())))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give metrics the values back that they held before validation."""
        for metric, held in self._before:
            metric.reset()
            vars(metric).update(held)
        self._before.clear()


def _looks_after_itself(module: pl.LightningModule) -> bool:
    return any(is_overridden(hook, module) for hook in _OWN)


def _parts(metric: Metric | MetricCollection) -> list[Metric]:
    if isinstance(metric, MetricCollection):
        return list(metric.values(copy_state=False))
    return [metric]


def _held(metric: Metric) -> dict[str, Any]:
    names = ["_update_count", "_computed", *metric._defaults]
    return {name: vars(metric)[name] for name in names}


def _unlogged(
    trainer: pl.Trainer, module: pl.LightningModule
) -> Iterator[tuple[str, Metric | MetricCollection]]:
    """The outermost metrics that no result of Lightning's holds, with their names."""
    loops = (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop)
    logged = {
        id(result.value)
        for loop in (*loops, trainer.validate_loop)
        for result in loop._results.values()
        if not result.is_tensor
    }

    def found(inside: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, child in inside.named_children():
            if not isinstance(child, (Metric, MetricCollection)):
                yield from found(child, f"{prefix}{name}.")
            elif logged.isdisjoint(map(id, [child, *_parts(child)])):
                yield f"{prefix}{name}", child

    return found(module, "")


def _values(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _values(f"{name}/{key}", one)
    elif isinstance(value, Tensor) and value.ndim:
        for i, one in enumerate(value.flatten()):
            yield f"{name}/{i}", one.float()
    elif isinstance(value, Tensor):
        yield name, value.float()
