"""Admit a request only if all its known tokens fit beside those already promised, so that prefills never fight."""

from __future__ import annotations


class Reserve:
    def admits(
        self, *, whole_blocks: int, first_blocks: int, promised_blocks: int, free_blocks: int, watermark_blocks: int
    ) -> bool:
        return whole_blocks + promised_blocks + watermark_blocks <= free_blocks


POLICY = Reserve
