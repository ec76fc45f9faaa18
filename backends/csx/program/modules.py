"""The modules of a model, as they are when a program is built: other ones need other programs."""

from __future__ import annotations

from operator import is_

from fulgurite.backends.csx.capture.scope import Scope
from fulgurite.backends.csx.diagnostics.errors import StateChanged


class ModuleTree:
    """The modules of a scope's model now, to be compared with those that are there later.

    Attributes:
        modules: all of them, in the order of ``nn.Module.modules``.
        parameters: all of theirs, where the step trains them.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self.modules = list(scope.module.modules())
        self.parameters = list(scope.module.parameters()) if scope.trains else []
        self._children = [module._modules for module in self.modules if module._modules]
        places = [(held, name, held[name]) for held in self._children for name in held]
        self._owners = [owner for owner, _, _ in places]
        self._names = [name for _, name, _ in places]
        self._descendants = [child for _, _, child in places]

    def is_replaced(self) -> bool:
        """Whether another module, or none, is in the place of one; asked after every hook."""
        return not all(map(is_, map(dict.get, self._owners, self._names), self._descendants))

    def is_changed(self) -> bool:
        """Whether a module was added, removed or replaced."""
        now = [child for children in self._children for child in children.values()]
        return len(now) != len(self._descendants) or not all(map(is_, now, self._descendants))

    def check(self, stage: str) -> None:
        """Verify that the model still has these modules.

        Raises:
            StateChanged: it does not; the error names the stage.
        """
        before, now = self.modules, list(self._scope.module.modules())
        changed = [a for a, b in zip(before, now, strict=False) if a is not b]
        if changed or len(before) != len(now):
            name = type(changed[0]).__name__ if changed else "one more or less"
            raise StateChanged(
                f"The modules of the model changed after the {stage} program was built ({name}).",
                remedy="replace modules before the first step, for instance in setup() or"
                " configure_model()",
                line=self._scope.line_naming(self._changed_names(), stored=True),
            )

    def _changed_names(self) -> set[str]:
        """The attributes in which there are other modules than before."""
        known = {id(child) for child in self._descendants}
        pairs = zip(self._owners, self._names, strict=True)
        gone = {name for owner, name in pairs if name not in owner}
        return gone | {
            name for held in self._children for name in held if id(held[name]) not in known
        }
