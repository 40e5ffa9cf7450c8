"""Admit a request as soon as its first chunk fits; more run at once, and more are preempted when memory runs out."""

from __future__ import annotations


class Eager:
    def admits(
        self, *, whole_blocks: int, first_blocks: int, promised_blocks: int, free_blocks: int, watermark_blocks: int
    ) -> bool:
        return first_blocks + watermark_blocks <= free_blocks


POLICY = Eager
