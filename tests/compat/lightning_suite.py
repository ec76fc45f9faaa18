"""A pytest plugin: Lightning's own tests, with this project's Trainer in place of its own.

    export FULGURITE_DEVICE=CSX FULGURITE_POLICY=disabled
    python -m pytest -p lightning_suite tests_pytorch/loops

``tests/compat/run.py`` runs it, and says which tests are waived. A test that asks for what no
device of this project has (several processes, other accelerators) is skipped, and says so.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.argparse import _parse_env_variables

import fulgurite
from fulgurite.backends import reset_backend

DEVICE = os.environ.get("FULGURITE_DEVICE", "CPU")
POLICY = os.environ.get("FULGURITE_POLICY")  # disabled: operation by operation
_HERE = {"accelerator": ("auto", "cpu"), "devices": ("auto", 1, "1", [0]), "num_nodes": (1,)}
_STRATEGIES = ("auto", None)


class Trainer(fulgurite.Trainer):
    """The Trainer as Lightning's tests call it: by accelerator and number of devices."""

    @functools.wraps(fulgurite.Trainer.__init__)  # whose arguments Lightning's CLI looks for
    def __init__(self, **kwargs: Any) -> None:
        kwargs = {**vars(_parse_env_variables(fulgurite.Trainer)), **kwargs}
        for name, here in _HERE.items():
            if kwargs.get(name, here[0]) not in here:
                pytest.skip(f"asks for {name}={kwargs[name]!r}")
            kwargs.pop(name, None)
        if kwargs.get("strategy") not in _STRATEGIES:
            pytest.skip(f"asks for strategy={kwargs['strategy']!r}")
        where: dict[str, Any] = {"device": DEVICE}
        if POLICY is not None:
            where = {"backend": fulgurite.backend(DEVICE, autogen_policy=POLICY)}
        super().__init__(**{**kwargs, **where})


pl.Trainer = pl.trainer.Trainer = Trainer  # type: ignore[misc]


@pytest.fixture(autouse=True)
def fresh_backend() -> Iterator[None]:
    """Each test may use the process for another backend."""
    reset_backend()
    yield
    reset_backend()
