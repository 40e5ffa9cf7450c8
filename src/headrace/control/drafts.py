"""The seam for speculative decoding: who proposes draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Proposes tokens that probably follow. The executor verifies them, so a bad proposal costs time, never truth."""

    @property
    def depth(self) -> int:
        """Most tokens ever proposed at once; 0 turns drafting off.

        With a depth above 0 a sequence is planned only once its last step is committed, since a proposal needs the
        tokens it follows.
        """
        ...

    def propose(self, request_id: str, token_ids: Sequence[int], at_most: int) -> tuple[int, ...]:
        """At most `at_most` tokens to follow `token_ids` (prompt and generated); empty if there is no good guess."""
        ...


class NoDraft:
    """Never proposes anything."""

    depth = 0

    def propose(self, request_id: str, token_ids: Sequence[int], at_most: int) -> tuple[int, ...]:
        return ()
