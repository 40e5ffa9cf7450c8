"""The engine process and its supervision, with a core that invents tokens: nothing hangs, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest
from fake_core import CORE, request

from headrace.base.errors import DoesNotFit, EngineDead, InvalidInput
from headrace.control.api import FinishReason, Output
from headrace.control.request import Request
from headrace.engine.process import EngineProcessClient, Supervision
from headrace.spec.config import EngineConfig

HERE = Path(__file__).parent
QUICK = Supervision(start_timeout_s=60, backoff_s=0.05, max_backoff_s=0.1, stop_timeout_s=5)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engine processes find `fake_core`; none of the sockets to them stays open."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    before = open_sockets()
    yield
    assert open_sockets() <= before


def open_sockets() -> set[str]:
    """Of this process, by inode."""
    folder = Path("/proc/self/fd")
    if not folder.exists():  # not Linux
        return set()
    found = set()
    for descriptor in folder.iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(descriptor))
    return {name for name in found if name.startswith("socket:")}


def config(**options: object) -> EngineConfig:
    faults = tuple((k, str(v)) for k, v in options.items())
    return EngineConfig(model="fake", options=faults, num_blocks=200)


@contextlib.asynccontextmanager
async def engine(supervision: Supervision = QUICK, **options: object) -> AsyncIterator[EngineProcessClient]:
    client = EngineProcessClient(config(**options), core=CORE, supervision=supervision)
    try:
        await client.start()
        yield client
    finally:
        pid = client.pid
        await client.close()
        assert client.state == "dead"
        assert pid is None or not psutil.pid_exists(pid)


async def collect(client: EngineProcessClient, asked: Request) -> list[Output]:
    """All outputs of a request; exactly the last is terminal."""
    outputs = [output async for output in client.generate(asked)]
    assert [o.finish is not None for o in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs


def reason(outputs: list[Output]) -> FinishReason:
    assert outputs[-1].finish is not None
    return outputs[-1].finish.reason


def tokens(outputs: list[Output]) -> tuple[int, ...]:
    return tuple(t for o in outputs for t in o.token_ids)


async def until(condition: Callable[[], bool], limit_s: float = 30) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_serves_requests_together_and_says_what_it_is() -> None:
    async with engine() as client:
        assert client.state == "ready"
        assert client.info.model == "fake"
        results = await asyncio.gather(*[collect(client, request(f"r{i}", max_tokens=3 + i)) for i in range(20)])
        assert [len(tokens(r)) for r in results] == [3 + i for i in range(20)]
        assert client.stats.generation_tokens == sum(3 + i for i in range(20))
        assert client.stats.free_blocks == client.stats.total_blocks == 200


async def test_killed_in_mid_stream_everyone_gets_one_ending_and_the_engine_comes_back() -> None:
    async with engine(step_s=0.01) as client:
        first_pid = client.pid
        assert first_pid is not None
        streams = [asyncio.create_task(collect(client, request(f"r{i}", max_tokens=120))) for i in range(8)]
        await until(lambda: client.stats.generation_tokens > 16)
        os.kill(first_pid, signal.SIGKILL)
        for outputs in await asyncio.gather(*streams):
            assert reason(outputs) is FinishReason.ERROR
            assert outputs[-1].finish.error == "the engine process ended with code -9"  # type: ignore[union-attr]
            assert outputs[-1].finish.completion_tokens == len(tokens(outputs))  # type: ignore[union-attr]
        assert any(tokens(s.result()) for s in streams)
        refused = await collect(client, request("meanwhile"))
        assert reason(refused) is FinishReason.ERROR
        await until(lambda: client.state == "ready")
        assert client.pid != first_pid
        assert client.restarts == 1
        assert len(tokens(await collect(client, request("after")))) == 8


async def test_a_request_that_kills_the_engine_is_not_given_to_the_next_one() -> None:
    async with engine(exit="deadly") as client:
        assert reason(await collect(client, request("deadly"))) is FinishReason.ERROR
        await until(lambda: client.state == "ready")
        assert reason(await collect(client, request("fine"))) is FinishReason.LENGTH
        assert client.restarts == 1


async def test_an_executor_that_always_fails_ends_the_requests_and_restarts_the_process() -> None:
    async with engine(always_break="1") as client:
        results = await asyncio.gather(*[collect(client, request(f"r{i}")) for i in range(6)])
        assert {reason(r) for r in results} == {FinishReason.ERROR}
        assert any("steps in a row failed" in (r[-1].finish.error or "") for r in results)  # type: ignore[union-attr]
        await until(lambda: client.restarts == 1)


async def test_a_hung_engine_is_killed_and_replaced() -> None:
    rules = Supervision(stall_timeout_s=0.4, backoff_s=0.05, stop_timeout_s=5)
    async with engine(rules, hang="stuck") as client:
        pid = client.pid
        outputs = await collect(client, request("stuck"))
        assert reason(outputs) is FinishReason.ERROR
        assert "no step" in (outputs[-1].finish.error or "")  # type: ignore[union-attr]
        await until(lambda: client.state == "ready")
        assert client.pid != pid
        assert reason(await collect(client, request("fine"))) is FinishReason.LENGTH


async def test_an_engine_that_does_not_come_back_is_dead_after_bounded_tries(tmp_path: Path) -> None:
    rules = Supervision(max_restarts=3, backoff_s=0.02, max_backoff_s=0.05)
    starts = tmp_path / "starts"
    async with engine(rules, starts=starts, bad_starts="2,3,4,5", start_fault="exit") as client:
        os.kill(client.pid or 0, signal.SIGKILL)
        await until(lambda: client.state == "dead")
        assert starts.read_text() == "4"
        assert reason(await collect(client, request("late"))) is FinishReason.ERROR


async def test_a_failed_restart_is_tried_again(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    async with engine(starts=starts, bad_starts="2,3", start_fault="exit") as client:
        os.kill(client.pid or 0, signal.SIGKILL)
        await until(lambda: client.restarts == 1)
        assert starts.read_text() == "4"
        assert reason(await collect(client, request("fine"))) is FinishReason.LENGTH


async def test_what_keeps_the_engine_from_starting_is_raised_as_what_it_is() -> None:
    for fault, kind, text in (
        ("memory", DoesNotFit, "too large.*set kv_bytes to 7"),
        ("bug", EngineDead, "ZeroDivisionError: oh"),
        ("exit", EngineDead, "ended with code 9 while starting"),
    ):
        client = EngineProcessClient(config(start_fault=fault), core=CORE, supervision=QUICK)
        with pytest.raises(kind, match=text) as caught:
            await client.start()
        assert client.state == "dead"
        if fault == "memory":
            assert isinstance(caught.value, DoesNotFit)
            assert caught.value.field == "kv_bytes"
        await client.close()


async def test_an_engine_that_does_not_get_ready_is_given_up() -> None:
    client = EngineProcessClient(config(start_fault="hang"), core=CORE, supervision=Supervision(start_timeout_s=0.5))
    with pytest.raises(EngineDead, match=r"not ready after 0\.5 s"):
        await client.start()


async def test_closing_drains_and_takes_no_more() -> None:
    async with engine(step_s=0.005) as client:
        running = asyncio.create_task(collect(client, request("running", max_tokens=60)))
        await until(lambda: client.stats.generation_tokens > 2)
        closing = asyncio.create_task(client.close(drain_s=60))
        await until(lambda: client.state == "draining")
        assert reason(await collect(client, request("late"))) is FinishReason.ERROR
        outputs = await running
        assert reason(outputs) is FinishReason.LENGTH
        assert len(tokens(outputs)) == 60
        await closing


async def test_closing_without_patience_aborts() -> None:
    async with engine(step_s=0.01) as client:
        running = asyncio.create_task(collect(client, request("running", max_tokens=120)))
        await until(lambda: client.stats.generation_tokens > 2)
        await client.close()
        assert reason(await running) is FinishReason.ABORT


async def test_killed_while_draining_is_not_started_again() -> None:
    async with engine(step_s=0.01) as client:
        running = asyncio.create_task(collect(client, request("running", max_tokens=120)))
        await until(lambda: client.stats.generation_tokens > 2)
        closing = asyncio.create_task(client.close(drain_s=60))
        await until(lambda: client.state == "draining")
        os.kill(client.pid or 0, signal.SIGKILL)
        assert reason(await running) is FinishReason.ERROR
        await closing
        assert client.restarts == 0


async def test_leaving_a_stream_frees_its_blocks_and_disturbs_nobody() -> None:
    async with engine(step_s=0.005) as client:
        other = asyncio.create_task(collect(client, request("other", max_tokens=60)))
        for i in range(10):
            async with contextlib.aclosing(client.generate(request(f"left{i}", max_tokens=120))) as stream:
                async for _ in stream:
                    break
        assert len(tokens(await other)) == 60
        await until(lambda: client.stats.running == 0)
        assert client.stats.free_blocks == client.stats.total_blocks


async def test_who_is_abandoned_by_the_sink_of_another_hears_nothing_more() -> None:
    async with engine(step_s=0.005) as client:
        first: list[Output] = []
        second: list[Output] = []
        left: list[int] = []

        def sink(output: Output) -> None:
            first.append(output)
            if len(first) == 5:  # the second one's output comes with the same message
                client.abandon("second")
                left.append(len(second))

        client.follow(request("first", max_tokens=30), sink)
        client.follow(request("second", max_tokens=30), second.append)
        await until(lambda: bool(first) and first[-1].finish is not None)
        assert len(tokens(first)) == 30
        assert [len(second)] == left
        await until(lambda: client.stats.running == 0)
        assert client.stats.free_blocks == client.stats.total_blocks


async def test_a_sink_that_raises_ends_its_own_request_alone() -> None:
    async with engine(step_s=0.005) as client:
        got: list[Output] = []

        def broken(output: Output) -> None:
            got.append(output)
            raise RuntimeError("a bug of its own")

        client.follow(request("broken", max_tokens=100), broken)
        assert len(tokens(await collect(client, request("other", max_tokens=30)))) == 30
        assert len(got) == 1
        await until(lambda: client.stats.running == 0)
        assert client.restarts == 0
        assert client.state == "ready"


async def test_an_asked_for_abort_ends_with_counts() -> None:
    async with engine(step_s=0.005) as client:
        got = []
        async for output in client.generate(request("a", max_tokens=120)):
            got.append(output)
            client.abort("a")
        assert reason(got) is FinishReason.ABORT
        assert got[-1].finish.timeline is not None  # type: ignore[union-attr]
        client.abort("unknown")


async def test_a_consumer_that_does_not_read_delays_nobody_and_loses_nothing() -> None:
    async with engine() as client:
        slow = client.generate(request("slow", max_tokens=100, logprobs=0))
        first = await anext(slow)
        for i in range(5):
            assert len(tokens(await collect(client, request(f"r{i}", max_tokens=100)))) == 100
        rest = [output async for output in slow]
        assert len(rest) <= 2  # what waited came as one
        assert len(tokens([first, *rest])) == 100
        assert sum(len(o.logprobs) for o in [first, *rest]) == 100


async def test_two_requests_in_flight_may_not_share_an_id() -> None:
    async with engine(step_s=0.01) as client:
        running = asyncio.create_task(collect(client, request("a", max_tokens=20)))
        await until(lambda: client.stats.running == 1)
        with pytest.raises(InvalidInput, match="in flight"):
            await collect(client, request("a"))
        assert reason(await running) is FinishReason.LENGTH


async def test_signals_to_the_whole_group_leave_the_engine_to_its_parent() -> None:
    async with engine(step_s=0.005) as client:
        running = asyncio.create_task(collect(client, request("a", max_tokens=60)))
        await until(lambda: client.stats.generation_tokens > 2)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(client.pid or 0, number)
        assert len(tokens(await running)) == 60
        assert client.restarts == 0


_PARENT = """
import asyncio, sys
from fake_core import CORE, request
from headrace.engine.process import EngineProcessClient
from headrace.spec.config import EngineConfig

async def main():
    client = EngineProcessClient(EngineConfig(model="fake", options=(("step_s", "0.01"),)), core=CORE)
    await client.start()
    print(client.pid, flush=True)
    async for _ in client.generate(request("a", max_tokens=120)):
        pass
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_ends_with_its_parent(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
        parent.wait(30)
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()
