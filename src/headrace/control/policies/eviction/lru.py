"""Evict what was used longest ago."""

from __future__ import annotations


class Lru:
    def key(self, last_used: int, hits: int) -> tuple[int, ...]:
        return (last_used,)


POLICY = Lru
