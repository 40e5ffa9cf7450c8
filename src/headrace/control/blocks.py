"""The pool of KV blocks: reference counts, a free list, and blocks that only the prefix cache keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Reclaimer(Protocol):
    """Whoever keeps cached blocks (the prefix tree): told when one is idle, asked to give some up."""

    def idle(self, block: int) -> None:
        """The last reference to a cached block went away; it now counts as free and may be reclaimed."""
        ...

    def reclaim(self, count: int) -> None:
        """Uncache at least `count` idle blocks; the pool never asks for more than there are."""
        ...


class _NothingCached:
    def idle(self, block: int) -> None:
        raise AssertionError(f"block {block} is cached, but no one owns the cache")

    def reclaim(self, count: int) -> None:
        raise AssertionError(f"asked for {count} cached blocks, but no one owns the cache")


class BlockPool:
    """Ids 0 … num_blocks-1 of equal blocks.

    A block is *held* (references > 0), *idle* (no references, but the prefix cache keeps it; counts as free and is
    taken back when needed) or *unused*. Cached and held is possible: then other requests may share it.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._cached = bytearray(num_blocks)
        self._num_cached = 0
        self._num_idle = 0
        self._unused = list(range(num_blocks - 1, -1, -1))
        self._reclaimer: Reclaimer = _NothingCached()

    @property
    def free_blocks(self) -> int:
        """Blocks that `allocate` can give: unused ones and idle cached ones."""
        return len(self._unused) + self._num_idle

    @property
    def cached_blocks(self) -> int:
        """Blocks in the prefix cache, held or idle."""
        return self._num_cached

    def attach(self, reclaimer: Reclaimer) -> None:
        """Name the owner of cached blocks; once, before anything is cached."""
        self._reclaimer = reclaimer

    def references(self, block: int) -> int:
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        return bool(self._cached[block])

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each. The caller has checked `free_blocks`; too many is a fault."""
        unused = self._unused
        if len(unused) < count:
            if count > self.free_blocks:
                raise AssertionError(f"{count} blocks wanted, {self.free_blocks} of {self.num_blocks} free")
            self._reclaimer.reclaim(count - len(unused))
        taken = unused[len(unused) - count :]
        del unused[len(unused) - count :]
        for block in taken:
            self._references[block] = 1
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, which must be held or cached; ids below 0 (holes) are skipped."""
        references = self._references
        for block in blocks:
            if block < 0:
                continue
            if references[block] == 0:
                if not self._cached[block]:
                    raise AssertionError(f"block {block} is unused and cannot be shared")
                self._num_idle -= 1
            references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block; ids below 0 (holes) are skipped."""
        references = self._references
        for block in blocks:
            if block < 0:
                continue
            left = references[block] - 1
            if left < 0:
                raise AssertionError(f"block {block} released once too often")
            references[block] = left
            if left == 0:
                if self._cached[block]:
                    self._num_idle += 1
                    self._reclaimer.idle(block)
                else:
                    self._unused.append(block)

    def cache(self, block: int) -> None:
        """The prefix cache keeps a held block from now on."""
        if self._cached[block] or self._references[block] == 0:
            raise AssertionError(f"block {block} is already cached or not held")
        self._cached[block] = 1
        self._num_cached += 1

    def uncache(self, block: int) -> None:
        """The prefix cache lets go of a block; an idle one becomes unused."""
        if not self._cached[block]:
            raise AssertionError(f"block {block} is not cached")
        self._cached[block] = 0
        self._num_cached -= 1
        if self._references[block] == 0:
            self._num_idle -= 1
            self._unused.append(block)

    def check(self) -> None:
        """Assert that every block is in exactly one state and that the counts agree."""
        unused = set(self._unused)
        assert len(unused) == len(self._unused), "a block is twice in the free list"
        idle = 0
        for block, references in enumerate(self._references):
            cached = bool(self._cached[block])
            assert references >= 0, f"block {block} has {references} references"
            assert (block in unused) == (references == 0 and not cached), f"block {block} is free and not free"
            idle += references == 0 and cached
        assert idle == self._num_idle, f"{idle} idle blocks, counted {self._num_idle}"
        assert sum(self._cached) == self._num_cached
