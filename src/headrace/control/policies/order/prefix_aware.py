"""Among equally urgent requests, those with the longest cached prefix first - but no one is passed over for ever.

Serving a cached prefix while it is still there saves its recomputation. A request may be overtaken `max_bypasses`
times by later ones; from then on it goes before everything of its priority that has not waited as long.
"""

from __future__ import annotations

from collections import abc
from itertools import islice

from headrace.control.policies.order import HitTokens
from headrace.control.sequence import Rank, Sequence


class PrefixAware:
    def __init__(self, max_bypasses: int = 32, lookahead: int = 64) -> None:
        self.max_bypasses = max_bypasses
        self.lookahead = lookahead
        """How many of the longest-waiting requests are compared; bounds the work per step."""

    def rank(self, sequence: Sequence) -> Rank:
        return (sequence.request.priority, sequence.number)

    def candidates(self, waiting: abc.Sequence[Sequence], hit_tokens: HitTokens) -> abc.Iterator[Sequence]:
        near = waiting[: self.lookahead]

        def place(sequence: Sequence) -> tuple[int, int, int]:
            if sequence.bypassed >= self.max_bypasses:
                return (sequence.request.priority, 0, sequence.number)
            return (sequence.request.priority, 1, -hit_tokens(sequence))

        yield from sorted(near, key=place)
        yield from islice(waiting, self.lookahead, None)

    def admitted(self, sequence: Sequence, waiting: abc.Sequence[Sequence]) -> None:
        for other in islice(waiting, self.lookahead):
            if other is sequence:
                break
            other.bypassed += 1


POLICY = PrefixAware
