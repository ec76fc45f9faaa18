"""The versions that decide what runs, as ``--version`` and ``doctor`` tell them."""

from __future__ import annotations

import importlib.metadata
import platform

import fulgurite

PACKAGES = ("torch", "lightning", "torchmetrics")


def installed_versions() -> str:
    """Versions of Fulgurite, Python and the packages that count; imports none of them."""
    packages = [f"{name} {_installed(name)}" for name in PACKAGES]
    python = f"python {platform.python_version()}"
    return ", ".join([f"fulgurite {fulgurite.__version__}", python, *packages])


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
