"""Numbers that steps change, but for those of param groups: ``state[p]["n"] += 1``, ``self.n = 0``.

Each is an input of the program like those of groups: a traced number while a step is traced, and
what the step made of it is set on the host after every step. Numbers of an optimizer of one name
that are equal are one input: that of a count is the same for all parameters. A flag that an
optimizer's step changes is one, too: Python looks at it, so each value has its program.

A number in an attribute of a module is traced as counters of the run are: conditions have programs,
and Python that takes the value keeps it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from fulgurite.backends.csx.diagnostics.trace_errors import StateChanged, UnsupportedState
from fulgurite.backends.csx.hyperparams.run_numbers import RunNumber
from fulgurite.backends.csx.hyperparams.traced_float import TracedNumber, number_where
from fulgurite.backends.csx.state import TORCHS_OWN
from fulgurite.backends.patches import MISSING

Held = tuple[dict[Any, Any], Any]
"""Where a number is: a dict, and the key in it."""


_DICTS = (dict, defaultdict, OrderedDict, Counter)
_NUMBERS = {int, float, TracedNumber, RunNumber}


class KeptNumber(NamedTuple):
    """A number that a step leaves in a module: whose it is, its name in messages, dict and key."""

    owner: object
    name: str
    container: dict[Any, Any]
    key: Any


OF_MODULES: dict[tuple[int, Any], KeptNumber] = {}
"""Those that steps of this run compute, by the dict's identity and the key."""


def keep(number: KeptNumber) -> None:
    """Note a number that a step computes and leaves in a module: steps of others may ask for it."""
    OF_MODULES[id(number.container), number.key] = number


@dataclass(frozen=True, slots=True, eq=False)
class CountSlot:
    """Equal numbers of an optimizer, or one of a module, an input of the program.

    Args:
        optimizer: the place of the optimizer; None for a module's.
        name: in messages.
        held: where they are.
    """

    optimizer: int | None
    name: str
    held: list[Held]

    def read(self, optimizers: list[Optimizer]) -> float:
        """Their value now; NaN while there are none."""
        value = self.value(optimizers)
        if value is MISSING or (self.optimizer is None and type(value) not in (int, float)):
            return float("nan")
        if type(value) not in (int, float, bool):
            raise StateChanged(
                f"{self} was a number when the program was built, and now is {value!r}.",
                remedy="keep it a number",
            )
        return float(value)

    def value(self, optimizers: list[Optimizer]) -> Any:
        """What is in the first of the places now; MISSING where nothing is."""
        container, key = self.held[0]
        found = container.get(key)
        return MISSING if found is None else found

    def is_torn(self) -> bool:
        """Whether they are no longer equal."""
        first, *others = [container.get(key, MISSING) for container, key in self.held]
        return any(one is not first and one != first for one in others)

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True)
class Counts:
    """The numbers that steps of a scope change, or ask for, outside of param groups.

    Attributes:
        slots: of equal numbers; new ones come after those that were there.
    """

    slots: list[CountSlot] = field(default_factory=list)
    _known: set[tuple[int, Any]] = field(default_factory=set)

    def find(self, optimizers: dict[str, Optimizer]) -> None:
        """Look for numbers in the optimizers' state, and part those that are no longer equal."""
        for slot in [slot for slot in self.slots if slot.is_torn()]:
            self.slots.remove(slot)
            for container, key in slot.held:
                self._add(slot.optimizer, slot.name, container, key)
        for i, (owner, optimizer) in enumerate(optimizers.items()):
            for name, container, key in _numbers_in(optimizer.state, f"{owner}.state"):
                self.add(i, name, container, key)

    def find_kept(self, modules: Iterable[nn.Module]) -> None:
        """Look for numbers that steps of another scope have set in attributes of modules."""
        own = set(map(id, modules))
        for one in OF_MODULES.values():
            if id(one.owner) in own and type(one.container.get(one.key)) in (int, float):
                self.add(None, one.name, one.container, one.key)

    def add(self, optimizer: int | None, name: str, container: dict[Any, Any], key: Any) -> None:
        """One more number, which a step has changed or made."""
        if (id(container), key) not in self._known:
            self._known.add((id(container), key))
            self._add(optimizer, name, container, key)

    def find_changed(
        self,
        containers: Iterable[tuple[Any, Any, str, object]],
        optimizers: list[Optimizer],
        made: list[KeptNumber],
    ) -> bool:
        """Look for numbers and flags that a step has changed, and put back what they were.

        Args:
            containers: what optimizers and modules hold: each, what was in it, its name and whose
                it is. Attributes of modules are not looked at.
            optimizers: all of them.
            made: receives numbers of modules that were not there.

        Returns:
            Whether there are some that were.
        """
        found = False
        for container, before, name, owner in containers:
            place = next((i for i, one in enumerate(optimizers) if one is owner), None)
            is_own, is_modules = container is vars(owner), isinstance(owner, nn.Module)
            if place is not None:
                may_count = isinstance(container, dict)
            else:  # of the user's own classes nobody knows what setting an item does
                may_count = is_modules and not is_own and not isinstance(owner, Metric)
                may_count = may_count and type(container) in _DICTS
            for key, value in [*container.items()] if may_count else ():
                was, kinds = before.get(key), {type(before.get(key)), type(value)}
                alike = kinds <= _NUMBERS and not isinstance(was, TracedNumber)
                alike = alike or (kinds == {bool} and not is_modules)
                if is_modules and key not in before and type(value) in _NUMBERS:
                    made.append(KeptNumber(owner, f"{name}[{key!r}]", container, key))
                if value is was or not alike or value == was or (is_own and key in TORCHS_OWN):
                    continue
                text = f"{name}.{key}" if is_own else f"{name}[{key!r}]"
                entries = () if place is None else optimizers[place].state.values()
                if any(container is entry for entry in entries):  # of all parameters
                    text = f"{type(owner).__name__}.state[{key!r}]"
                self.add(place, text, container, key)
                if is_modules:
                    keep(KeptNumber(owner, text, container, key))
                container[key], found = was, True
        return found

    def holds(self, container: dict[Any, Any], key: Any) -> bool:
        """Whether a number is one of these."""
        return (id(container), key) in self._known

    def _add(self, optimizer: int | None, name: str, container: dict[Any, Any], key: Any) -> None:
        value = container.get(key, MISSING)
        for slot in self.slots if optimizer is not None else ():
            now = slot.value([])
            if (slot.optimizer, slot.name) == (optimizer, name) and repr(now) == repr(value):
                slot.held.append((container, key))
                return
        self.slots.append(CountSlot(optimizer, name, [(container, key)]))

    def forget(self) -> None:
        """The optimizers' state is another one."""
        self.slots[:] = [slot for slot in self.slots if slot.optimizer is None]
        self._known = {(id(one), key) for slot in self.slots for one, key in slot.held}


def _numbers_in(holder: Any, name: str) -> Iterator[tuple[str, dict[Any, Any], Any]]:
    """The Python numbers of a state: a name that those of all parameters share, dict and key."""
    for key, value in holder.items():
        inner = f"{name}[{key!r}]" if isinstance(key, (str, int)) else name
        if isinstance(value, dict):
            yield from _numbers_in(value, inner)
        elif type(value) in (int, float):
            yield inner, holder, key


@dataclass(frozen=True, slots=True)
class SetCount:
    """Numbers that a step has set to one: where they are, and what it is."""

    slot: CountSlot
    held: list[Held]
    number: Any


class TracedCounts:
    """The counts of a trace, while the step runs and after.

    Args:
        traced: those that are there, and what the step is to find: a traced number, or the flag.
    """

    def __init__(self, traced: list[tuple[CountSlot, TracedNumber | bool]]) -> None:
        self._traced = traced
        self._before = [
            (container, key, container[key]) for slot, _ in traced for container, key in slot.held
        ]
        for slot, found in traced:
            for container, key in slot.held:
                container[key] = found

    def now(self) -> dict[tuple[int, Any], Any]:
        """What is in each place of optimizers, by the identity of its dict and the key."""
        held = self._held_by_optimizers()
        return {(id(container), key): container.get(key) for container, key in held}

    def _held_by_optimizers(self) -> list[Held]:
        slots = (slot for slot, _ in self._traced if slot.optimizer is not None)
        return [one for slot in slots for one in slot.held]

    def take_where(self, skipped: Tensor, before: dict[tuple[int, Any], Any]) -> None:
        """Let those that were set since be those from before, on steps that are skipped."""
        for container, key in self._held_by_optimizers():
            container[key] = number_where(skipped, before[id(container), key], container[key])

    def changed(self) -> Iterator[SetCount]:
        """What the step has set them to.

        Raises:
            UnsupportedState: one is no number any more.
        """
        for slot, found in self._traced:
            several: dict[Any, SetCount] = {}
            for container, key in slot.held:
                now = container.get(key, MISSING)
                if now is found:
                    continue
                is_constant = slot.optimizer is None and type(now) in (str, bool, type(None))
                if not (isinstance(now, (int, float)) or is_constant):
                    gone = "took it away" if now is MISSING else f"made it a {type(now).__name__}"
                    raise UnsupportedState(
                        f"{slot} is a Python number, and the step {gone}.",
                        remedy="keep it a number, or a tensor from the start",
                    )
                same = now.text if isinstance(now, TracedNumber) else repr(now)
                if same not in several:
                    several[same] = SetCount(slot, [], now)
                several[same].held.append((container, key))
            yield from several.values()

    def hold(self, container: dict[Any, Any], key: Any) -> bool:
        """Whether the step has found a traced number in a place."""
        return any(one is container and name == key for one, name, _ in self._before)

    def restore(self) -> None:
        """Put the numbers back that were there."""
        for container, key, value in self._before:
            container[key] = value
