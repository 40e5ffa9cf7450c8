"""In which order waiting requests are admitted and running ones keep their place."""

from __future__ import annotations

from collections import abc
from typing import Protocol

from headrace.control.sequence import Rank, Sequence

HitTokens = abc.Callable[[Sequence], int]


class Order(Protocol):
    """Made without arguments; may keep state about the requests it has seen."""

    def rank(self, sequence: Sequence) -> Rank:
        """A total order, fixed for the sequence's life: the lowest is served first and preempted last."""
        ...

    def candidates(self, waiting: abc.Sequence[Sequence], hit_tokens: HitTokens) -> abc.Iterator[Sequence]:
        """All of `waiting` (given by rank), best first. `hit_tokens` probes the prefix cache and costs O(its answer).

        The scheduler admits from the front and stops at the first that does not fit, so no small request slips past a
        large one for ever.
        """
        ...

    def admitted(self, sequence: Sequence, waiting: abc.Sequence[Sequence]) -> None:
        """`sequence`, still in `waiting`, has just been admitted."""
        ...
