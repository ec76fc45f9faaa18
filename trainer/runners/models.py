"""What a script's model_fn gives, as a LightningModule.

Scripts have had three kinds: an ``nn.Module`` whose forward takes a batch and returns the loss; a
``PyTorchBaseModel``, which holds such modules and is called with a batch; a LightningModule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from fulgurite.config.run.modules import as_lightning

_NOT_CALLED = (
    "_configure_optimizer",
    "_configure_lr_scheduler",
    "configure_optimizer_params",
    "set_state",
    "get_state",
)


class PyTorchBaseModel:
    """The base class of models in older scripts: modules, and what to do with a batch.

    A subclass makes ``self.model``, hands it on, and defines ``__call__(data)``, which returns the
    loss, or a tuple that begins with it, or a dict with it. ``_post_device_transfer`` is called
    once, as before (to tie weights, say); ``get_optimizer`` and ``get_lr_scheduler``, where they
    are defined, make the optimizer in the place of the parameters.

    Args:
        params: the parameters.
        model: a module, or a function of the parameters that makes one.
        device: not used: the run moves the model.

    Raises:
        TypeError: a subclass overrides a method that is not called here.
    """

    def __init_subclass__(cls) -> None:
        for name in _NOT_CALLED:
            if hasattr(cls, name):
                raise TypeError(
                    f"{cls.__name__}.{name} would not be called here. Define get_optimizer(self),"
                    " and get_lr_scheduler(self), which return what you make."
                )

    def __init__(self, params: dict[str, Any], model: Any, device: Any = None) -> None:
        self.model: nn.Module = model if isinstance(model, nn.Module) else model(params)
        self.device = device
        self.mode = (params.get("runconfig") or {}).get("mode")
        self._post_device_transfer()

    def _post_device_transfer(self) -> None:
        """What to do once the model is made; by default the model's own method of this name."""
        after = getattr(self.model, "_post_device_transfer", None)
        if after is not None:
            after()

    def __call__(self, data: Any) -> Any:
        """The loss of a batch; by default what the model returns."""
        return self.model(data)


class _Held(nn.Module):
    """The modules that a model of an older script holds, called as that model is."""

    _called: Callable[[Any], Any]

    def __init__(self, model: Any) -> None:
        super().__init__()
        for name, value in vars(model).items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
        vars(self)["_called"] = model

    def forward(self, data: Any) -> Any:
        return self._called(data)


def module_of(model_fn: Callable[..., Any], params: dict[str, Any], device: str) -> Any:
    """Call a model_fn with the parameters, and with the device if it asks for one.

    Args:
        model_fn: a function or class of (params) or (params, device).
        params: given to it.
        device: CSX, CPU or GPU.
    """
    place = torch.device("cuda" if device == "GPU" else "cpu")
    return model_fn(params, place) if _wants_device(model_fn) else model_fn(params)


def _wants_device(model_fn: Callable[..., Any]) -> bool:
    required = [
        parameter
        for parameter in inspect.signature(model_fn).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    if len(required) > 2:
        raise TypeError(
            f"model_fn is called with (params) or (params, device); {model_fn.__name__} asks for"
            f" {', '.join(parameter.name for parameter in required)}."
        )
    return len(required) == 2


def lightning_module(model: Any) -> pl.LightningModule:
    """What a model_fn gave as a LightningModule; its own optimizer, if it makes one, with it.

    Raises:
        TypeError: it is none of the three kinds.
    """
    if isinstance(model, pl.LightningModule):
        return model
    if isinstance(model, nn.Module):
        after = getattr(model, "_post_device_transfer", None)
        if after is not None:
            after()
        module = as_lightning(model)
    elif callable(model) and isinstance(getattr(model, "model", None), nn.Module):
        module = as_lightning(_Held(model))
    else:
        raise TypeError(
            f"model_fn returned {type(model).__name__}; expected a torch.nn.Module whose"
            " forward(data) returns the loss, a LightningModule, or an object with a module as"
            " .model that is called with a batch."
        )
    if hasattr(model, "get_optimizer"):
        module.configure_optimizers = partial(_own_optimizer, model)  # type: ignore[method-assign]
    return module


def _own_optimizer(model: Any) -> Any:
    """The optimizer and scheduler that a model makes."""
    optimizer = model.get_optimizer()
    schedule = getattr(model, "get_lr_scheduler", lambda: None)()
    if schedule is None:
        return optimizer
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]
