"""An engine core that invents tokens, with faults on order; also made inside engine processes (`fake_core:launch`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from headrace.base.clock import SystemClock
from headrace.base.errors import DoesNotFit
from headrace.control.api import EngineInfo
from headrace.control.config import SchedulerConfig
from headrace.control.fake import FakeExecutor, FakeHandle
from headrace.control.request import Request, Sampling
from headrace.control.scheduler import Scheduler
from headrace.control.step import StepPlan, StepResult
from headrace.engine.launch import EngineCore
from headrace.spec.cache import CacheGroup, CacheLayout
from headrace.spec.config import EngineConfig

CORE = "fake_core:launch"
VOCABULARY = 1000


class LazyHandle:
    """A step that runs when its result is asked for, so that it takes time where a real one does."""

    def __init__(self, run: Callable[[], StepResult]) -> None:
        self._run = run

    def done(self) -> bool:
        return False

    def result(self) -> StepResult:
        return self._run()


class FaultyExecutor:
    """A `FakeExecutor` with faults. Options: `step_s` (each step takes that long), `break` (text of request ids whose
    steps raise), `always_break`, `hang` (a step with such a request never ends), `exit` (… ends the process)."""

    def __init__(self, inner: FakeExecutor, options: dict[str, str]) -> None:
        self.inner = inner
        self.options = options
        self.slots: dict[int, str] = {}
        self.resets = 0
        self.failed_steps = 0
        self.closed = False

    def submit(self, plan: StepPlan) -> FakeHandle | LazyHandle:
        self.slots.update((init.slot, init.request_id) for init in plan.inits)
        ids = [self.slots[chunk.slot] for chunk in plan.chunks]

        def has(fault: str) -> bool:
            return fault in self.options and any(self.options[fault] in request_id for request_id in ids)

        if has("hang"):
            return LazyHandle(lambda: time.sleep(3600))  # type: ignore[arg-type,return-value]
        if has("exit"):
            return LazyHandle(lambda: os._exit(7))
        if has("break") or "always_break" in self.options:
            return LazyHandle(self._raise)
        handle = self.inner.submit(plan)
        step_s = float(self.options.get("step_s", "0"))
        if step_s == 0:
            return handle

        def late() -> StepResult:
            time.sleep(step_s)
            return handle.result()

        return LazyHandle(late)

    def _raise(self) -> StepResult:
        self.failed_steps += 1
        raise RuntimeError("the executor tripped")

    def reset(self) -> None:
        self.resets += 1
        self.inner.reset()

    def close(self) -> None:
        self.closed = True
        self.inner.close()


def launch(config: EngineConfig) -> EngineCore:
    """Sizes come from `config`; `options` are faults. `start_fault` keeps it from starting: every time, or only those of
    the `bad_starts` (`2,3`: the second and third, counted in the file `starts`)."""
    options = dict(config.options)
    _maybe_fail_to_start(options)
    layout = CacheLayout((CacheGroup((0,)),), 1, config.block_tokens or 4, 1, 1, 1, "fp32", 64)
    num_blocks = config.num_blocks or 64
    settings = SchedulerConfig(
        max_num_seqs=config.max_num_seqs or 8,
        max_batched_tokens=config.max_batched_tokens or 32,
        max_model_len=config.max_model_len or 128,
        prefix_caching=config.prefix_cache,
        chunked_prefill=config.chunked_prefill,
    )
    scheduler = Scheduler(settings, layout, num_blocks, SystemClock())
    verify = options.get("verify", "yes") == "yes"
    inner = FakeExecutor(
        layout,
        num_blocks,
        settings.max_num_seqs,
        vocab_size=VOCABULARY,
        verify=verify,
        fails=lambda request_id, position: "nan" in request_id and position >= 12,
    )
    info = EngineInfo(
        model="fake",
        model_type="fake",
        backend="fake",
        vocab_size=VOCABULARY,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_batched_tokens=settings.max_batched_tokens,
        block_tokens=layout.block_tokens,
        num_blocks=num_blocks,
        kv_bytes_per_token=16,
        pool_tokens=num_blocks * layout.block_tokens,
        weights_precision="none",
        kv_precision="fp32",
    )
    return EngineCore(scheduler, FaultyExecutor(inner, options), info)


def _maybe_fail_to_start(options: dict[str, str]) -> None:
    if "starts" in options:
        counter = Path(options["starts"])
        start = int(counter.read_text()) + 1 if counter.exists() else 1
        counter.write_text(str(start))
        if str(start) not in options["bad_starts"].split(","):
            return
    match options.get("start_fault"):
        case "memory":
            raise DoesNotFit("too large", field="kv_bytes", remedy="set kv_bytes to 7")
        case "exit":
            os._exit(9)
        case "bug":
            raise ZeroDivisionError("oh")
        case "hang":
            time.sleep(3600)


def request(request_id: str, prompt: int | tuple[int, ...] = 6, **sampling: object) -> Request:
    """A request whose prompt is given, or some ids that depend on the request's name."""
    ids = (
        prompt if isinstance(prompt, tuple) else tuple((hash_name(request_id) + i) % VOCABULARY for i in range(prompt))
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=ids,
        sampling=Sampling(**{"max_tokens": 8, **sampling}),  # type: ignore[arg-type]
        arrival_s=time.monotonic(),
    )


def hash_name(name: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % VOCABULARY
