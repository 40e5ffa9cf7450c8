"""A client that leaves frees its blocks by the second commit after it: counted through HTTP, on the real step loop and
scheduler, with an executor whose steps end only when the test lets them."""

import asyncio
import threading

import pytest
from serve_harness import EOS, MODEL, Live, until

from headrace.base.clock import SystemClock
from headrace.control.api import EngineInfo
from headrace.control.config import SchedulerConfig
from headrace.control.fake import FakeExecutor
from headrace.control.scheduler import Scheduler
from headrace.engine.inprocess import InProcessEngine
from headrace.engine.launch import EngineCore
from headrace.serve.config import ServeConfig
from headrace.spec.cache import CacheGroup, CacheLayout

BLOCK, BLOCKS = 4, 200


class SteppedExecutor:
    """A `FakeExecutor` whose steps end one at a time: `allow(n)` lets n more end."""

    def __init__(self, inner):
        self.inner = inner
        self.ended = threading.Semaphore(0)
        self.waiting = threading.Event()

    def submit(self, plan):
        return SteppedHandle(self, self.inner.submit(plan))

    def allow(self, steps):
        self.waiting.clear()
        self.ended.release(steps)

    def reset(self):
        self.inner.reset()

    def close(self):
        self.inner.close()


class SteppedHandle:
    def __init__(self, executor, handle):
        self.executor, self.handle = executor, handle

    def done(self):
        return False

    def result(self):
        if not self.executor.ended.acquire(blocking=False):
            self.executor.waiting.set()
            self.executor.ended.acquire()
        return self.handle.result()


@pytest.fixture(params=[True, False], ids=["overlap", "one-by-one"])
async def stepped(request, tokenizer, template):
    """A server on a real socket, and the executor that its engine waits for."""
    layout = CacheLayout((CacheGroup((0,)),), 1, BLOCK, 1, 1, 1, "fp32", 64)
    settings = SchedulerConfig(max_num_seqs=4, max_batched_tokens=64, max_model_len=400)
    executor = SteppedExecutor(FakeExecutor(layout, BLOCKS, 4))
    info = EngineInfo(
        model="fake", model_type="fake", backend="fake", vocab_size=1000, max_model_len=400, max_num_seqs=4,
        max_batched_tokens=64, block_tokens=BLOCK, num_blocks=BLOCKS, kv_bytes_per_token=16, pool_tokens=BLOCK * BLOCKS,
        weights_precision="none", kv_precision="fp32",
    )  # fmt: skip
    core = EngineCore(Scheduler(settings, layout, BLOCKS, SystemClock()), executor, info)
    engine = InProcessEngine(core, overlap=request.param)
    server = await Live(engine, tokenizer, template, ServeConfig(served_names=(MODEL,), eos_token_ids=EOS)).start()
    yield server, executor
    executor.allow(100_000)
    await server.http.aclose()
    server.server.should_exit = True
    await server.task
    await engine.close()


async def stats(server):
    return (await server.http.get("/engine")).json()["stats"]


def held(seen):
    return seen["total_blocks"] - seen["free_blocks"]


async def after_steps(server, executor, steps):
    """Let that many steps end, wait until the engine stands in the next, and say what /engine shows."""
    before = (await stats(server))["steps"]
    executor.allow(steps)
    while (seen := await stats(server))["steps"] < before + steps:
        await asyncio.sleep(0.002)
    return seen


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("steps_before", [0, 1, 5], ids=["first-step", "mid-prefill", "decoding"])
async def test_a_disconnect_frees_the_blocks_by_the_second_commit(stepped, stream, steps_before):
    server, executor = stepped
    bystander, neighbour = await server.open("/v1/completions", prompt=[7], stream=True, max_tokens=30, ignore_eos=True)
    await until(executor.waiting.is_set)
    await after_steps(server, executor, 1)
    fields = {"prompt": [100 + i for i in range(160)], "max_tokens": 200, "ignore_eos": True, "stream": stream}
    _, victim = await server.open("/v1/completions", **fields)
    await until(lambda: server.app.state.gate.inside == 2)
    for _ in range(3 + steps_before):  # two may have been planned before it came; its prompt takes three
        seen = await after_steps(server, executor, 1)
    assert seen["running"] == 2
    assert held(seen) >= 64 // BLOCK
    victim.close()
    await until(lambda: server.app.state.gate.inside == 1)  # the server has seen it
    seen = await after_steps(server, executor, 2)
    assert seen["running"] == 1
    assert held(seen) <= 4, "only the neighbour's 12 tokens at most"
    executor.allow(100)
    rest = (await bystander.readuntil(b"[DONE]")).decode()
    assert '"finish_reason":"length"' in rest
    neighbour.close()
    async with asyncio.timeout(60):
        while held(await stats(server)):
            await asyncio.sleep(0.002)
    metrics = (await server.http.get("/metrics")).text
    assert f'headrace:request_success_total{{finished_reason="abort",model_name="{MODEL}"}} 1.0' in metrics
