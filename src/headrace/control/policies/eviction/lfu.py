"""Evict what was matched least often; among equals, what was used longest ago."""

from __future__ import annotations


class Lfu:
    def key(self, last_used: int, hits: int) -> tuple[int, ...]:
        return (hits, last_used)


POLICY = Lfu
