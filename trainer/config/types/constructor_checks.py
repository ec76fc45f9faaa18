"""Checks ranges of values by calling constructors of libraries, and keeping what they raise.

Only constructors that do nothing but keep their arguments are called: those of optimizers and
schedulers, with one parameter of one number; of callbacks; of metrics of numbers. They are imported
here when they are called: a check without imports calls none.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable
from typing import Any

from fulgurite.config.types.report import Call, Later, walk
from fulgurite.config.types.signatures import signature_of
from fulgurite.config.types.sources import LIBRARIES

_QUIET_METRICS = ("classification", "regression", "aggregation", "retrieval")


def constructor_error(call: Call) -> str | None:
    """What a constructor raises, in one line; None if nothing, or if calling it may do more."""
    import lightning.pytorch as pl
    import torch
    from torchmetrics import Metric

    target: Any = call.target
    if not inspect.isclass(target) or target.__module__.partition(".")[0] not in LIBRARIES:
        return None
    if _has_calls(call.arguments):
        return None  # of other classes, and who knows what they do
    parameters = signature_of(target).parameters.values()  # type: ignore[arg-type]
    lacking = {item.name for item in parameters if item.required} - call.arguments.keys()
    # without what asks for param groups of the model
    kwargs = {key: value for key, value in call.arguments.items() if key != "param_group_tags"}
    weight = torch.nn.Parameter(torch.zeros(1))
    module = target.__module__.split(".")
    if issubclass(target, torch.optim.Optimizer) and lacking == {"params"}:
        return _error_of(lambda: target([weight], **kwargs))
    if issubclass(target, torch.optim.lr_scheduler.LRScheduler) and lacking == {"optimizer"}:
        return _error_of(lambda: target(torch.optim.AdamW([weight]), **kwargs))
    of_numbers = issubclass(target, Metric) and module[1:2] and module[1] in _QUIET_METRICS
    if (of_numbers or issubclass(target, pl.Callback)) and not lacking:
        return _error_of(lambda: target(**kwargs))
    return None


def backend_error(target: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    """What CSXBackend raises; the other backends would look for their machine."""
    from fulgurite.backends import CSXBackend
    from fulgurite.backends.backend import current_backend, set_backend

    if target is not CSXBackend:
        return None
    live = current_backend()
    # one that is made claims its type for the process, which a check must not
    set_backend(None)
    try:
        return _error_of(lambda: target(**arguments))
    finally:
        set_backend(live)


TRAINER_CHECKS = frozenset(
    (
        *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "overfit_batches"),
        *("limit_train_batches", "limit_val_batches", "limit_test_batches"),
        *("limit_predict_batches", "val_check_interval", "check_val_every_n_epoch"),
        *("num_sanity_val_steps", "accumulate_grad_batches", "reload_dataloaders_every_n_epochs"),
        *("gradient_clip_val", "gradient_clip_algorithm", "profiler"),
    )
)
"""Arguments of the Trainer that it judges when it is made, without effects on the process."""


def trainer_error(arguments: dict[str, Any]) -> str | None:
    """What Lightning's Trainer raises for those of its arguments that it checks."""
    import lightning.pytorch as pl

    given = {key: value for key, value in arguments.items() if key in TRAINER_CHECKS}
    if not given or _has_calls(given):
        return None
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    # on the CPU, whatever the file says: it may be checked on another machine
    return _error_of(lambda: pl.Trainer(accelerator="cpu", devices=1, **quiet, **given))


def _error_of(make: Callable[[], Any]) -> str | None:
    """What a call raises, in one line; None if it raises nothing."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            make()
    except NotImplementedError:
        return None  # known, and refused when the file is run
    except Exception as error:  # a constructor may raise anything, and would when the file is run
        text = " ".join(str(error).split()) or type(error).__name__
        plain = isinstance(error, ValueError) or type(error).__name__.startswith("Misconfig")
        text = text if plain else f"{type(error).__name__}: {text}"
        return text if text.endswith((".", "!", "?")) else f"{text}."
    finally:
        logging.disable(level)
    return None


def _has_calls(value: Any) -> bool:
    return any(isinstance(one, (Call, Later)) for _, one in walk(value, ()))
