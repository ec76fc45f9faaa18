"""Take private names of torch and others away, each in a process of its own, and see what comes.

As a new version does: torch's own code has the thing still, by another name.

    echo '[["torch._C._x", "at once"]]' | python -W ignore tests/support/removed_names.py FOLDER

The process that is forked for each has imported what is taken from, and nothing of Fulgurite. For
each a line of JSON is printed: the name, what came of it, what was said, and the seconds of CPU.
``FOLDER`` receives compile caches. Three ways of use, by what is to come of a name that is gone:

at once   the package is imported, by each of its doors
late      the values of a parameter file are checked, or a run that holds parts is set up
compiled  a fit that waits for its program; the C++ compiler is one that fails, so that nobody waits
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import jsonargparse  # noqa: F401  # imported before the names are taken away
import lightning.pytorch as pl
import torch
import torch._inductor.codegen.cpp
import torch._inductor.compile_fx
import torchmetrics  # noqa: F401
from torch import nn

DOORS = (
    *("fulgurite.backends", "fulgurite.trainer", "fulgurite.callbacks", "fulgurite.loops.lean"),
    *("fulgurite.function", "fulgurite.errors", "fulgurite.config.run.running"),
)
_WORKING = """#!/bin/sh
exec ${CXX:-g++} "$@"
"""
_FAILING = """#!/bin/sh
case "$*" in *--version*) echo "c++ (none) 12" ;; *) echo "error: it fails" >&2; exit 1 ;; esac
"""
_GONE = "gone_"


# -- taking away ----------------------------------------------------------------------------------


def remove(path: str) -> None:
    """Take a name away from its owner: a module, a class, what a class's objects have."""
    owner_path, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    if isinstance(sys.modules.get(path), ModuleType):
        sys.modules[path] = None  # type: ignore[assignment]  # who imports it gets an ImportError
        vars(owner).pop(name, None)
    elif isinstance(owner, type):
        for kind in owner.__mro__[:-1]:
            _from_class(kind, name)
    elif type(owner) is ModuleType:
        _from_module(owner, name)
    elif isinstance(getattr(owner, "_config", None), dict) and name in owner._config:  # a setting
        del owner._config[name]
    else:
        _from_object(owner, name)


def _from_class(kind: type, name: str) -> None:
    [names] = [one for one in gc.get_referents(kind.__dict__) if isinstance(one, dict)]
    names.pop(name, None)  # past the guard of classes that are C's
    names.get("__annotations__", {}).pop(name, None)
    names.get("_member_map_", {}).pop(name, None)  # of an enumeration
    _rename_in(names, name)
    sys._clear_type_cache()


def _from_module(module: ModuleType, name: str) -> None:
    """Give it another name there, which the module's code uses; who is not ours finds it still."""
    value = vars(module)[_GONE + name] = vars(module).pop(name)

    class Hiding(ModuleType):
        def __getattr__(self, asked: str) -> Any:
            asks = sys._getframe(1).f_globals["__name__"]
            if asked == name and not asks.startswith("fulgurite"):
                return value
            raise AttributeError(f"module {module.__name__!r} has no attribute {asked!r}")

    module.__class__ = Hiding
    values, here = list(vars(module).values()), module.__name__
    own = [one for one in values if getattr(one, "__module__", "") == here]
    for kind in [one for one in own if isinstance(one, type)]:
        _rename_in(dict(vars(kind)), name)
    _rename_in(dict(enumerate(own)), name)


def _rename_in(values: dict[Any, Any], name: str) -> None:
    for value in values.values():
        for function in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
            if isinstance(function, FunctionType):
                function.__code__ = _without(function.__code__, name)


def _without(code: CodeType, name: str) -> CodeType:
    """Code in which an attribute has another name."""

    def other(one: Any) -> Any:
        if isinstance(one, CodeType):
            return _without(one, name)
        return _GONE + name if one == name and isinstance(one, str) else one

    return code.replace(
        co_names=tuple(map(other, code.co_names)), co_consts=tuple(map(other, code.co_consts))
    )


def _from_object(owner: Any, name: str) -> None:
    """From what answers for its attributes itself: operations, settings of the compiler."""
    kind = type(owner)

    def get(self: Any, asked: str, *, original: Any = kind.__getattribute__) -> Any:
        if self is owner and asked == name:
            raise AttributeError(f"{kind.__name__} has no attribute {name!r}")
        return original(self, asked)

    kind.__getattribute__ = get
    late = getattr(kind, "__getattr__", None)
    if late is not None:
        kind.__getattr__ = lambda self, asked: (
            get(self, asked) if self is owner and asked == name else late(self, asked)
        )


# -- use ------------------------------------------------------------------------------------------


def imported() -> str:
    """Import the package by each of its doors; what is said, which is the same for all."""
    said = set()
    for door in DOORS:
        try:
            importlib.import_module(door)
        except Exception as error:
            said.add(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
        else:
            return f"{door} was imported"
        for name in [name for name in sys.modules if name.startswith("fulgurite")]:
            del sys.modules[name]
    return "\n".join(said)


class Line(pl.LightningModule):
    """A small model; its loss is one kernel where that is asked for."""

    steps = 0  # of all

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.losses = nn.Linear(4, 3), []
        self.drop = nn.Dropout(0.5)
        self.loss: Any = nn.CrossEntropyLoss()
        if fused:
            from fulgurite.nn import CrossEntropyLoss

            self.loss = CrossEntropyLoss(use_autogen=True)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return self.loss(self.drop(self.net(x)), y)

    def on_train_batch_end(self, outputs: Any, *rest: Any) -> None:
        Line.steps += 1
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(trainer: pl.Trainer, module: Line) -> None:
    """Two steps."""
    torch.manual_seed(1)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    torch.manual_seed(2)
    data = torch.utils.data.TensorDataset(x, y)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))


def quiet() -> dict[str, Any]:
    """Arguments of a Trainer of one epoch that writes nothing."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return dict.fromkeys(off, False) | {"max_epochs": 1}


def trained(folder: Path, *, fused: bool = False, **options: Any) -> str:
    """Fit on CSX; the losses, and how the program ran."""
    from fulgurite import Trainer

    module = Line(fused)
    backend = {"backend_type": "CSX", "background": False, "compile_dir": folder, **options}
    trainer = Trainer(backend=backend, **quiet())
    fit(trainer, module)
    [executable] = trainer.strategy.step_functions["training"].executables()
    return json.dumps({"losses": module.losses, "how": executable.loaded.how})


def checked() -> str:
    """Read the parameters of a class as parameter files do."""
    from fulgurite.config.types.signatures import signature_of

    return str(signature_of(Line))


def set_up() -> str:
    """What a run that holds parts does before it trains, for its checkpoints."""
    importlib.import_module("fulgurite.backends.checkpoints.folder_writer")
    return "it was set up"


_FUSED = ("GroupedSchedulerNode", "prepare_planning_info")
_TUNED = ("PRINT_AUTOTUNE",)
_LOADING = ("_torchinductor_pyobject_tensor_data_ptr",)
"""Ends of names that only fused losses, tuned products or loading a compiled program use."""


def way(name: str, kind: str, folder: Path) -> Callable[[], str]:
    """How to use a name."""
    if kind == "at once":
        return imported
    if kind == "late":
        return set_up if name.startswith("torch.distributed.checkpoint.") else checked
    if name.endswith(_LOADING):
        return lambda: trained(folder / "compiled")
    policy = "aggressive" if name.endswith(_TUNED) else "default"
    empty = Path(tempfile.mkdtemp(dir=folder))
    return lambda: trained(empty, fused=name.endswith(_FUSED), autogen_policy=policy)


def used(use: Callable[[], str]) -> str:
    """What came of a use; of an error also after how many steps it came."""
    try:
        return use()
    except Exception as error:
        kind = type(error)
        return f"{kind.__module__}.{kind.__qualname__}: {error}\nafter {Line.steps} steps"


# -- processes ------------------------------------------------------------------------------------


def in_a_process(run: Callable[[], str]) -> tuple[str, float]:
    """What a forked process returns, and its seconds of CPU."""
    reads, writes = os.pipe()
    before = sum(os.times()[2:4])
    pid = os.fork()
    if pid == 0:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        try:
            said = run()
        except BaseException as error:
            said = f"{type(error).__name__} in the test itself: {error}"
        with os.fdopen(writes, "w") as pipe:
            pipe.write(said)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said, sum(os.times()[2:4]) - before


def without(name: str, use: Callable[[], str]) -> str:
    """What comes of a use of the package when a name is gone."""
    remove(name)
    return used(use)


def main(folder: Path) -> None:
    """Read the names, and print what comes of each."""
    names = json.loads(sys.stdin.read())
    stock = Line()
    fit(pl.Trainer(accelerator="cpu", **quiet()), stock)
    Line.steps = 0
    print(json.dumps({"losses": stock.losses}), flush=True)
    compiler = folder / "c++"
    compiler.write_text(_WORKING)
    compiler.chmod(0o700)
    torch._inductor.config.cpp.cxx = (None, str(compiler))
    if any(kind == "compiled" for _, kind in names):
        in_a_process(lambda: trained(folder / "compiled"))
    compiler.write_text(_FAILING)
    for name, kind in names:
        use = way(name, kind, folder)
        said, seconds = in_a_process(functools.partial(without, name, use))
        row = {"name": name, "kind": kind, "said": said, "seconds": round(seconds, 2)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
