"""The KV pool gets memory ahead of its use: when, how much, never at the cost of what is there or of the machine's last."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time

import headrace_native
import numpy as np
import pytest

from headrace.base.units import GIB, MIB
from headrace.control.blocks import BlockPool
from headrace.control.request import Request, Sampling
from headrace.control.step import BlockAppend
from headrace.engine.inprocess import InProcessEngine
from headrace.engine.launch import launch
from headrace.engine.native import ahead
from headrace.engine.native.ahead import HEADROOM_BYTES, PIECE_BYTES, Ahead, possible
from headrace.engine.native.memory import buffer
from headrace.spec.config import EngineConfig

needs_linux = pytest.mark.skipif(not possible(), reason="the system cannot give memory ahead of its use")
BLOCK_BYTES = 368_640  # 16 tokens of SmolLM2-135M; no power of two


def resident(array: np.ndarray) -> int:
    """Bytes of the pages of `array` that have memory."""
    page = mmap.PAGESIZE
    address = array.__array_interface__["data"][0]
    assert address % page == 0
    pages = (ctypes.c_ubyte * -(-array.nbytes // page))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(array.nbytes), pages) == 0
    return page * sum(state & 1 for state in pages)


def plenty() -> int:
    return 1 << 60


def used(pool: Ahead, *ids: int) -> None:
    pool.use([BlockAppend(0, 0, 0, ids)])


def run(pool: Ahead) -> int:
    """Pieces until it says that nothing is left."""
    count = 1
    while pool.piece():
        count += 1
        assert count < 10_000
    return count


@needs_linux
def test_nothing_before_the_first_use_then_piece_by_piece_to_the_target():
    memory = buffer(256 * MIB)
    pool = Ahead(memory, BLOCK_BYTES, plenty, 0)
    assert not pool.piece()
    assert resident(memory) == 0
    used(pool, -1, 4, 9, -1, 2)
    pool.use([])
    target = 2 * 10 * BLOCK_BYTES + HEADROOM_BYTES
    before = resident(memory)
    pieces = 0
    while True:
        more = pool.piece()
        after = resident(memory)
        assert 0 < after - before <= 2 * PIECE_BYTES  # the first may begin in the middle of a huge page
        before, pieces = after, pieces + 1
        if not more:
            break
    # Blocks in use get their memory from who writes them.
    assert target - 10 * BLOCK_BYTES <= after <= target - 10 * BLOCK_BYTES + 2 * PIECE_BYTES
    assert not pool.piece()
    assert resident(memory) == after
    used(pool, 3)  # nothing new
    assert not pool.piece()
    used(pool, 200)
    assert run(pool) > 1
    assert resident(memory) > after + 150 * BLOCK_BYTES


@needs_linux
@pytest.mark.parametrize("size", [1, 4097, 3 * MIB + 5, 64 * MIB])
def test_never_beyond_the_pool(size):
    memory = buffer(size)
    pool = Ahead(memory, 4096, plenty, 0)
    used(pool, 0)
    run(pool)
    used(pool, -(-size // 4096) - 1)
    run(pool)
    assert resident(memory) <= -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    if size > 4097:
        assert resident(memory) >= size - 4096


@needs_linux
def test_what_is_written_meanwhile_stays():
    memory = buffer(64 * MIB)
    pool = Ahead(memory, BLOCK_BYTES, plenty, 0)
    used(pool, 0)
    noise = np.random.default_rng(0).integers(0, 256, len(memory), np.uint8)
    memory[: 8 * MIB] = noise[: 8 * MIB]

    def write():
        for begin in range(8 * MIB, 48 * MIB, 100_003):
            memory[begin : min(begin + 100_003, 48 * MIB)] = noise[begin : min(begin + 100_003, 48 * MIB)]

    writer = threading.Thread(target=write)
    writer.start()
    run(pool)
    writer.join()
    assert (memory[: 48 * MIB] == noise[: 48 * MIB]).all()
    assert not memory[48 * MIB :].any()
    assert resident(memory) == len(memory)


@needs_linux
def test_the_last_memory_of_the_machine_is_left_alone(caplog):
    memory = buffer(512 * MIB)
    left = [GIB]
    pool = Ahead(memory, BLOCK_BYTES, lambda: left[0] - resident(memory), GIB - 64 * MIB)
    used(pool, 300)  # 110 MB
    with caplog.at_level("INFO", "headrace.engine"):
        run(pool)
        assert 0 < resident(memory) <= 64 * MIB
        for _ in range(3):
            assert not pool.piece()
    assert len([r for r in caplog.records if "allocated ahead" in r.message]) == 1
    left[0] = 2 * GIB  # somebody ended
    run(pool)
    assert resident(memory) > 192 * MIB


def test_a_system_that_refuses_is_asked_once_and_said_so(monkeypatch, caplog):
    calls = []

    def refuse(memory, first, count):
        calls.append(count)
        return 22 if count else 0

    monkeypatch.setattr(headrace_native, "populate", refuse)
    pool = Ahead(buffer(8 * MIB), BLOCK_BYTES, plenty, 0)
    used(pool, 0)
    assert not pool.piece()
    assert not pool.piece()
    assert [count for count in calls if count] == [calls[-1]]
    assert "errno 22" in caplog.text
    assert "while idle" in ahead.pool_note()
    monkeypatch.setattr(headrace_native, "populate", lambda memory, first, count: 22)
    assert "Linux 5.14" in ahead.pool_note()
    assert not Ahead(buffer(MIB), 4096, plenty, 0).piece()


def test_ranges_outside_the_array_are_refused():
    memory = np.zeros(100, np.uint8)
    for first, count in ((-1, 1), (0, 101), (100, 1), (101, 0), (0, -1), (1, 2**63 - 1)):
        with pytest.raises(ValueError, match="out of range"):
            headrace_native.populate(memory, first, count)


def test_blocks_are_handed_out_from_the_lowest_and_touched_ones_again_before_new_ones():
    pool = BlockPool(1000)
    first = pool.allocate(10)
    assert set(first) == set(range(10))
    pool.release(first[:6])  # not in the prefix cache
    assert set(pool.allocate(6)) == set(first[:6])
    assert set(pool.allocate(3)) == {10, 11, 12}


@needs_linux
@pytest.mark.model
def test_an_engine_readies_its_pool_once_it_was_used_and_answers_as_before():
    core = launch(
        EngineConfig(model="smollm2-135m", backend="native", kv_bytes=256 * MIB, max_model_len=512, threads=2)
    )
    assert any("while idle" in note for note in core.info.notes)
    memory = core.executor._step.__self__._compute.kv
    engine = InProcessEngine(core)
    try:

        def answer(name):
            prompt = tuple(range(100, 140))
            asked = Request(request_id=name, prompt_token_ids=prompt, sampling=Sampling(max_tokens=8, temperature=0.0))
            return [t for output in engine.stream(asked) for t in output.token_ids]

        assert resident(memory) == 0
        found = answer("a")
        deadline_s = time.monotonic() + 60
        while resident(memory) < HEADROOM_BYTES and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert HEADROOM_BYTES <= resident(memory) < HEADROOM_BYTES + 16 * MIB
        assert answer("b") == found
    finally:
        engine.stop()
