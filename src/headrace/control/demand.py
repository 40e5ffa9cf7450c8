"""How many blocks a sequence needs, from the cache layout alone."""

from __future__ import annotations

from headrace.base.units import ceil_div
from headrace.spec.cache import CacheLayout


def blocks_touched(tokens: int, block_tokens: int) -> int:
    """Most blocks that `tokens` consecutive positions can touch, at the worst alignment."""
    return 0 if tokens <= 0 else (tokens + block_tokens - 2) // block_tokens + 1


class Demand:
    """Block counts over all cache groups of one layout."""

    def __init__(self, layout: CacheLayout) -> None:
        self.block_tokens = layout.block_tokens
        self.num_groups = layout.num_groups
        self.windows: tuple[tuple[int, int], ...] = tuple(
            (g, group.window) for g, group in enumerate(layout.groups) if group.window is not None
        )
        """(group, window in tokens) of each sliding group."""
        self._num_full = layout.num_groups - len(self.windows)

    def peak(self, tokens: int, chunk_tokens: int) -> int:
        """Most blocks held at once while `tokens` positions are computed in chunks of at most `chunk_tokens`.

        A full group keeps every block; a sliding one those that a chunk's queries see, window - 1 tokens before it.
        """
        whole = ceil_div(tokens, self.block_tokens)
        sliding = (min(whole, blocks_touched(w - 1 + chunk_tokens, self.block_tokens)) for _, w in self.windows)
        return self._num_full * whole + sum(sliding)

    def capacity_tokens(self, num_blocks: int, at_most: int) -> int:
        """Most positions one sequence alone can hold in `num_blocks`, computed one at a time; never above `at_most`."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            if self.peak(middle, 1) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low
