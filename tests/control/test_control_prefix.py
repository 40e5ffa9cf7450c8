"""The prefix tree against brute force: every hit is as long as it can be and its blocks hold just those tokens."""

from __future__ import annotations

import random

import pytest
from control_rig import layout
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.control.blocks import BlockPool
from headrace.control.demand import Demand
from headrace.control.node import common_tokens, encode
from headrace.control.policies import EVICTION
from headrace.control.prefix import NoPrefix, PrefixTree
from headrace.control.request import Request, Sampling
from headrace.control.sequence import Sequence
from headrace.control.tables import BlockTables

SIZE = 3


class Cache:
    """A pool, a tree and tables, with a memory of which text each cell of each block holds."""

    def __init__(self, windows=(None,), blocks=24, eviction="lru", block_tokens=SIZE):
        self.size = block_tokens
        self.demand = Demand(layout(windows, block_tokens))
        self.pool = BlockPool(blocks)
        self.tree = PrefixTree(self.pool, self.demand, EVICTION.get(eviction)())
        self.tables = BlockTables(self.pool, self.tree, self.demand, 1000)
        self.memory = {}
        self.live = []

    def sequence(self, tokens, namespace=""):
        request = Request(
            request_id="r", prompt_token_ids=tuple(tokens), sampling=Sampling(max_tokens=1), namespace=namespace
        )
        return Sequence(request, 0, 1000, self.demand.num_groups, 0)

    def match(self, tokens, namespace="", limit=None):
        return self.tree.match(namespace, encode(tokens), len(tokens) if limit is None else limit)

    def start(self, tokens, namespace=""):
        """Begin a sequence on what is cached of it; None if the pool has no room."""
        sequence = self.sequence(tokens, namespace)
        hit = self.match(tokens, namespace, len(tokens) - 1)
        if self.tables.room_after(hit, 1) < 1:
            return None
        copies = []
        sources = self.tables.start(sequence, hit, copies)
        sequence.computed = hit.length
        for copy in copies:
            for offset in range(self.size):
                self.memory[copy.target, offset] = self.memory.get((copy.source, offset))
        self.pool.release(sources)
        self.live.append(sequence)
        return sequence

    def compute(self, sequence, count):
        """Compute up to `count` more tokens, publish them, give back what lies behind windows."""
        end = min(sequence.computed + count, len(sequence.token_ids), self.tables.reach(sequence.room))
        if end <= sequence.computed:
            return
        self.tables.grow(sequence, end, [])
        namespace = sequence.request.namespace
        for g, table in enumerate(sequence.tables):
            for position in range(sequence.computed, end):
                text = (g, namespace, tuple(sequence.token_ids[: position + 1]))
                self.memory[table[position // self.size], position % self.size] = text
        sequence.computed = end
        self.tables.publish(sequence)
        self.tables.drop_behind_windows(sequence)

    def end(self, sequence):
        self.live.remove(sequence)
        self.tables.vacate(sequence)

    def fill(self, tokens, namespace=""):
        """Cache `tokens` and leave them idle."""
        sequence = self.start(tokens, namespace)
        self.compute(sequence, len(tokens))
        self.end(sequence)

    def check(self):
        self.tables.check(self.live)
        for sequence in self.live:
            for g, table in enumerate(sequence.tables):
                for position in range(self.first_seen(g, sequence.computed), sequence.computed):
                    text = (g, sequence.request.namespace, tuple(sequence.token_ids[: position + 1]))
                    assert self.memory[table[position // self.size], position % self.size] == text

    def first_seen(self, group, position):
        """The first position of a group that a query at `position` sees."""
        window = dict(self.demand.windows).get(group)
        return 0 if window is None else max(0, position - window + 1)

    def longest(self, tokens, namespace, limit):
        """The longest usable cached prefix, by trying every length at every node."""
        root = self.tree._roots.get(namespace)
        best, frontier = 0, [] if root is None else [(root, [])]
        key = encode(tokens)
        while frontier:
            node, above = frontier.pop()
            for child in node.children.values():
                chain, base = [*above, child], len(above) * self.size
                shared = common_tokens(child.key, key[base * 4 : (base + self.size) * 4])
                for length in range(base + 1, min(base + shared, limit) + 1):
                    if all(
                        chain[p // self.size].blocks[g] >= 0
                        for g, window in self.demand.windows
                        for p in range(max(0, length - window + 1), length)
                    ):
                        best = max(best, length)
                if shared == self.size:
                    frontier.append((child, chain))
        return best


class TreeMachine(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from([(None,), (None, None), (None, 4), (5,), (2, 6), (1,), (None, 1)]),
        blocks=st.integers(6, 30),
        eviction=st.sampled_from(["lru", "lfu"]),
    )
    def begin(self, windows, blocks, eviction):
        self.cache = Cache(windows, blocks, eviction)

    texts = st.lists(st.integers(0, 1), min_size=1, max_size=16)
    spaces = st.sampled_from(["", "", "tenant"])

    @rule(tokens=texts, namespace=spaces, first=st.integers(1, 16))
    def start(self, tokens, namespace, first):
        sequence = self.cache.start(tokens, namespace)
        if sequence is not None:
            self.cache.compute(sequence, first)

    @precondition(lambda self: self.cache.live)
    @rule(data=st.data(), count=st.integers(1, 9))
    def go_on(self, data, count):
        self.cache.compute(data.draw(st.sampled_from(self.cache.live)), count)

    @precondition(lambda self: self.cache.live)
    @rule(data=st.data(), more=texts)
    def lengthen(self, data, more):
        data.draw(st.sampled_from(self.cache.live)).token_ids.extend(more)

    @precondition(lambda self: self.cache.live)
    @rule(data=st.data())
    def end(self, data):
        self.cache.end(data.draw(st.sampled_from(self.cache.live)))

    @rule(tokens=texts, namespace=spaces)
    def forget(self, tokens, namespace):
        self.cache.tree.forget(namespace, encode(tokens))
        if len(tokens) > 1:
            hit = self.cache.match(tokens, namespace)
            assert not any(self.cache.match(tokens[:1], namespace).length for _ in hit.path)

    @rule()
    def flush(self):
        self.cache.tree.flush()
        assert self.cache.pool.cached_blocks == 0

    @rule(tokens=texts, namespace=spaces, data=st.data())
    def match(self, tokens, namespace, data):
        cache, limit = self.cache, data.draw(st.integers(0, len(tokens)))
        hit = cache.match(tokens, namespace, limit)
        assert hit.length == cache.longest(tokens, namespace, limit)
        for g in range(cache.demand.num_groups):
            blocks = [*hit.tables[g], *([] if hit.tail is None else [hit.tail.blocks[g]])]
            for position in range(cache.first_seen(g, hit.length), hit.length):
                text = (g, namespace, tuple(tokens[: position + 1]))
                assert cache.memory[blocks[position // SIZE], position % SIZE] == text

    @invariant()
    def holds(self):
        if hasattr(self, "cache"):
            self.cache.check()

    def teardown(self):
        if hasattr(self, "cache"):
            for sequence in list(self.cache.live):
                self.cache.end(sequence)
            pool = self.cache.pool
            assert pool.free_blocks == pool.num_blocks
            pool.allocate(pool.num_blocks)  # every cached block can be reclaimed
            self.cache.tree.check()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.reuse, Phase.generate],
)


def test_a_match_may_end_inside_a_block_and_is_continued_in_a_copy():
    cache = Cache()
    cache.fill([1, 2, 3, 4, 5, 6])
    hit = cache.match([1, 2, 3, 4, 9])
    assert (hit.length, len(hit.path), hit.tail_tokens) == (4, 1, 1)
    follower = cache.start([1, 2, 3, 4, 9])
    assert follower.computed == 4
    cache.compute(follower, 1)
    cache.check()
    assert cache.match([1, 2, 3, 4, 5, 6]).length == 6
    assert cache.match([1, 2, 3, 4, 9, 9]).length == 5


def test_equal_blocks_computed_twice_are_merged():
    cache = Cache()
    one, two = cache.start([1, 2, 3, 4]), cache.start([1, 2, 3, 4])
    cache.compute(one, 4)
    assert two.tables == [[]]
    cache.compute(two, 3)
    assert two.tables[0][0] == one.tables[0][0]
    assert two.dirty == [(0, 0)]
    cache.check()
    assert cache.pool.free_blocks == 24 - 2


def test_after_a_flush_a_shared_block_does_not_come_back_below_blocks_its_holders_do_not_hold():
    cache = Cache(blocks=12)
    text = [1, 1, 1, 2, 2, 2, 3]
    one = cache.start(text)
    cache.compute(one, 6)
    two = cache.start(text)
    assert two.tables[0][:2] == one.tables[0]
    cache.tree.flush()
    cache.fill([1, 1, 1])  # the first block again, in other memory
    cache.compute(one, 1)  # merged into the new first block; the second is still shared with `two`
    assert one.tables[0][0] != two.tables[0][0]
    assert cache.match(text).length == 3
    cache.check()
    cache.end(one)
    cache.pool.release(cache.pool.allocate(cache.pool.free_blocks))  # all that counts as free can be had
    cache.compute(two, 1)
    assert cache.match(text).length == 7
    cache.check()


def test_namespaces_never_share():
    cache = Cache()
    cache.fill([1, 2, 3, 4], "one")
    assert cache.match([1, 2, 3, 4], "one").length == 4
    assert cache.match([1, 2, 3, 4], "two").length == 0
    assert cache.match([1, 2, 3, 4]).length == 0


def test_the_longest_unused_leaf_goes_first_and_what_is_in_use_stays():
    cache = Cache(blocks=6)
    used = cache.start([9, 9, 9])
    cache.compute(used, 3)
    cache.fill([1, 1, 1])
    cache.fill([2, 2, 2])
    cache.fill([3, 3, 3])
    cache.fill([1, 1, 1])  # used again
    cache.pool.release(cache.pool.allocate(3))
    assert [cache.match([t] * 3).length for t in (9, 1, 2, 3)] == [3, 3, 0, 3]


def test_lfu_keeps_what_is_matched_often():
    cache = Cache(blocks=4, eviction="lfu")
    for _ in range(3):
        cache.fill([1, 1, 1, 0])
    cache.fill([2, 2, 2])
    cache.pool.release(cache.pool.allocate(3))
    assert cache.match([1, 1, 1]).length == 3
    assert cache.match([2, 2, 2]).length == 0


def test_a_hit_needs_only_the_window_of_a_sliding_group():
    cache = Cache((None, 4), blocks=12)
    long = cache.start(list(range(12)))
    cache.compute(long, 12)
    assert long.tables[1][:3] == [-1, -1, -1]
    cache.end(long)
    # 12 tokens: 4 full blocks and 4 sliding ones. Room for six more takes the idle sliding blocks behind the window.
    cache.pool.release(cache.pool.allocate(6))
    assert cache.match(list(range(12))).length == 12
    hit = cache.match(list(range(8)))
    assert hit.length == cache.longest(list(range(8)), "", 8)


def test_fully_cached_prompts_and_limits():
    cache = Cache()
    cache.fill([1, 2, 3, 4, 5, 6])
    assert [cache.match([1, 2, 3, 4, 5, 6], limit=n).length for n in range(7)] == list(range(7))


@given(st.lists(st.integers(0, 1), max_size=300), st.lists(st.integers(0, 1), max_size=300), st.integers(0, 300))
def test_common_tokens(a, b, same):
    a, b = a[:same] + a, a[:same] + b
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_tokens(encode(a), encode(b)) == expected


def test_ids_beyond_32_bits_are_refused():
    assert encode([0, 2**32 - 1]) == b"\0\0\0\0\xff\xff\xff\xff"
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            encode([bad])


def test_a_wide_tree_is_searched_by_order_not_by_scan(monkeypatch):
    cache = Cache(blocks=3000)
    rng = random.Random(1)
    for _ in range(1000):
        cache.fill([5, 5, 5, 7, *(rng.randrange(1000) for _ in range(2))])
    compared = 0

    def counting(a, b):
        nonlocal compared
        compared += 1
        return common_tokens(a, b)

    monkeypatch.setattr("headrace.control.node.common_tokens", counting)
    assert cache.match([5, 5, 5, 7, 2000, 1]).length == 4
    assert compared <= 2


def test_dead_entries_of_the_eviction_queue_are_cleared():
    cache = Cache(blocks=4)
    for _ in range(3000):
        cache.fill([1, 2])
        cache.tree.flush()
        cache.fill([1, 2])
        cache.tree.forget("", encode([1, 2]))
    assert len(cache.tree._queue) <= 1024 + 4 * 4 + 1


def test_no_prefix_never_matches():
    none = NoPrefix(2)
    table = [[0], [1]]
    assert none.publish("", encode([1, 2, 3]), 3, table, None) == (None, [])
    hit = none.match("", encode([1, 2, 3]), 3)
    assert (hit.length, hit.tables) == (0, ((), ()))


def test_whole_blocks_only() -> None:
    """A tree that must not share a part of a block neither keeps nor finds one."""
    pool = BlockPool(8)
    tree = PrefixTree(pool, Demand(layout((None,), 4)), EVICTION.get("lru")(), whole_blocks=True)
    tokens = encode(range(10))
    tree.publish("", tokens, 10, [pool.allocate(3)], None)
    assert tree.match("", tokens, 10).length == 8
    assert tree.match("", tokens, 7).length == 4
    hit = tree.match("", encode([*range(6), 99, 98, 97]), 9)
    assert (hit.length, hit.tail) == (4, None)
