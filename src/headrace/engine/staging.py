"""Which keys are staged: a cache whose keys are coded in groups of tokens keeps those of unfinished groups as they were computed,
one group per slot (and layer). No arrays of keys here, only what they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.spec.cache import CacheLayout
from headrace.spec.precision import kv_precision

Ints = npt.NDArray[np.int64]


class StagedGroups:
    """Knows for each slot and cache group whose keys lie in its place of the staging.

    They are those of a block's unfinished group as long as nobody else has written to the block or copied into it.
    """

    def __init__(self, layout: CacheLayout, max_num_seqs: int, num_blocks: int) -> None:
        self._size, self._block_tokens = kv_precision(layout.kv_precision).key_group, layout.block_tokens
        shape = (layout.num_groups, max_num_seqs)
        self._block = np.full(shape, -1, np.int64)
        self._end = np.zeros(shape, np.int64)
        self._owner = np.full(num_blocks, -1, np.int64)

    def copied(self, targets: Sequence[int]) -> None:
        """These blocks hold something else now."""
        self._owner[list(targets)] = -1

    def begin(
        self, group: int, slots: Ints, starts: Ints, lengths: Ints, table: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.bool_]:
        """Note what a step will stage in cache group `group`, where sequence i computes positions [starts[i], starts[i] +
        lengths[i]) and has the blocks `table[i]`. Returns the sequences that go on inside a group of tokens whose keys are not
        staged and must be read back from their codes first."""
        ends = starts + lengths
        rows = np.arange(len(slots))
        first_block, last_block = starts // self._block_tokens, (ends - 1) // self._block_tokens
        first, last = table[rows, first_block], table[rows, last_block]
        staged = (
            (self._block[group, slots] == first)
            & (self._owner[first] == slots)
            & (self._end[group, slots] >= starts)
            & ((self._end[group, slots] - 1) // self._size == starts // self._size)
        )
        # Blocks between the two are new, so nobody's staging can be of them but by an older owner's, which ends here.
        between = np.arange(int((last_block - first_block).max()) + 1)
        columns = np.minimum(first_block[:, None] + between, last_block[:, None])
        self._owner[table[rows[:, None], columns]] = -1
        self._owner[last] = slots
        self._block[group, slots], self._end[group, slots] = last, ends
        return (starts % self._size != 0) & ~staged


def touched_groups(starts: Ints, lengths: Ints, size: int) -> tuple[Ints, Ints, Ints]:
    """Groups of `size` tokens that positions [start, start + length) of each sequence lie in, sequence by sequence.

    Returns the sequence and the index of each group, and of each sequence where its first one stands.
    """
    first, last = starts // size, (starts + lengths - 1) // size
    counts = last - first + 1
    firsts = np.cumsum(counts) - counts
    owners = np.repeat(np.arange(len(starts)), counts)
    return owners, first[owners] + np.arange(int(counts.sum())) - firsts[owners], firsts


def group_places(
    tables: npt.NDArray[np.int32], owners: Ints, indices: Ints, block_tokens: int, size: int
) -> npt.NDArray[np.int64]:
    """Where group `indices[…]` of `size` tokens of sequence `owners[…]` lies among all groups of the pool."""
    per_block = block_tokens // size
    return tables[owners, indices // per_block].astype(np.int64) * per_block + indices % per_block
