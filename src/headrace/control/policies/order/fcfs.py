"""First come, first served; the priority of a request has no say."""

from __future__ import annotations

from collections import abc

from headrace.control.policies.order import HitTokens
from headrace.control.sequence import Rank, Sequence


class Fcfs:
    def rank(self, sequence: Sequence) -> Rank:
        return (0, sequence.number)

    def candidates(self, waiting: abc.Sequence[Sequence], hit_tokens: HitTokens) -> abc.Iterator[Sequence]:
        return iter(waiting)

    def admitted(self, sequence: Sequence, waiting: abc.Sequence[Sequence]) -> None:
        pass


POLICY = Fcfs
