"""When there is room for one more request. (With nothing running, the first in line is always let in.)"""

from __future__ import annotations

from typing import Protocol


class Admission(Protocol):
    """Made without arguments, stateless."""

    def admits(
        self, *, whole_blocks: int, first_blocks: int, promised_blocks: int, free_blocks: int, watermark_blocks: int
    ) -> bool:
        """Whether to start a request.

        `whole_blocks`: what it still needs for all its known tokens; `first_blocks`: for its first chunk;
        `promised_blocks`: what running requests still need for theirs; `free_blocks`: what the pool has, the request's
        own cache hits already taken off; `watermark_blocks`: to be left for growth.
        """
        ...
