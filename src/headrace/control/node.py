"""One block's worth of tokens in the prefix tree."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

TOKEN_BYTES = 4
_TYPECODE = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)


def encode(token_ids: Iterable[int]) -> bytes:
    """Token ids as bytes, four each, so that whole blocks compare and hash at memory speed.

    Raises OverflowError for an id outside [0, 2^32).
    """
    return array(_TYPECODE, token_ids).tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the longest common prefix of two encoded texts of any length."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high // TOKEN_BYTES
    while high - low > 64:  # halve by comparing slices, which is fast, until an integer can say where they part
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    difference = int.from_bytes(a[low:high], "little") ^ int.from_bytes(b[low:high], "little")
    same_bytes = high - low if difference == 0 else ((difference & -difference).bit_length() - 1) // 8
    return (low + same_bytes) // TOKEN_BYTES


class Node:
    """The tokens of one block (`key`, encoded) after those of its ancestors, and the blocks that hold their KV.

    `blocks` has one id per cache group; -1 is a hole (a sliding group only). A node whose key is shorter than a block
    is a leaf. No child's key is a prefix of a sibling's. `depth` is in blocks, this one included; a root has depth 0.
    """

    __slots__ = (
        "_sorted",
        "attached",
        "blocks",
        "children",
        "depth",
        "hits",
        "key",
        "last_used",
        "parent",
        "pins",
        "queued",
        "window_used",
    )  # fmt: skip

    def __init__(self, parent: Node | None, key: bytes, blocks: list[int]) -> None:
        self.parent = parent
        self.key = key
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.attached = True
        self.pins = 0
        self.hits = 0
        self.last_used = 0
        self.window_used = 0
        """Last use as part of a sliding window: blocks farther back than the window were not used by a match."""
        self.queued = 0
        """Bits of the entries this node has in the eviction queue."""
        self._sorted: list[bytes] | None = None

    def add(self, child: Node) -> None:
        self.children[child.key] = child
        if self._sorted is not None:
            insort(self._sorted, child.key)

    def remove(self, child: Node) -> None:
        del self.children[child.key]
        if self._sorted is not None:
            del self._sorted[bisect_left(self._sorted, child.key)]

    def _order(self) -> list[bytes]:
        # Most nodes of a long prompt have one child and never need this, so it is built when first asked for.
        if self._sorted is None:
            self._sorted = sorted(self.children)
        return self._sorted

    def prefix_of(self, key: bytes) -> Node | None:
        """The child whose key is a proper prefix of `key`: with no prefix among siblings, its neighbour in order."""
        if not self.children:
            return None
        order = self._order()
        at = bisect_left(order, key)
        return self.children[order[at - 1]] if at and key.startswith(order[at - 1]) else None

    def extension_of(self, key: bytes) -> Node | None:
        """A child whose key is `key` or begins with it."""
        if not self.children:
            return None
        order = self._order()
        at = bisect_left(order, key)
        return self.children[order[at]] if at < len(order) and order[at].startswith(key) else None

    def by_common_prefix(self, key: bytes) -> Iterator[tuple[Node, int]]:
        """Children that share at least one token with `key`, most shared tokens first."""
        if not key or not self.children:
            return
        order = self._order()
        above = bisect_left(order, key)
        below = above - 1
        # In sorted order the shared length only falls with the distance from where `key` would stand.
        up = common_tokens(order[above], key) if above < len(order) else 0
        down = common_tokens(order[below], key) if below >= 0 else 0
        while up or down:
            if up >= down:
                yield self.children[order[above]], up
                above += 1
                up = common_tokens(order[above], key) if above < len(order) else 0
            else:
                yield self.children[order[below]], down
                below -= 1
                down = common_tokens(order[below], key) if below >= 0 else 0

    def walk(self) -> Iterator[Node]:
        """This node and all below it; long chains are no recursion problem."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
