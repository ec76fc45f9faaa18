"""The loaders of a file as a LightningDataModule, made of what the file names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sized
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, Dataset

from fulgurite.config.schema.class_shapes import DataCall
from fulgurite.config.types.report import Call

_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class FileData(pl.LightningDataModule):
    """The loaders that a file names, made when they are first asked for.

    Where the file names a LightningDataModule, its hooks run as if it were given to the Trainer.

    Args:
        stages: the file's stages, as ``checking.Phase`` has them.
        validates: whether ``fit`` validates at all.
    """

    def __init__(self, stages: dict[str, dict[str, Any]], validates: bool = True) -> None:
        super().__init__()
        self._stages, self._validates = stages, validates
        self._made: list[tuple[Call, Any]] = []
        self._active: list[pl.LightningDataModule] = []  # of the running stage

    def made(self, call: Call) -> Any:
        """The loader or LightningDataModule of one place in the file.

        A LightningDataModule named twice with the same arguments is one.
        """
        for other, made in self._made:
            if other is call or (isinstance(made, pl.LightningDataModule) and _same(other, call)):
                return made
        self._made.append((call, loader_of(call)))
        return self._made[-1][1]

    def _made_again(self, call: Call) -> Any:
        """As ``made``; but a loader is made anew where the Trainer reloads it after some epochs."""
        trainer = self.trainer
        if trainer is not None and trainer.current_epoch and _reloads(trainer):
            self._made = [
                (other, made)
                for other, made in self._made
                if other is not call or isinstance(made, pl.LightningDataModule)
            ]
        return self.made(call)

    def _calls(self, stage: str, key: str) -> list[Call]:
        found = self._stages.get(stage, {}).get(key) or []
        return found if isinstance(found, list) else [found]

    def _stage(self) -> str:
        """The stage that the Trainer runs now; "fit" before any."""
        state = None if self.trainer is None else self.trainer.state.fn
        return "fit" if state is None else str(state.value)

    def _validation(self) -> list[Call]:
        own = self._calls("fit", "val_dataloader")
        if self._stage() == "fit":
            return own if self._validates else []
        return self._calls("validate", "val_dataloader") or own

    def _modules(self) -> list[pl.LightningDataModule]:
        """The LightningDataModules that the running stage takes its loaders from."""
        stage = self._stage()
        calls = {
            "fit": [*self._calls("fit", "train_dataloader"), *self._validation()],
            "validate": self._validation(),
            "test": self._calls("test", "test_dataloader"),
            "predict": self._calls("predict", "predict_dataloader"),
        }
        return self._modules_of(calls.get(stage, []))

    def _modules_of(self, calls: list[Call]) -> list[pl.LightningDataModule]:
        made = [self.made(call) for call in calls if _may_be_module(call)]
        return list(dict.fromkeys(m for m in made if isinstance(m, pl.LightningDataModule)))

    def _loaders(self, calls: list[Call], hook: str) -> list[Any]:
        loaders: list[Any] = []
        for call in calls:
            made = self._made_again(call)
            is_module = isinstance(made, pl.LightningDataModule)
            loaders += _listed(getattr(made, hook)()) if is_module else [made]
        return loaders

    def train_dataloader(self) -> Any:
        """The training loader of ``fit``."""
        [call] = self._calls("fit", "train_dataloader")
        made = self._made_again(call)
        return made.train_dataloader() if isinstance(made, pl.LightningDataModule) else made

    def val_dataloader(self) -> Any:
        """The validation loaders of ``fit``; those of ``validate`` where that runs and has any."""
        calls = self._validation()
        if not calls and self._validates and self._stage() == "fit":
            modules = self._modules_of(self._calls("fit", "train_dataloader"))
            return [
                loader
                for module in modules
                if is_overridden("val_dataloader", module, pl.LightningDataModule)
                for loader in _listed(module.val_dataloader())
            ]
        return self._loaders(calls, "val_dataloader")

    def test_dataloader(self) -> Any:
        """The loaders of ``test``."""
        return self._loaders(self._calls("test", "test_dataloader"), "test_dataloader")

    def predict_dataloader(self) -> Any:
        """The loaders of ``predict``."""
        return self._loaders(self._calls("predict", "predict_dataloader"), "predict_dataloader")

    def prepare_data(self) -> None:
        """Call the hook of the file's LightningDataModules."""
        self._active = self._modules()
        for module in self._active:
            module.prepare_data()

    def setup(self, stage: str) -> None:
        """Call the hook of the file's LightningDataModules; take over their hooks for batches."""
        self._active = self._modules()
        for module in self._active:
            module.trainer = self.trainer
            module.setup(stage)
        vars(self).pop("val_dataloader", None)
        if stage == "fit" and not self.val_dataloader():  # Lightning warns of an empty list
            base = pl.LightningDataModule.val_dataloader
            self.val_dataloader = MethodType(base, self)  # type: ignore[method-assign]
        for hook in _TRANSFER:
            vars(self).pop(hook, None)
            for module in self._active:
                if is_overridden(hook, module, pl.LightningDataModule):
                    setattr(self, hook, getattr(module, hook))

    def teardown(self, stage: str) -> None:
        """Call the hook of the file's LightningDataModules."""
        for module in self._active:
            module.teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        """Call the hook of the file's LightningDataModules."""
        for module in self._active:
            module.on_exception(exception)

    def state_dict(self) -> dict[str, Any]:
        """The states of the file's LightningDataModules, by the names of their classes."""
        states = {type(module).__qualname__: module.state_dict() for module in self._active}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the LightningDataModules their states back."""
        for module in self._active:
            if type(module).__qualname__ in state_dict:
                module.load_state_dict(state_dict[type(module).__qualname__])


def _reloads(trainer: pl.Trainer) -> bool:
    every: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    return trainer.state.fn == "fit" and every > 0


def _same(one: Call, other: Call) -> bool:
    return one.target is other.target and one.arguments == other.arguments


def _listed(loaders: Any) -> list[Any]:
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


def _may_be_module(call: Call) -> bool:
    """Whether a class is a LightningDataModule, or a function may return one."""
    target = call.target
    return not inspect.isclass(target) or issubclass(target, pl.LightningDataModule)


def loader_of(call: Call) -> Any:
    """The loader or LightningDataModule that a call makes.

    Raises:
        TypeError: it makes something else, or a loader where arguments of one are given.
    """
    made, loader = call(), call.loader if isinstance(call, DataCall) else None
    batched: dict[str, Any] = {"batch_size": None} if "batch_size" in call.arguments else {}
    if hasattr(made, "create_dataloader"):
        made = made.create_dataloader()
    if isinstance(made, Dataset) or (loader is not None and _is_dataset(made)):
        return DataLoader(made, **batched) if loader is None else loader(made, **batched)
    if loader is not None:
        raise TypeError(
            f"{call.name} made a {type(made).__name__}, which batches by itself:"
            f" {', '.join(loader.arguments)} beside its arguments would have no effect. Leave them"
            f" out, or return a Dataset from {call.name}."
        )
    if not isinstance(made, (pl.LightningDataModule, Iterable)):
        raise TypeError(
            f"{call.name} made a {type(made).__name__}; expected a LightningDataModule, a"
            " DataLoader, a Dataset or an iterable of batches."
        )
    return made


def _is_dataset(made: Any) -> bool:
    """Whether a DataLoader can go around it: a list of samples can."""
    return isinstance(made, Sized) and hasattr(made, "__getitem__")
