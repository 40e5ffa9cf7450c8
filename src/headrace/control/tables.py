"""The blocks of running sequences: taken from the pool, shared through the prefix cache, given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.base.units import ceil_div
from headrace.control.blocks import BlockPool
from headrace.control.demand import Demand
from headrace.control.prefix import Hit, PrefixCache
from headrace.control.sequence import Sequence
from headrace.control.step import BlockAppend, BlockCopy


class BlockTables:
    """Every change to a sequence's block tables, and the messages that tell the executor.

    All tables of a sequence have the same length; in a sliding group the blocks behind the window are -1.
    """

    def __init__(self, pool: BlockPool, prefix: PrefixCache, demand: Demand, max_batched_tokens: int) -> None:
        """`max_batched_tokens` bounds a chunk, and so what a sliding group needs at once."""
        self._pool = pool
        self._prefix = prefix
        self._demand = demand
        self._max_chunk_tokens = max_batched_tokens
        self._block_tokens = demand.block_tokens
        self._num_groups = demand.num_groups

    # How much there is

    def reach(self, room: int) -> int:
        """Tokens that tables with space for `room` tokens can hold once all free blocks are added."""
        return room + self._pool.free_blocks // self._num_groups * self._block_tokens

    def lack(self, sequence: Sequence, end: int) -> bool:
        """Whether the free blocks do not suffice to hold positions up to `end`."""
        missing = ceil_div(max(0, end - sequence.room), self._block_tokens)
        return missing * self._num_groups > self._pool.free_blocks

    def free_beside(self, hit: Hit) -> int:
        """Free blocks once a hit is held: its idle blocks count as free before, and no longer then."""
        tail: list[int] = [] if hit.tail is None else hit.tail.blocks
        references = self._pool.references
        return self._pool.free_blocks - sum(
            b >= 0 and references(b) == 0 for table in (*hit.tables, tail) for b in table
        )

    def room_after(self, hit: Hit, wanted: int) -> int:
        """Tokens after a hit, at most `wanted`, that the free blocks can take."""
        free = self.free_beside(hit) - (0 if hit.tail is None else self._num_groups)
        if free < 0:
            return 0
        whole = ceil_div(hit.length, self._block_tokens) + free // self._num_groups
        return min(wanted, whole * self._block_tokens - hit.length)

    def first_need(self, hit: Hit, length: int) -> int:
        """New blocks for the `length` tokens that follow a hit."""
        return (ceil_div(hit.length + length, self._block_tokens) - len(hit.path)) * self._num_groups

    def whole_need(self, known: int, hit: Hit) -> int:
        """New blocks for all of `known` tokens of which a hit is held."""
        chunk = min(self._max_chunk_tokens, known - hit.length)
        return max(0, self._demand.peak(known, chunk) - sum(b >= 0 for table in hit.tables for b in table))

    def promised(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still needs for its known tokens."""
        known = len(sequence.token_ids) + sequence.pending
        if known <= sequence.room:
            return 0
        chunk = min(self._max_chunk_tokens, known - sequence.scheduled)
        return max(0, self._demand.peak(known, chunk) - sum(b >= 0 for table in sequence.tables for b in table))

    def held_by_these_alone(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that nobody but these sequences holds."""
        references = self._pool.references
        holders = Counter(b for s in sequences for table in s.tables for b in table if b >= 0)
        return sum(references(block) == count for block, count in holders.items())

    # Taking

    def start(self, sequence: Sequence, hit: Hit, copies: list[BlockCopy]) -> list[int]:
        """Give a starting sequence the blocks of a hit.

        A hit that ends inside a block is continued in a copy, since a cached block may be shared and is never written.
        Returns the blocks to be copied from, with a reference that the caller drops once the step is planned: until
        then nothing else of the same step may write them.
        """
        self._prefix.touch(hit)
        sequence.place = self._prefix.pin(hit, sequence.request.namespace)
        for blocks in hit.tables:
            self._pool.retain(blocks)
        sequence.tables = [list(blocks) for blocks in hit.tables]
        sequence.room = len(hit.path) * self._block_tokens
        sequence.behind = [0] * self._num_groups
        if hit.tail is None:
            return []
        sources = [block for block in hit.tail.blocks if block >= 0]
        self._pool.retain(sources)
        targets = self._pool.allocate(self._num_groups)
        for table, source, target in zip(sequence.tables, hit.tail.blocks, targets, strict=True):
            table.append(target)
            if source >= 0:
                copies.append(BlockCopy(source, target))
        sequence.room += self._block_tokens
        return sources

    def grow(self, sequence: Sequence, end: int, appends: list[BlockAppend]) -> None:
        """Add blocks for positions up to `end`; the caller has seen to it that there are enough."""
        if end <= sequence.room:
            return
        count, first = ceil_div(end - sequence.room, self._block_tokens), len(sequence.tables[0])
        taken = self._pool.allocate(count * self._num_groups)
        for g, table in enumerate(sequence.tables):
            ids = taken[g * count : (g + 1) * count]
            table += ids
            appends.append(BlockAppend(sequence.slot, g, first, tuple(ids)))
        sequence.room += count * self._block_tokens

    def announce(self, sequence: Sequence, appends: list[BlockAppend]) -> None:
        """Tell of blocks that were replaced by equal ones of the prefix cache."""
        for g, position in sequence.dirty:
            appends.append(BlockAppend(sequence.slot, g, position, (sequence.tables[g][position],)))
        sequence.dirty.clear()

    # Sharing and giving back

    def publish(self, sequence: Sequence) -> None:
        """Offer what is computed for certain to the prefix cache; a rejected draft or a step in flight never counts."""
        tokens = min(sequence.computed, len(sequence.token_ids))
        if tokens:
            sequence.place, switched = self._prefix.publish(
                sequence.request.namespace, sequence.encoded, tokens, sequence.tables, sequence.place
            )
            sequence.dirty += switched

    def drop_behind_windows(self, sequence: Sequence) -> None:
        """Return blocks that no later query of a sliding group sees. Done at commit, after they could be published."""
        for g, window in self._demand.windows:
            keep = max(0, sequence.computed - window + 1) // self._block_tokens
            if keep > sequence.behind[g]:
                table = sequence.tables[g]
                self._pool.release(table[sequence.behind[g] : keep])
                table[sequence.behind[g] : keep] = [-1] * (keep - sequence.behind[g])
                sequence.behind[g] = keep

    def vacate(self, sequence: Sequence) -> None:
        """Give back every block."""
        self._prefix.unpin(sequence.place)
        sequence.place = None
        for table in sequence.tables:
            self._pool.release(table)
            table.clear()
        sequence.room = 0
        sequence.dirty.clear()

    def check(self, running: list[Sequence], unpublished: Iterable[Sequence] = ()) -> None:
        """Assert that the pool's references are exactly those of the running sequences' tables, and their shape.

        Sequences that are not published yet may keep blocks behind their windows.
        """
        self._pool.check()
        self._prefix.check()
        references = [0] * self._pool.num_blocks
        windows = dict(self._demand.windows)
        behind_kept = set(map(id, unpublished))
        for sequence in running:
            for g, table in enumerate(sequence.tables):
                for block in table:
                    if block >= 0:
                        references[block] += 1
                assert len(table) * self._block_tokens == sequence.room
                window = windows.get(g)
                seen = 0 if window is None else max(0, sequence.computed - window + 1) // self._block_tokens
                assert all(block >= 0 for block in table[seen:]), "a block that is still seen is missing"
                if id(sequence) not in behind_kept:
                    assert all(block < 0 for block in table[:seen]), "a block behind the window was kept"
            node = sequence.place
            while node is not None and node.attached and node.parent is not None:
                for g, block in enumerate(node.blocks):
                    if g not in windows:
                        assert sequence.tables[g][node.depth - 1] == block, "a sequence's prefix is not the tree's"
                node = node.parent
        for block, count in enumerate(references):
            assert self._pool.references(block) == count, f"block {block}: {self._pool.references(block)} != {count}"
