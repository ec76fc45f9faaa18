"""Which line of the user's put something into a module while a step is traced.

Errors about what the step left there name it: ``self.seen = torch.cat([self.seen, y])``,
``torch.nn.utils.weight_norm(self.net)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import Tensor, nn

from fulgurite.backends.csx.diagnostics.user_lines import UserLine, user_line
from fulgurite.backends.patches import applied, patches_of
from fulgurite.backends.torch_versions import CHECKED

_SETTERS = ("__setattr__", "__delattr__", "register_parameter", "register_buffer", "add_module")


class Changes:
    """Tensors and modules that a step puts into the modules of ``root``, or takes out.

    Attributes:
        of_modules: the line that added, removed or replaced a module first; None if none did.
    """

    def __init__(self, root: nn.Module) -> None:
        self._owners = {
            id(container): id(module)
            for module in root.modules()
            for container in (vars(module), module._parameters, module._buffers)
        }
        self._modules = frozenset(self._owners.values())
        self._lines: dict[tuple[int, str], UserLine | None] = {}
        self._last: dict[int, UserLine | None] = {}
        self.of_modules: UserLine | None = None

    @contextlib.contextmanager
    def watched(self, boundary: CodeType) -> Iterator[None]:
        """Watch all modules; ``boundary`` is the frame where the trace began."""

        def noting(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(module: nn.Module, name: str, *value: Any, **options: Any) -> Any:
                if id(module) in self._modules and isinstance(
                    value[0] if value else None, (Tensor, nn.Module, type(None))
                ):
                    self._note(module, name, value, user_line(boundary))
                return original(module, name, *value, **options)

            return method

        methods = {name: noting(getattr(nn.Module, name)) for name in _SETTERS}
        why = "an error about what the step put into a module names the line"
        with applied(patches_of(nn.Module, methods, why=why, checked=CHECKED)):
            yield

    def _note(self, module: nn.Module, name: str, value: Any, line: UserLine | None) -> None:
        self._lines[id(module), name] = self._last[id(module)] = line
        if name in module._modules or (value and isinstance(value[0], nn.Module)):
            self.of_modules = self.of_modules or line

    def line_of(self, container: Any, key: Any) -> UserLine | None:
        """Where the attribute ``key`` that the dict ``container`` holds was last set."""
        module = self._owners.get(id(container), 0)
        return self._lines.get((module, key)) or self._last.get(module)
