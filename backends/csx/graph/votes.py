"""What processes that train together tell each other at every step, beside the gradients.

Some numbers travel in the last bucket of a step's gradients, so that no message is sent for them;
where weights are in parts, ahead of the backward pass, since updates wait for what was voted, and
gradients would be held until then. They are whether this process could run compiled code by now,
whether it must not, whether this is the last batch of its epoch, and whether it wants the next step
to be audited. After the step all of them know the same, and do the same before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor


class Vote(IntEnum):
    """What a process says at each step, by its place in the numbers."""

    READY = 0  # its programs are compiled
    REFUSES = 1  # compiled code is wrong here, or cannot be had
    LAST = 2  # the step is the last of its epoch
    STOPS = 3  # a signal came that ends the run
    AUDITS = 4  # the next step is to be traced again
    WRONG = 5  # compiled code gave wrong numbers here
    REQUEUES = 6  # a cluster's signal came: the job is saved, and begins again elsewhere
    FIRST = 7  # this is rank 0, whose buffers all take over
    LOOKS = 8  # the step is traced again: afterwards weights and optimizer state are compared
    PRESENT = 9  # it takes part: a step that is run alone has but its own share of the numbers


_BITS = 32
"""Of the digest that each process says too, a number each: their means are 0 or 1 where all say the
same. Means of larger digits would round too far for hundreds of processes."""


class Votes:
    """What this process says, and what all of them said last.

    Args:
        count: how many processes there are.
        everyone: whether something is so in every process; all of them ask at the same time.

    Attributes:
        ballot: what this process says: float32, read by the program at each step.
        compiled: whether all have agreed to run compiled code.
        refused: whether one of them must not, so that nobody does any more.
        meets: whether all of them are about to load the same program.
        are_counted: whether a step was done that took votes along.
        differ: whether the processes had different digests at the last step.
    """

    def __init__(self, count: int, everyone: Callable[[bool], bool]) -> None:
        with torch.inference_mode(False):  # programs read it in other modes too
            self.ballot = torch.zeros(len(Vote) + _BITS)
        self._count, self._everyone = count, everyone
        self._said = [False] * len(Vote)
        self.say(Vote.PRESENT, True)
        self._shares = [0.0] * len(Vote)  # of the processes that said so
        self._waiting: list[Callable[[], bool]] = []
        self._refuse: list[Callable[[], None]] = []
        self.compiled = self.refused = self.meets = self.are_counted = self.differ = False
        self._digest = 0

    def say(self, vote: Vote, yes: bool) -> None:
        """Say something from now on."""
        if self._said[vote] is not yes:
            self._said[vote] = yes
            self.ballot[vote] = float(yes)

    def say_digest(self, digest: int) -> None:
        """Say what a step depends on that has to be the same in all processes: 32 bits of it."""
        if digest != self._digest:
            self._digest = digest
            bits = [digest >> i & 1 for i in range(_BITS)]
            self.ballot[len(Vote) :] = torch.tensor(bits)

    def hear(self, shares: Tensor) -> None:
        """A step was done: this is the share of the processes that said each."""
        self._shares, self.are_counted = shares.tolist(), True
        self.differ = _differ(self._shares, self._count)
        self.compiled = self.compiled or (self.all_say(Vote.READY) and not self.refused)
        if self.some_say(Vote.REFUSES) and not self.refused:
            self.refused, self.compiled = True, False
            for refuse in self._refuse:
                refuse()

    def all_say(self, vote: Vote) -> bool:
        """Whether all processes said something with the last step."""
        # a share is a mean of float32, and as such no exact fraction
        return self._shares[vote] * self._count > self._count - 0.5

    def some_say(self, vote: Vote) -> bool:
        """Whether at least one did."""
        return self._shares[vote] * self._count > 0.5

    def others_say(self, vote: Vote) -> bool:
        """Whether another process did, and this one does not."""
        return self.some_say(vote) and not self._said[vote]

    def everyone(self, found: bool) -> bool:
        """Whether compiled code was found in every process; asked only where all of them meet."""
        if self.meets:
            self.meets, self.compiled = False, self._everyone(found)
        return self.compiled

    def wait_for(self, is_ready: Callable[[], bool]) -> None:
        """Say that this process is ready when that is so of everything it waits for."""
        self._waiting.append(is_ready)

    def update_ready(self) -> None:
        """Say, before a step, whether this process is ready."""
        self.say(Vote.READY, all(is_ready() for is_ready in self._waiting))

    def when_refused(self, refuse: Callable[[], None]) -> None:
        """Have something done as soon as one of the processes must not run compiled code."""
        self._refuse.append(refuse)
        if self.refused:
            refuse()


class StepsDiffer(Exception):
    """A step that ends before anything is updated: other processes run another one.

    Attributes:
        shares: what all of them have said.
    """

    def __init__(self, shares: Tensor) -> None:
        super().__init__("other processes run another step")
        self.shares = shares


def apart(shares: Tensor, count: int) -> Tensor:
    """Whether processes had different digests, in operations that need no decomposing: bool []."""
    bits, least = shares[len(Vote) :] / shares[Vote.PRESENT], 0.5 / count
    return torch.logical_and(bits > least, bits < 1 - least).any()


def _differ(shares: list[float], count: int) -> bool:
    """The same on the host."""
    present, least = shares[Vote.PRESENT], 0.5 / count
    return any(least < bit / present < 1 - least for bit in shares[len(Vote) :])


def _agreed(shares: Tensor, count: int) -> Tensor:
    """What all have said, as it is.

    Raises:
        StepsDiffer: their digests differ.
    """
    if _differ(shares.tolist(), count):
        raise StepsDiffer(shares)
    return shares.clone()


_LIBRARY: Any = torch.library.Library("fulgurite_votes", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("agreed(Tensor shares, int count) -> Tensor")
_LIBRARY.impl("agreed", _agreed, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fulgurite_votes::agreed", lambda shares, count: torch.empty_like(shares), lib=_LIBRARY
)

AGREED: Any = torch.ops.fulgurite_votes.agreed.default
"""Where a step goes on only if all processes run the same: operation by operation it ends there;
lowered, it changes no state (``passes.hold``)."""


class VotesCall:
    """Hears, after a step, what all processes have said with it."""

    def __init__(self, votes: Votes, shares: Tensor, then: Callable[[], None]) -> None:
        self.votes, self.value, self._then = votes, shares, then

    def __call__(self, value: Any) -> None:
        """Hear it."""
        self.votes.hear(value)
        self._then()


def votes_of(calls: Iterable[object]) -> Votes | None:
    """Those that a step takes along, among what is done on the host after it."""
    return next((call.votes for call in calls if isinstance(call, VotesCall)), None)
