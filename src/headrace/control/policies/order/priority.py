"""Lower priority numbers first, then first come, first served.

Strict: an endless stream of urgent requests keeps less urgent ones waiting, as asked.
"""

from __future__ import annotations

from collections import abc

from headrace.control.policies.order import HitTokens
from headrace.control.sequence import Rank, Sequence


class Priority:
    def rank(self, sequence: Sequence) -> Rank:
        return (sequence.request.priority, sequence.number)

    def candidates(self, waiting: abc.Sequence[Sequence], hit_tokens: HitTokens) -> abc.Iterator[Sequence]:
        return iter(waiting)

    def admitted(self, sequence: Sequence, waiting: abc.Sequence[Sequence]) -> None:
        pass


POLICY = Priority
