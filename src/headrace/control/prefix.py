"""The prefix cache: a radix tree over namespace and token ids whose edges are blocks of the pool.

Matching is exact to the token, or with `whole_blocks` to the block. A match may end inside a block; the caller then copies
that block and goes on writing in the copy, so a cached token's KV is written once and never changes while it is cached.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from typing import Protocol

import msgspec

from headrace.control.blocks import BlockPool
from headrace.control.demand import Demand
from headrace.control.node import TOKEN_BYTES, Node
from headrace.control.policies.eviction import Eviction

Tables = Sequence[list[int]]
"""Per cache group: the block id of each logical block position, -1 where there is none behind a sliding window."""


class Hit(msgspec.Struct, frozen=True):
    """A cached prefix of `length` tokens: whole blocks of `path`, then `tail_tokens` from the block of `tail`.

    `tables`: the whole blocks per group; blocks wholly behind a sliding window at `length` are -1.
    """

    length: int
    path: tuple[Node, ...]
    tail: Node | None
    tail_tokens: int
    tables: tuple[tuple[int, ...], ...]


class PrefixCache(Protocol):
    """What the scheduler asks of a prefix cache."""

    enabled: bool

    @property
    def publications(self) -> int:
        """Grows with everything published; unchanged means that no match can have become longer."""
        ...

    def match(self, namespace: str, key: bytes, limit: int) -> Hit:
        """The longest usable cached prefix of the encoded tokens `key`, at most `limit` tokens."""
        ...

    def touch(self, hit: Hit) -> None:
        """The hit is being used: its blocks move to the end of the eviction order."""
        ...

    def pin(self, hit: Hit, namespace: str) -> Node | None:
        """Hold the place where the hit's whole blocks end; give it back to `publish` or `unpin`."""
        ...

    def unpin(self, place: Node | None) -> None: ...

    def publish(
        self, namespace: str, key: bytes, tokens: int, tables: Tables, place: Node | None
    ) -> tuple[Node | None, list[tuple[int, int]]]:
        """Offer the computed first `tokens` of `key`, held in `tables`; returns the new place and what changed.

        Where the tree already has a whole block of the same tokens, the caller's table is switched to it and its own
        block released; those (group, logical block) pairs are returned.
        """
        ...

    def forget(self, namespace: str, key: bytes) -> None:
        """Drop every cached prefix that could have contributed to `key`: its KV is suspect."""
        ...

    def flush(self) -> None:
        """Drop everything; live requests keep their blocks."""
        ...

    def check(self) -> None: ...


class NoPrefix:
    """Never matches, keeps nothing."""

    enabled = False
    publications = 0

    def __init__(self, num_groups: int) -> None:
        self._miss = Hit(0, (), None, 0, ((),) * num_groups)

    def match(self, namespace: str, key: bytes, limit: int) -> Hit:
        return self._miss

    def touch(self, hit: Hit) -> None:
        pass

    def pin(self, hit: Hit, namespace: str) -> None:
        return None

    def unpin(self, place: Node | None) -> None:
        pass

    def publish(
        self, namespace: str, key: bytes, tokens: int, tables: Tables, place: Node | None
    ) -> tuple[None, list[tuple[int, int]]]:
        return None, []

    def forget(self, namespace: str, key: bytes) -> None:
        pass

    def flush(self) -> None:
        pass

    def check(self) -> None:
        pass


_LEAF = -1  # in the eviction queue: the whole node, rather than its block of one sliding group


class PrefixTree:
    """The prefix cache over a pool.

    Who holds a node's full-attention block also holds those of all its ancestors, so idle blocks can always be
    reclaimed leaf by leaf. A sliding group's idle block can go on its own and leaves a hole; a match of length L needs
    only the window - 1 tokens before L of such a group.
    """

    enabled = True

    def __init__(self, pool: BlockPool, demand: Demand, eviction: Eviction, *, whole_blocks: bool = False) -> None:
        self.publications = 0
        self._pool = pool
        self._whole_blocks = whole_blocks
        self._block_tokens = demand.block_tokens
        self._stride = demand.block_tokens * TOKEN_BYTES
        self._groups = range(demand.num_groups)
        self._window: list[int | None] = [None] * demand.num_groups
        for g, window in demand.windows:
            self._window[g] = window
        self._windows = demand.windows
        self._eviction = eviction
        self._roots: dict[str, Node] = {}
        self._root_names: dict[Node, str] = {}
        self._owner: dict[int, tuple[Node, int]] = {}
        self._queue: list[tuple[tuple[int, ...], int, Node, int]] = []
        self._serial = count()
        self._clock = 0
        self._miss = Hit(0, (), None, 0, ((),) * demand.num_groups)
        pool.attach(self)

    # Matching

    def match(self, namespace: str, key: bytes, limit: int) -> Hit:
        root = self._roots.get(namespace)
        if root is None or limit <= 0:
            return self._miss
        stride, end, at = self._stride, min(limit * TOKEN_BYTES, len(key)), 0
        path: list[Node] = []
        node = root
        while at + stride <= end:
            child = node.children.get(key[at : at + stride])
            if child is None:
                break
            path.append(child)
            node = child
            at += stride
        if self._windows:
            return self._longest_valid(root, path, key, end)
        tail, shared = next(self._tails(node, key[at : min(at + stride, end)]), (None, 0))
        return self._hit(path, tail, shared)

    def _tails(self, node: Node, rest: bytes) -> Iterator[tuple[Node, int]]:
        """Blocks behind `node` that can be shared in part, the longest part first."""
        return iter(()) if self._whole_blocks else node.by_common_prefix(rest)

    def _longest_valid(self, root: Node, path: list[Node], key: bytes, end: int) -> Hit:
        """Shorten a token match until every sliding group has its window: from the deepest place upwards."""
        # valid_from[d]: shortest valid length once the first d blocks of the path, with their holes, are used.
        valid_from = [0]
        for node in path:
            least = valid_from[-1]
            for g, window in self._windows:
                if node.blocks[g] < 0:
                    least = max(least, node.depth * self._block_tokens + window - 1)
            valid_from.append(least)
        for depth in range(len(path), -1, -1):
            node = path[depth - 1] if depth else root
            at = depth * self._stride
            for tail, shared in self._tails(node, key[at : min(at + self._stride, end)]):
                length = depth * self._block_tokens + shared
                whole = all(tail.blocks[g] >= 0 or window == 1 for g, window in self._windows)
                if whole and length >= valid_from[depth]:
                    return self._hit(path[:depth], tail, shared)
            if depth * self._block_tokens >= valid_from[depth]:
                return self._hit(path[:depth], None, 0)
        return self._miss

    def _hit(self, path: list[Node], tail: Node | None, tail_tokens: int) -> Hit:
        length = len(path) * self._block_tokens + tail_tokens
        if length == 0:
            return self._miss
        tables = []
        for g in self._groups:
            window = self._window[g]
            seen = 0 if window is None else max(0, length - window + 1) // self._block_tokens
            seen = min(seen, len(path))
            tables.append((-1,) * seen + tuple([node.blocks[g] for node in path[seen:]]))
        return Hit(length, tuple(path), tail, tail_tokens, tuple(tables))

    def touch(self, hit: Hit) -> None:
        self._clock += 1
        nodes = hit.path if hit.tail is None else (*hit.path, hit.tail)
        for node in nodes:
            node.last_used = self._clock
            node.hits += 1
        for _, window in self._windows:
            for node in nodes[max(0, hit.length - window + 1) // self._block_tokens :]:
                node.window_used = self._clock

    # Places

    def _root(self, namespace: str) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, b"", [])
            self._root_names[root] = namespace
        return root

    def pin(self, hit: Hit, namespace: str) -> Node:
        place = hit.path[-1] if hit.path else self._root(namespace)
        place.pins += 1
        return place

    def unpin(self, place: Node | None) -> None:
        if place is None:
            return
        place.pins -= 1
        self._settle(place)

    # Publishing

    def publish(
        self, namespace: str, key: bytes, tokens: int, tables: Tables, place: Node | None
    ) -> tuple[Node, list[tuple[int, int]]]:
        node = place if place is not None and place.attached else self._root(namespace)
        self._clock += 1
        switched: list[tuple[int, int]] = []
        whole = tokens // self._block_tokens
        for i in range(node.depth, whole):
            part = key[i * self._stride : (i + 1) * self._stride]
            child = node.children.get(part)
            if child is None:
                blocks = [table[i] for table in tables]
                if self._is_shared(blocks):
                    break
                child = self._insert(node, part, blocks)
            else:
                self._merge(child, i, tables, switched)
                child.last_used = child.window_used = self._clock
            node = child
        else:
            self._publish_tail(node, key[whole * self._stride : tokens * TOKEN_BYTES], whole, tables)
        if node is not place:
            node.pins += 1
            self.unpin(place)
        return node, switched

    def _publish_tail(self, node: Node, rest: bytes, position: int, tables: Tables) -> None:
        """Publish the begun block after the whole ones, unless there is nothing in it or it is known already."""
        if not rest or self._whole_blocks:
            return
        longer = node.extension_of(rest)
        if longer is not None:
            longer.last_used = longer.window_used = self._clock
            return
        blocks = [table[position] for table in tables]
        if not self._is_shared(blocks):
            self._insert(node, rest, blocks)

    def _is_shared(self, blocks: list[int]) -> bool:
        """Whether someone beside the publisher holds a block, which was then in the tree before a flush.

        It may not come back: its other holders need not hold the blocks that are now before it, and those could not be
        reclaimed leaf by leaf. The last holder may publish it again.
        """
        return any(block >= 0 and self._pool.references(block) > 1 for block in blocks)

    def _insert(self, parent: Node, key: bytes, blocks: list[int]) -> Node:
        shorter = parent.prefix_of(key)
        if shorter is not None:  # what it holds, the new node holds too
            self._detach(shorter)
        node = Node(parent, key, blocks)
        node.last_used = node.window_used = self._clock
        parent.add(node)
        for g, block in enumerate(blocks):
            if block >= 0:
                self._pool.cache(block)
                self._owner[block] = (node, g)
        self.publications += 1
        return node

    def _merge(self, node: Node, position: int, tables: Tables, switched: list[tuple[int, int]]) -> None:
        for g, table in enumerate(tables):
            mine, kept = table[position], node.blocks[g]
            if mine == kept or mine < 0:
                continue
            if kept < 0:
                if not self._is_shared([mine]):
                    node.blocks[g] = mine
                    self._pool.cache(mine)
                    self._owner[mine] = (node, g)
                    self.publications += 1
            else:
                self._pool.retain((kept,))
                self._pool.release((mine,))
                table[position] = kept
                switched.append((g, position))

    # Dropping

    def _detach(self, node: Node) -> None:
        """Take a childless node out of the tree."""
        assert node.parent is not None
        node.parent.remove(node)
        self._bury(node)

    def _bury(self, node: Node) -> None:
        node.attached = False
        for block in node.blocks:
            if block >= 0:
                del self._owner[block]
                self._pool.uncache(block)

    def forget(self, namespace: str, key: bytes) -> None:
        root = self._roots.get(namespace)
        if root is None:
            return
        # Everything below the nearest first block goes: the fault may have entered through any part of the path.
        nearest = 0
        for top, shared in list(root.by_common_prefix(key[: self._stride])):
            if shared < nearest:
                break
            nearest = shared
            root.remove(top)
            for node in top.walk():
                self._bury(node)
        self._settle(root)

    def flush(self) -> None:
        for root in list(self._roots.values()):
            for node in root.walk():
                self._bury(node)
        self._roots.clear()
        self._root_names.clear()
        self._queue.clear()

    # Reclaiming: a queue of nodes that were idle when they entered it; each entry is checked again when it comes up.

    def idle(self, block: int) -> None:
        node, g = self._owner[block]
        if self._window[g] is not None:
            self._enqueue(node, g)
        if self._is_idle_leaf(node):
            self._enqueue(node, _LEAF)

    def reclaim(self, count: int) -> None:
        while count > 0:
            key, _, node, g = heapq.heappop(self._queue)
            node.queued &= ~(1 << (g + 1))
            if not node.attached:
                continue
            if key != self._key(node, g):
                self._enqueue(node, g)
            elif g == _LEAF:
                if self._is_idle_leaf(node):
                    count -= sum(block >= 0 for block in node.blocks)
                    self._detach(node)
                    assert node.parent is not None
                    self._settle(node.parent)
            elif node.blocks[g] >= 0 and self._pool.references(node.blocks[g]) == 0:
                block, node.blocks[g] = node.blocks[g], -1
                del self._owner[block]
                self._pool.uncache(block)
                count -= 1
                self._settle(node)

    def _key(self, node: Node, g: int) -> tuple[int, ...]:
        return self._eviction.key(node.last_used if g == _LEAF else node.window_used, node.hits)

    def _enqueue(self, node: Node, g: int) -> None:
        bit = 1 << (g + 1)
        if not node.queued & bit:
            node.queued |= bit
            heapq.heappush(self._queue, (self._key(node, g), next(self._serial), node, g))
            if (
                len(self._queue) > 1024 + 4 * self._pool.num_blocks
            ):  # where nothing is ever reclaimed, dead nodes pile up
                self._queue = [entry for entry in self._queue if entry[2].attached]
                heapq.heapify(self._queue)

    def _is_idle_leaf(self, node: Node) -> bool:
        if node.children or node.pins or node.parent is None:
            return False
        references = self._pool.references
        return all(block < 0 or references(block) == 0 for block in node.blocks)

    def _settle(self, node: Node) -> None:
        """A node lost a child, a pin or a block: remove it if it has become empty, else see if it can be evicted."""
        while node.attached and not node.children and not node.pins:
            if node.parent is None:
                del self._roots[self._root_names.pop(node)]
                node.attached = False
                return
            if any(block >= 0 for block in node.blocks):
                if self._is_idle_leaf(node):
                    self._enqueue(node, _LEAF)
                return
            parent = node.parent
            self._detach(node)
            node = parent

    def check(self) -> None:
        """Assert the shape of the tree and its agreement with the pool."""
        self._pool.check()
        owned = 0
        for namespace, root in self._roots.items():
            assert self._root_names[root] == namespace
            assert root.children or root.pins, "an empty root was kept"
            for node in root.walk():
                assert node.attached
                assert node.pins >= 0
                keys = sorted(node.children)
                assert node._sorted is None or node._sorted == keys
                for a, b in pairwise(keys):
                    assert not b.startswith(a), "a child's key is a prefix of its sibling's"
                for key, child in node.children.items():
                    assert child.parent is node
                    assert child.key == key
                    assert child.depth == node.depth + 1
                if node is root:
                    continue
                assert 0 < len(node.key) <= self._stride
                assert len(node.key) % TOKEN_BYTES == 0
                assert len(node.key) == self._stride or not node.children, "a partial block has children"
                assert node.children or node.pins or any(b >= 0 for b in node.blocks), "an empty leaf was kept"
                for g, block in enumerate(node.blocks):
                    assert block >= 0 or self._window[g] is not None, "a hole in a full-attention group"
                    if block >= 0:
                        owned += 1
                        assert self._owner[block] == (node, g)
                        assert self._pool.is_cached(block)
        assert owned == len(self._owner) == self._pool.cached_blocks
        # Every idle block must be reclaimable: on its own if its group slides, else once its descendants are gone.
        for block, (node, g) in self._owner.items():
            if self._pool.references(block) == 0 and self._window[g] is None:
                for below in node.walk():
                    assert not below.pins, "an idle block lies above a pinned node"
                    assert all(
                        self._pool.references(b) == 0 for h, b in enumerate(below.blocks) if self._window[h] is None
                    ), "an idle block lies above a held one"
