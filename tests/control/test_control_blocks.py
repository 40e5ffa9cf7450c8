"""The block pool against a plain model of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.control.blocks import BlockPool

BLOCKS = 7


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share and drop blocks; a cache keeps some and gives idle ones up in the order they became idle."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.pool.attach(self)
        self.held: list[int] = []
        self.cached: set[int] = set()
        self.idle_order: list[int] = []

    # The pool's reclaimer

    def idle(self, block):
        assert block in self.cached
        self.idle_order.append(block)

    def reclaim(self, count):
        for _ in range(count):
            block = next(b for b in self.idle_order if b in self.cached and b not in self.held)
            self.idle_order.remove(block)
            self.cached.remove(block)
            self.pool.uncache(block)

    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(0, self.pool.free_blocks))
        taken = self.pool.allocate(count)
        assert len(set(taken)) == count
        assert not set(taken) & (set(self.held) | self.cached)
        self.held += taken

    @precondition(lambda self: self.held or self.cached)
    @rule(data=st.data())
    def retain(self, data):
        block = data.draw(st.sampled_from(sorted(set(self.held) | self.cached)))
        self.pool.retain([-1, block])
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release([block, -1])

    @precondition(lambda self: set(self.held) - self.cached)
    @rule(data=st.data())
    def cache(self, data):
        block = data.draw(st.sampled_from(sorted(set(self.held) - self.cached)))
        self.cached.add(block)
        self.pool.cache(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def uncache(self, data):
        block = data.draw(st.sampled_from(sorted(self.cached)))
        self.cached.remove(block)
        self.pool.uncache(block)

    @invariant()
    def agrees(self):
        self.pool.check()
        assert self.pool.free_blocks == BLOCKS - len(set(self.held))
        assert self.pool.cached_blocks == len(self.cached)
        for block in range(BLOCKS):
            assert self.pool.references(block) == self.held.count(block)
            assert self.pool.is_cached(block) == (block in self.cached)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_misuse_is_caught_at_once():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 of 2 free"):
        pool.allocate(2)
    with pytest.raises(AssertionError, match="unused"):
        pool.retain([1 - block])
    pool.release([block])
    with pytest.raises(AssertionError, match="once too often"):
        pool.release([block])
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)
