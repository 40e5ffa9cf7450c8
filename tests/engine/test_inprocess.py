"""The engine in a thread of this process: both ways to read it, its end, and no memory kept per request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import tracemalloc

import pytest
from fake_core import launch, request

from headrace.base.errors import InvalidInput
from headrace.control.api import FinishReason, Output
from headrace.engine.inprocess import InProcessEngine
from headrace.spec.config import EngineConfig


def start(**options: object) -> InProcessEngine:
    faults = tuple((k, str(v)) for k, v in options.items())
    return InProcessEngine(launch(EngineConfig(model="fake", options=faults, num_blocks=200)))


def tokens(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(t for o in outputs for t in o.token_ids)


def reason(outputs: list[Output]) -> FinishReason:
    assert [o.finish is not None for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].finish is not None
    return outputs[-1].finish.reason


async def collect(engine: InProcessEngine, name: str, max_tokens: int = 8) -> list[Output]:
    return [output async for output in engine.generate(request(name, max_tokens=max_tokens))]


def test_blocking_and_awaited_readers_get_the_same() -> None:
    engine = start()
    blocking = list(engine.stream(request("a", max_tokens=30)))
    awaited = asyncio.run(collect(engine, "a", 30))
    assert tokens(blocking) == tokens(awaited)
    assert reason(blocking) is reason(awaited) is FinishReason.LENGTH
    engine.stop()
    assert engine.state == "dead"
    assert reason(list(engine.stream(request("late")))) is FinishReason.ERROR


async def test_readers_on_several_loops_and_threads_at_once() -> None:
    engine = start()
    found: dict[str, tuple[int, ...]] = {}

    def block(name: str) -> None:
        found[name] = tokens(list(engine.stream(request(name, max_tokens=20))))

    threads = [threading.Thread(target=block, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    here = await asyncio.gather(*[collect(engine, f"a{i}", 20) for i in range(4)])
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert [len(tokens(outputs)) for outputs in here] == [20] * 4
    assert [len(t) for t in found.values()] == [20] * 4
    await engine.close()


async def test_leaving_early_aborts_and_a_closed_engine_has_nothing_in_flight() -> None:
    engine = start(step_s=0.005)
    async with contextlib.aclosing(engine.generate(request("left", max_tokens=120))) as outputs:
        async for _ in outputs:
            break
    running = asyncio.create_task(collect(engine, "running", 120))
    await asyncio.sleep(0.05)
    await engine.close()
    assert reason(await running) is FinishReason.ABORT
    assert engine.stats.free_blocks == engine.stats.total_blocks


async def test_draining_lets_the_running_request_finish() -> None:
    engine = start(step_s=0.005)
    running = asyncio.create_task(collect(engine, "running", 40))
    await asyncio.sleep(0.05)
    await engine.close(drain_s=60)
    assert len(tokens(await running)) == 40


async def test_a_broken_executor_ends_everything_with_an_error() -> None:
    engine = start(always_break=1)
    results = await asyncio.gather(*[collect(engine, f"r{i}") for i in range(6)])
    assert {reason(outputs) for outputs in results} == {FinishReason.ERROR}
    assert engine.state == "dead"


async def test_a_doubled_id_is_refused() -> None:
    engine = start(step_s=0.01)
    running = asyncio.create_task(collect(engine, "a", 20))
    await asyncio.sleep(0.05)
    with pytest.raises(InvalidInput, match="in flight"):
        await collect(engine, "a")
    assert reason(await running) is FinishReason.LENGTH
    await engine.close()


def test_thousands_of_requests_leave_nothing_behind() -> None:
    engine = start(verify="no")

    def serve(begin: int, end: int) -> int:
        for at in range(begin, end, 50):
            streams = [engine.stream(request(f"r{i}", 1 + i % 40, max_tokens=1 + i % 3)) for i in range(at, at + 50)]
            for stream in streams:
                assert reason(list(stream)) is FinishReason.LENGTH
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    serve(0, 500)
    tracemalloc.start()
    warm = serve(500, 1000)
    grown = serve(1000, 3000) - warm
    tracemalloc.stop()
    engine.stop()
    assert grown < 100_000  # 50 bytes per request


async def test_followers_get_all_that_a_step_made_for_them_in_one_turn_of_their_loop() -> None:
    engine = start(step_s=0.002)
    loop = asyncio.get_running_loop()
    calls: list[object] = []
    wake = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *a, **k: (calls.append(a[0]), wake(*a, **k))[1]  # type: ignore[assignment,func-returns-value]
    got: dict[str, list[Output]] = {f"r{i}": [] for i in range(8)}
    for name, outputs in got.items():
        engine.follow(request(name, max_tokens=20), outputs.append)
    async with asyncio.timeout(30):
        while not all(outputs and outputs[-1].finish for outputs in got.values()):
            await asyncio.sleep(0.001)
    handed_over = sum(call == engine._deliver for call in calls)
    assert [len(tokens(outputs)) for outputs in got.values()] == [20] * 8
    assert handed_over <= engine.stats.steps < 8 * 20
    await engine.close()


async def test_who_is_abandoned_while_a_batch_is_on_its_way_hears_nothing_more() -> None:
    engine = start(step_s=0.002)
    first: list[Output] = []
    second: list[Output] = []
    left: list[int] = []

    def sink(output: Output) -> None:
        first.append(output)
        if len(first) == 5:  # the second one's output of this step comes right after
            engine.abandon("second")
            left.append(len(second))

    engine.follow(request("first", max_tokens=30), sink)
    engine.follow(request("second", max_tokens=30), second.append)
    async with asyncio.timeout(30):
        while not (first and first[-1].finish):
            await asyncio.sleep(0.001)
    assert len(tokens(first)) == 30
    assert [len(second)] == left
    await engine.close()
    assert engine.stats.free_blocks == engine.stats.total_blocks


async def test_a_follower_of_an_engine_that_ended_hears_so_once() -> None:
    engine = start()
    await engine.close()
    got: list[Output] = []
    engine.follow(request("late"), got.append)
    engine.follow(request("left"), got.append)
    engine.abandon("left")
    await asyncio.sleep(0.01)
    assert [output.request_id for output in got] == ["late"]
    assert reason(got) is FinishReason.ERROR
