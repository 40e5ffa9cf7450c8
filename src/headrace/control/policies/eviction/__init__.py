"""Which cached block goes first when the pool needs room."""

from __future__ import annotations

from typing import Protocol


class Eviction(Protocol):
    """Made without arguments, stateless."""

    def key(self, last_used: int, hits: int) -> tuple[int, ...]:
        """Lowest goes first. It may only grow as `last_used` (a logical clock) and `hits` (matches so far) grow."""
        ...
