"""Write the parts of docs/runners.md that come from the code: flags, methods, the order of hooks.

python tests/tools/document_runners.py
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fulgurite.backends import reset_backend
from fulgurite.callbacks.runner_hooks import HOOKS
from fulgurite.runners import PyTorchCSRunner
from fulgurite.runners.parameters import FLAGS
from fulgurite.runners.runner import NOT_CALLED

sys.path.append(str(Path(__file__).parents[1] / "support"))
from harness import QUIET
from models import loader, mlp

PAGE = Path(__file__).parents[2] / "docs" / "runners.md"


class Net(nn.Module):
    """A small classifier, whose forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, data: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(data[0]), data[1])


class Recording(PyTorchCSRunner):
    """Writes down which hooks are called, with their arguments."""

    calls: list[str]


def _recorder(hook: str) -> Callable[..., Any]:
    def record(self: Recording, *args: Any) -> None:
        shown = ["data" if isinstance(arg, list) else arg for arg in args]
        shown = ["loss" if isinstance(arg, Tensor) else arg for arg in shown]
        self.calls.append(f"{hook}({', '.join(map(str, shown))})")

    return record


for _hook in HOOKS:
    setattr(Recording, _hook, _recorder(_hook))


def recorded() -> list[str]:
    """The calls of two epochs of two batches, each with an evaluation of one."""
    reset_backend()
    with tempfile.TemporaryDirectory() as folder:
        init = {
            "backend": {"backend_type": "CSX", "autogen_policy": "disabled"},
            "model_dir": folder,
            "optimizer": {"SGD": {"lr": 0.1}},
            "loop": {"num_epochs": 2, "eval_frequency": 2},
            **QUIET,
        }
        runner = Recording(Net(), {"trainer": {"init": init}})
        runner.calls = []
        runner.train_and_eval(loader(32), loader(16))
    reset_backend()
    return runner.calls


def hooks() -> Iterator[str]:
    """The recorded calls, those within a span indented."""
    yield "```"
    depth = 0
    for call in recorded():
        depth -= "_end(" in call
        yield "    " * depth + call
        depth += "_start(" in call
    yield "```"


def flags() -> Iterator[str]:
    """A table of the flags."""
    yield "| flag | key under `trainer` | |"
    yield "|---|---|---|"
    for flag in FLAGS:
        names = ", ".join(f"`{name}`" for name in (*flag.short, f"--{flag.name}"))
        key = f"`{flag.key}`" if flag.key else ""
        does = flag.does if flag.means else f"no effect: {flag.does}"
        yield f"| {names} | {key} | {does} |"


def methods() -> Iterator[str]:
    """A table of the methods that are refused."""
    yield "| method | instead |"
    yield "|---|---|"
    for name, remedy in NOT_CALLED.items():
        yield f"| `{name}` | {remedy} |"


PARTS: dict[str, Callable[[], Iterator[str]]] = {"hooks": hooks, "flags": flags, "methods": methods}


def page(text: str) -> str:
    """The page with its parts made anew."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name}: tests/tools/document_runners.py -->", f"<!-- {name} end -->"
        made = "\n".join([begin, *part(), end])
        text = re.sub(rf"{begin}.*?{end}", lambda _, made=made: made, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
