"""The file's model as a LightningModule, with its optimizer and schedulers; its loaders as a
LightningDataModule.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from fulgurite.backends.program_scheduler import ProgramScheduler
from fulgurite.config.schema.class_shapes import DataCall, SchedulerCall
from fulgurite.config.schema.optimizers import OptimizerCall, Refuse, param_groups
from fulgurite.config.schema.schema import Init
from fulgurite.config.types.report import Call
from fulgurite.config.types.signatures import names_of
from fulgurite.optim.lr_scheduler import ScalePerParamLR

_PREFIX = "model."
_TAGS = "param_group_tags"


class FileModule(pl.LightningModule):
    """A plain nn.Module whose forward takes a batch and returns the loss.

    The loss is a tensor of one element, alone, first of a tuple, or in a dict as "loss". It is
    logged as "loss", "val_loss" and "test_loss"; ``predict`` returns what forward returns.

    In a checkpoint the weights have the names that they have in the module:
    ``net.load_state_dict(torch.load(path)["state_dict"])`` loads them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        """What the module returns for a batch."""
        return self.model(batch)

    def training_step(self, batch: Any) -> Tensor:
        """Log the loss as "loss", and return it."""
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Log the loss as "val_loss", and return it."""
        loss = self._loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Log the loss as "test_loss", and return it."""
        loss = self._loss(batch)
        self.log("test_loss", loss, prog_bar=True)
        return loss

    def predict_step(self, batch: Any) -> Any:
        """What the module returns."""
        return self.model(batch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Give weights the names that they have in the module."""
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {k.removeprefix(_PREFIX): v for k, v in state.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take weights by the names that they have in the module."""
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {_PREFIX + k: v for k, v in state.items()}

    def _loss(self, batch: Any) -> Tensor:
        output = self.model(batch)
        found = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(found, (tuple, list)) and found:
            found = found[0]
        if not isinstance(found, Tensor) or found.numel() != 1:
            name = type(self.model).__name__
            raise TypeError(
                f"{name}.forward(batch) has to return the loss, a tensor of one element: alone,"
                f" first of a tuple, or in a dict as 'loss'. It returned {_described(output)}."
                f" Compute the loss in {name}.forward, or write a LightningModule."
            )
        return found.reshape(())


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {list(output.shape)}"
    if isinstance(output, Mapping):
        return f"a dict with {', '.join(map(repr, output)) or 'nothing'}"
    return f"a {type(output).__name__}"


def as_lightning(model: nn.Module) -> pl.LightningModule:
    """The model itself, or a plain module wrapped."""
    return model if isinstance(model, pl.LightningModule) else FileModule(model)


def with_optimizer(module: pl.LightningModule, init: Init, refuse: Refuse) -> None:
    """Make ``configure_optimizers`` give what the file says, if it says anything.

    Args:
        module: the model of the file.
        init: its ``init``.
        refuse: raises what is wrong with a file.

    Raises:
        ParameterFileError: an entry of ``optimizer.params`` has no parameters.
    """
    optimizer = init.optimizer
    if optimizer is None:
        return
    # the file names parameters as the model has them, without our wrapper's "model."
    named = module.model if isinstance(module, FileModule) else module
    # a module that makes its layers there has no parameters yet
    if not is_overridden("configure_model", module, pl.LightningModule):
        param_groups(optimizer, named, refuse)  # its mistakes now, not when training begins
    scaled = isinstance(optimizer, OptimizerCall) and optimizer.scales
    replaces = is_overridden("configure_optimizers", module, pl.LightningModule)

    def configure_optimizers() -> Any:
        if replaces:
            rank_zero_info(
                f"The file's optimizer, {optimizer.name}, is used;"
                f" {type(module).__name__}.configure_optimizers is not."
            )
        made = optimizer(param_groups(optimizer, named, refuse))
        return [made], scheduler_configs(init.schedulers, made, scaled)

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]


def scheduler_configs(
    calls: Sequence[SchedulerCall], optimizer: Optimizer, scaled: bool
) -> list[dict[str, Any]]:
    """What ``configure_optimizers`` returns for the schedulers of a file.

    Args:
        calls: the file's.
        optimizer: whose numbers they set.
        scaled: whether its groups have factors: schedulers of the learning rate then follow them,
            as under ``ScalePerParamLR``.
    """
    return [
        {
            "scheduler": _follow(_made(call, optimizer), call, scaled),
            "interval": "step",
            **call.when,
        }
        for call in calls
    ]


def _made(call: Call, optimizer: Optimizer) -> Any:
    assert call.target is not None

    def make(inner: Call) -> Any:
        return _made(_tagged(inner, call), optimizer)

    nested = {
        name: [make(one) for one in inner] if isinstance(inner, list) else make(inner)
        for name, inner in call.nested.items()
    }
    # a chain takes no optimizer: its schedulers have one
    takes = "optimizer" in inspect.signature(call.target).parameters
    return call(**nested, **({"optimizer": optimizer} if takes else {}))


def _tagged(inner: Call, outer: Call) -> Call:
    """An inner scheduler sets the same groups as the outer one."""
    tags = outer.arguments.get(_TAGS)
    if tags is None or inner.target is None or _TAGS not in names_of(inner.target):
        return inner
    return replace(inner, arguments={_TAGS: tags, **inner.arguments})


def _follow(scheduler: Any, call: Call, scaled: bool) -> Any:
    follows = isinstance(scheduler, ProgramScheduler) and scheduler.key == "lr"
    if not scaled or not follows or isinstance(scheduler, ScalePerParamLR):
        return scheduler
    return ScalePerParamLR(scheduler.optimizer, scheduler, call.arguments.get(_TAGS))


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

    def find_or_make(self, call: Call) -> Any:
        """The loader or LightningDataModule of one place in the file.

        A LightningDataModule named twice with the same arguments is one.
        """
        for other, made in self._made:
            if other is call or (isinstance(made, pl.LightningDataModule) and _same(other, call)):
                return made
        self._made.append((call, loader_of(call)))
        return self._made[-1][1]

    def _made_again(self, call: Call) -> Any:
        """``find_or_make``, but with a new loader where the Trainer reloads after some epochs."""
        trainer = self.trainer
        if trainer is not None and trainer.current_epoch and _reloads(trainer):
            self._made = [
                (other, made)
                for other, made in self._made
                if other is not call or isinstance(made, pl.LightningDataModule)
            ]
        return self.find_or_make(call)

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
        made = [self.find_or_make(call) for call in calls if _may_be_module(call)]
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
                    # Lightning asks whether the Trainer's own datamodule overrides a hook
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
    # a dataset that takes batch_size gives whole batches: none is put together around it
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
