"""``Trainer(precision=...)``: what becomes of it on each device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.fabric import connector
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision

from fulgurite.backends import Backend, CSXBackend
from fulgurite.backends.backend import gpu_device
from fulgurite.backends.csx.plugins.loss_scale import LossScale
from fulgurite.backends.csx.plugins.precision_plugins import CSXMixedPrecision
from fulgurite.backends.mixed import BoundedGradScaler, EagerMixedPrecision
from fulgurite.mixed_precision import CB16_MIXED, MixedPrecision


def precision_arguments(backend: Backend, arguments: dict[str, Any]) -> dict[str, Any]:
    """Lightning's arguments for what its connector does not know, or replaces.

    On a CPU the connector turns "16-mixed" into "bf16-mixed", and CSX looks like one to it.

    Args:
        backend: where the Trainer runs.
        arguments: the Trainer's.

    Returns:
        Those of the arguments that change: ``precision``, ``plugins``, ``gradient_clip_*``.

    Raises:
        ValueError: an argument is given twice.
        MisconfigurationException: "cbfloat16" on another device than CSX.
    """
    precision, changed = arguments["precision"], dict[str, Any]()
    if precision == CB16_MIXED:
        precision = MixedPrecision(fp16_type="cbfloat16", loss_scaling_factor="dynamic")
    if isinstance(precision, MixedPrecision):
        changed = _clipping(precision, arguments)
        plugin = _plugin(backend, precision) if precision.enabled else None
        name = None if precision.enabled else "32-true"
    else:
        name = known_name(precision)
        takes_over = isinstance(backend, CSXBackend) and name == "16-mixed"
        plugin = CSXMixedPrecision("float16", LossScale()) if takes_over else None
    if plugin is None:
        return {**changed, "precision": name}
    # Lightning takes a precision or a plugin for it, not both
    return {**changed, "precision": None, "plugins": _with_plugin(plugin, arguments)}


def known_name(precision: Any) -> Any:
    """Lightning's name of a precision; its error lists only those that are Lightning's.

    Raises:
        ValueError: there is no such precision.
    """
    try:
        return connector._convert_precision_to_unified_args(precision)
    except (ValueError, TypeError) as error:
        error.add_note(f"On CSX also {CB16_MIXED!r}; or give fulgurite.MixedPrecision(...).")
        raise


def _with_plugin(plugin: Precision, arguments: dict[str, Any]) -> list[Any]:
    plugins = arguments["plugins"]
    others = list(plugins) if isinstance(plugins, Iterable) else [plugins] * (plugins is not None)
    for other in others:
        if isinstance(other, Precision):
            raise ValueError(  # Lightning's text
                f"Received both `precision={arguments['precision']}` and `plugins={other}`. Choose"
                " one."
            )
    return [plugin, *others]


def _plugin(backend: Backend, mixed: MixedPrecision) -> Precision:
    logs_scale = bool(mixed.log_loss_scale)
    options: dict[str, Any] = {
        "dynamic": mixed.dynamic,
        "growth_interval": mixed.steps_per_increase,
        "minimum": mixed.least_scale,
        "maximum": mixed.largest_scale,
    }
    if isinstance(backend, CSXBackend):
        scale = LossScale(mixed.first_scale, **options) if mixed.scales else None
        return CSXMixedPrecision(mixed.fp16_type, scale, logs_scale)
    if mixed.fp16_type == "cbfloat16":
        raise MisconfigurationException(
            f"cbfloat16 is a type of backend CSX; {backend.backend_type} does not have it. Use"
            " device='CSX', or precision='bf16-mixed'."
        )
    device = gpu_device().type if backend.backend_type == "GPU" else "cpu"
    scaler = BoundedGradScaler(device, mixed.first_scale, **options) if mixed.scales else None
    return EagerMixedPrecision(mixed.fp16_type, device, scaler, logs_scale)


def _clipping(mixed: MixedPrecision, arguments: dict[str, Any]) -> dict[str, Any]:
    """What ``max_gradient_norm`` and ``max_gradient_value`` are among the Trainer's arguments."""
    limits = {"norm": mixed.max_gradient_norm, "value": mixed.max_gradient_value}
    for algorithm, limit in limits.items():
        if limit is None:
            continue
        for name in ("gradient_clip_val", "gradient_clip_algorithm"):
            if arguments[name] is not None:
                raise ValueError(
                    f"{name}={arguments[name]!r} and MixedPrecision(max_gradient_{algorithm}="
                    f"{limit}) say twice how gradients are clipped. Give one."
                )
        return {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
    return {}
