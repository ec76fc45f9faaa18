"""A loop over a loader that knows its steps: the last, and those that have a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.data import sized_len

from fulgurite.backends import CSXBackend
from fulgurite.backends.backend import current_backend, gpu_device
from fulgurite.backends.closures import spanned
from fulgurite.backends.csx.plugins.loader_sizes import check_loaders

_END = object()


class DataExecutor:
    """Iterate over batches of a loader, from its begin again where more steps are asked for.

        executor = DataExecutor(loader, num_steps=1000, checkpoint_steps=100)
        for inputs, targets in executor:
            loss = training_step(inputs, targets)
            print_loss(loss)      # a step_closure
            save(executor.step)   # a checkpoint_closure: steps 100, 200, ..., 1000

    Executors nest: an evaluation's within a training's has its own steps. On GPU batches are moved
    there. On a CSX backend with ``compile_only`` or ``validate_only`` there is one step, which is
    built and not run, and closures are not called.

    Args:
        dataloader: a DataLoader, or any other iterable of batches.
        num_steps: how many batches; None takes one pass over the loader.
        checkpoint_steps: checkpoint closures run every that many steps, and after the last; None:
            only after the last.
        activation_steps: step closures run every that many steps, and after the last; None: on
            every step.

    Raises:
        TypeError: ``dataloader`` cannot be iterated over, or a number of steps is no integer.
        ValueError: a number of steps is not positive, or the loader has no batch.
        RuntimeError: while iterating: the loader ends too early, or is iterated over already.
        TraceError: on CSX: the loader's last batch would be smaller.
    """

    step: int
    """The step whose batch the loop's body works on, from 1; 0 before the first."""

    def __init__(
        self,
        dataloader: Iterable[Any],
        num_steps: int | None = None,
        checkpoint_steps: int | None = None,
        activation_steps: int | None = None,
    ) -> None:
        if not isinstance(dataloader, Iterable):
            raise TypeError(
                f"DataExecutor takes an iterable of batches; got {type(dataloader).__name__}."
            )
        self._dataloader = dataloader
        self._num_steps = _positive("num_steps", num_steps)
        self._checkpoint_steps = _positive("checkpoint_steps", checkpoint_steps)
        self._activation_steps = _positive("activation_steps", activation_steps)
        length = sized_len(dataloader)
        if length == 0:
            raise ValueError("DataExecutor got a loader without a batch: its length is 0.")
        self._known_steps = self._num_steps or length
        self.step = 0
        self._is_last = self._is_running = False

    def __len__(self) -> int:
        """How many steps there are.

        Raises:
            TypeError: neither ``num_steps`` nor the loader says.
        """
        if self._known_steps is None:
            raise TypeError("The loader has no length; give DataExecutor num_steps.")
        return self._known_steps

    @property
    def is_last_step(self) -> bool:
        """Whether no batch follows."""
        return self._is_last

    @property
    def is_activation_step(self) -> bool:
        """Whether step closures run on this step."""
        every = self._activation_steps
        return every is None or self._is_last or self.step % every == 0

    @property
    def is_checkpoint_step(self) -> bool:
        """Whether checkpoint closures run on this step."""
        every = self._checkpoint_steps
        return self._is_last or (every is not None and self.step % every == 0)

    def __iter__(self) -> Iterator[Any]:
        if self._is_running:
            raise RuntimeError(
                "This DataExecutor is being iterated over already. Make another one for the inner"
                " loop."
            )
        backend = current_backend()
        if isinstance(backend, CSXBackend):
            check_loaders({"loader": (self._dataloader, self._known_steps)}, backend)
            if backend.only_builds:
                # one step is all that building a program takes
                yield from itertools.islice(self._batches(), 1)
                return
        self._is_running, self._is_last, self.step = True, False, 0
        try:
            with spanned(self):
                yield from self._steps()
        finally:
            self._is_running = False

    def _steps(self) -> Iterator[Any]:
        batches, known = self._batches(), self._known_steps
        following = next(batches, _END)
        while following is not _END:
            batch = following
            if known is None:  # then only the loader tells, one batch ahead
                following = next(batches, _END)
            self.step += 1
            self._is_last = following is _END if known is None else self.step == known
            yield batch
            if self._is_last:
                return
            if known is not None:
                following = next(batches, _END)
        raise RuntimeError(
            f"The loader ended after {self.step} batches; its length is {known}. Give DataExecutor"
            f" num_steps={self.step}."
        )

    def _batches(self) -> Iterator[Any]:
        """One pass over the loader, or as many as the steps need."""
        found = True
        while found:
            found = False
            for batch in self._dataloader:
                found = True
                yield _on_device(batch)
            if found and self._num_steps is None:
                return
        if self.step == 0:
            raise ValueError("DataExecutor got a loader without a batch.")
        raise RuntimeError(
            f"The loader ended after {self.step} batches and cannot be iterated over again;"
            f" num_steps is {self._num_steps}. Give DataExecutor a DataLoader or a list."
        )


def _on_device(batch: Any) -> Any:
    backend = current_backend()
    if backend is None or backend.backend_type != "GPU":
        return batch
    return move_data_to_device(batch, gpu_device())


def _positive(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer or None; got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1; got {value}.")
    return value
