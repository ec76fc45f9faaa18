"""Compiled code of a graph that several processes run at the same time: all use it, or none does.

Another kernel rounds otherwise: where one process ran compiled code and another one the operations
one by one, their weights would drift apart. What each has to say goes along with a step of the
training (``graph/votes``), so that all of them know it before the next one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from fulgurite.backends.csx.compile.background.meanwhile import Meanwhile
from fulgurite.backends.csx.compile.background.queue import Job
from fulgurite.backends.csx.compile.checking.selfcheck import MiscompiledWarning
from fulgurite.backends.csx.compile.fabric import Call, Loaded
from fulgurite.backends.csx.compile.store.cache import Fetched
from fulgurite.backends.csx.compile.threads import Threads
from fulgurite.backends.csx.graph.votes import Vote, Votes


class Together(Meanwhile):
    """A graph that runs operation by operation until it is compiled in all processes.

    Args:
        job, reference, settle, threads: see ``Meanwhile``.
        votes: what the processes tell each other.
    """

    def __init__(
        self,
        job: Job,
        reference: Call,
        settle: Callable[[Job], Call],
        threads: Threads,
        votes: Votes,
    ) -> None:
        super().__init__(job, reference, settle, threads)
        self._votes = votes
        votes.wait_for(lambda: job.ended and job.failure is None)

    @property
    def is_over(self) -> bool:
        """Whether all processes have said so, or this one cannot go on."""
        self._votes.update_ready()
        return self.job.ended and (self._votes.compiled or self.job.failure is not None)

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run it once."""
        if self._votes.some_say(Vote.READY):  # what others have compiled is not too much here
            self.job.wanted = replace(self.job.wanted, worth=lambda fixed: True)
        return super().__call__(inputs)


_REFUSED = "run operation by operation (one of the processes cannot run compiled code)"


def found_together(
    find: Callable[[], Fetched[Call] | None], votes: Votes | None
) -> Fetched[Call] | None:
    """Compiled code that is there: for all processes at once, where they ask together."""
    if votes is None:
        return find()
    there = None
    try:
        there = find()
    finally:  # an error is an answer too, for which the other processes wait
        all_have_it = votes.everyone(there is not None)
    return there if all_have_it else None


def shared(votes: Votes, loaded: Loaded, reference: Callable[[], Call]) -> Callable[[], None]:
    """Let a graph run operation by operation as soon as one process refuses compiled code.

    Returns what is called where this one does, for that code is wrong.
    """

    def refuse() -> None:
        if loaded.how == _REFUSED:  # its compiled code was shared after its background job
            return
        loaded.run_by_operations(reference(), _REFUSED)
        loaded.settled()
        if votes.others_say(Vote.WRONG):
            warnings.warn(
                "The compiled program gave other numbers than its operations one by one in another"
                " process, whose warning says where. All processes go on operation by operation,"
                " slower, with the right numbers.",
                MiscompiledWarning,
                stacklevel=2,
            )

    def is_wrong() -> None:
        votes.say(Vote.WRONG, True)
        votes.say(Vote.REFUSES, True)

    votes.when_refused(refuse)
    return is_wrong
