"""Proof, before a run, that the client is not what will be measured: the same load against the golden server."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import msgspec
import numpy as np

from headrace.bench.arrivals import ArrivalOptions
from headrace.bench.endpoint import Endpoint
from headrace.bench.golden import GoldenScript, golden_process
from headrace.bench.records import RequestRecord, read_json
from headrace.bench.settings import RunSettings

_TEST_S = 1.5
_MAX_EVENTS = 20_000
_ATTEMPTS = 3


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """What the client adds at this load. Delays are from the golden server's write to the client's stamp.

    `golden_late_p99_s`: how late the golden server itself was against its schedule (the machine, not the client).
    """

    ok: bool
    processes: int
    events_per_s: float
    concurrency: float
    delay_p50_s: float
    delay_p99_s: float
    limit_s: float
    send_late_p99_s: float
    golden_late_p99_s: float

    def advice(self) -> str:
        """Why the run would not be valid, and what to do."""
        return (
            f"the client itself adds {self.delay_p99_s * 1e3:.1f} ms (p99) at {self.events_per_s:.0f} events/s with "
            f"{self.processes} process(es), more than the limit of {self.limit_s * 1e3:.0f} ms: use more client "
            "processes (--processes), run the client on another or an idle machine, lower the rate or concurrency, or "
            "accept it with --max-client-delay"
        )


@dataclass(frozen=True, slots=True)
class Load:
    """What the run is going to look like: from the warm-up where there was one."""

    ttft_s: float = 0.05
    itl_s: float = 0.01
    output_tokens: int = 64
    prompt_tokens: int = 128


def load_of(records: list[RequestRecord]) -> Load:
    """The load that some first requests show; defaults where there are none."""
    ok = [r for r in records if len(r.event_s) > 1]
    if not ok:
        return Load()
    gaps = np.concatenate([np.diff(np.array(r.event_s)) for r in ok])
    return Load(
        ttft_s=float(np.median([r.event_s[0] - r.sent_s for r in ok])),
        itl_s=float(max(np.median(gaps), 5e-4)),
        output_tokens=max(2, round(float(np.median([len(r.event_s) for r in ok])))),
        prompt_tokens=max(1, round(float(np.median([r.prompt_tokens_declared for r in ok])))),
    )


RunOnce = Callable[[RunSettings, Path], Awaitable[list[RequestRecord]]]


async def prove(
    settings: RunSettings, load: Load, concurrency: int | None, rate: float | None, once: RunOnce
) -> Headroom:
    """Drive the golden server with the run's concurrency or rate and the warm-up's times, a second or two.

    Tries again on a busy machine and keeps the best attempt; `once` runs settings into a folder.
    """
    script, test = _test(settings, load, concurrency, rate)
    best: Headroom | None = None
    for _ in range(_ATTEMPTS):
        async with golden_process(script) as url:
            test = msgspec.structs.replace(test, endpoint=replace(test.endpoint, url=url))
            with tempfile.TemporaryDirectory() as folder:
                origin_s, records = await _once(once, test, Path(folder))
            async with aiohttp.ClientSession() as session, session.get(url + "/golden/truth") as response:
                truth = await response.json()
        found = _judge(settings, origin_s, records, truth)
        best = found if best is None or found.delay_p99_s < best.delay_p99_s else best
        if best.ok:
            return best
    assert best is not None
    return best


async def _once(once: RunOnce, test: RunSettings, folder: Path) -> tuple[float, list[RequestRecord]]:
    from headrace.bench.records import META_FILE
    from headrace.bench.worker import RunMeta

    records = await once(test, folder)
    meta = read_json(folder / META_FILE, RunMeta)
    return meta.origin_s, records


def _test(
    settings: RunSettings, load: Load, concurrency: int | None, rate: float | None
) -> tuple[GoldenScript, RunSettings]:
    ttft_s, itl_s = min(max(load.ttft_s, 0.005), 0.3), load.itl_s
    tokens = max(2, min(load.output_tokens, math.ceil((_TEST_S - ttft_s) / itl_s)))
    whole_s = ttft_s + tokens * itl_s
    if rate is not None:
        arrivals, requests = ArrivalOptions(rate=str(rate), kind="constant"), math.ceil(rate * _TEST_S)
    else:
        slots = concurrency or 1
        arrivals, requests = ArrivalOptions(concurrency=slots, kind="closed"), slots * max(1, round(_TEST_S / whole_s))
    requests = max(min(requests, _MAX_EVENTS // tokens), min(concurrency or 1, 1_000), 1)
    script = GoldenScript(ttft_ms=ttft_s * 1e3, itl_ms=itl_s * 1e3, max_context=10_000_000, usage="final")
    prompt = min(load.prompt_tokens, 4_000)
    return script, RunSettings(
        endpoint=Endpoint("", "golden", force_length=True, timeout_s=60.0),
        workload="random",
        workload_options={"isl": str(prompt), "osl": str(tokens)},
        requests=requests,
        arrivals=arrivals,
        processes=settings.processes,
    )


def _judge(settings: RunSettings, origin_s: float, records: list[RequestRecord], truth: list[dict]) -> Headroom:  # type: ignore[type-arg]
    by_id = {entry["id"]: entry for entry in truth}
    delays, late = [], []
    for record in records:
        entry = by_id.get(record.response_id)
        if entry is None:
            continue
        sent = np.array(entry["event_s"][: len(record.event_s)])
        delays.append(np.array(record.event_s[: len(sent)]) + origin_s - sent)
        late.append(sent - np.array(entry["planned_s"][: len(sent)]))
    if not delays:
        raise RuntimeError("the golden server answered nothing")
    delay = np.concatenate(delays)
    start_s, end_s = min(r.sent_s for r in records), max(r.end_s for r in records)
    p99 = float(np.quantile(delay, 0.99))
    return Headroom(
        ok=p99 <= settings.max_client_delay_s,
        processes=settings.processes,
        events_per_s=len(delay) / (end_s - start_s),
        concurrency=sum(r.end_s - r.sent_s for r in records) / (end_s - start_s),
        delay_p50_s=float(np.quantile(delay, 0.5)),
        delay_p99_s=p99,
        limit_s=settings.max_client_delay_s,
        send_late_p99_s=float(np.quantile([r.sent_s - r.intended_s for r in records], 0.99)),
        golden_late_p99_s=float(np.quantile(np.concatenate(late), 0.99)),
    )


def most_processes() -> int:
    """As many client processes as this host has processors for us."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
