"""Counters of the run, traced: how many steps and epochs were done, and which batch this is.

A step that computes with one takes it as an input of the program; where Python looks at one, or at
what follows from it (``if batch_idx % 4 == 0``, ``min(1.0, self.global_step / 500)``), what it saw
is a guard, and another answer another program. So is a remainder by 4 at most, of which each
value may have one: ``optimizers[batch_idx % 2]``. Python that takes another value itself
(``range``, ``int()``, an index, an f-string) keeps it, and the user is warned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from fulgurite.backends.csx.hyperparams.traced_float import Numbers, TracedNumber

STEPS, EPOCH, INDEX, LAST = "global_step", "current_epoch", "batch_idx", "is_last_batch"
"""What a step may ask of the run, by Lightning's names."""
BEGINS = "whether a window of accumulation begins"
"""What a step asks that clears gradients where its own code has looked at them."""
COUNTERS = (STEPS, EPOCH, INDEX)
"""Those that are numbers, in the order of the program's inputs."""

FOLLOWED, KEPT = set[tuple[str, str]](), set[tuple[str, str]]()
"""The user's functions, by file and name, that computed with counters in this run, and those that
took the value of one."""


def only_follow(functions: Iterable[tuple[str, str]]) -> bool:
    """Whether some of these functions computed with counters, and none took the value of one."""
    named = set(functions)
    return not named.isdisjoint(FOLLOWED) and named.isdisjoint(KEPT)


class RunNumber(TracedNumber):
    """A counter, or what follows from counters: Python's reads of its value are no guards.

    But for those of one that is one of few.

    Attributes:
        note: is called where Python takes the value.
    """

    note: Callable[..., object]
    is_of_run: ClassVar[bool] = True

    def derived(
        self, value: float, tensor: Any, compute: Callable[[Numbers], float], text: str
    ) -> RunNumber:
        """What follows from it is one too."""
        made = RunNumber(value, tensor, self.guards, compute, text)
        made.note, made.may_grow = self.note, self.may_grow
        made.is_one_of_few = self.is_one_of_few
        return made

    def observe(self, text: str, look: Callable[[float], Any]) -> Any:
        """What ``look`` sees: an answer is a guard, a value is kept."""
        if isinstance(result := look(self.value), bool) or self.is_one_of_few:
            return super().observe(text, look)
        self._note()
        return result

    def _kept(self) -> float:
        return self.observe("{}", lambda value: value)  # type: ignore[no-any-return]

    def _note(self) -> None:
        self.note(value=self.value if self.may_grow else None)

    def __hash__(self) -> int:
        return hash(self._kept())

    def __repr__(self) -> str:
        return repr(self._kept())

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self._kept(), spec)

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return type(self.value), (self._kept(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> float:
        return self._kept()
