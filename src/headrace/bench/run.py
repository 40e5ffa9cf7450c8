"""One run from settings to summary: probe, warm up, prove headroom, send, sample the server, sum up."""

from __future__ import annotations

import asyncio
import datetime
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import InvalidInput
from headrace.base.files import write_atomic
from headrace.base.host import host
from headrace.bench.arrivals import ArrivalOptions, Arrivals, Closed, Renewal
from headrace.bench.drive import Share
from headrace.bench.endpoint import EndpointError, probe
from headrace.bench.headroom import load_of, most_processes, prove
from headrace.bench.job import SECRET_HEADERS
from headrace.bench.neighbours import Neighbours, wait_until_idle
from headrace.bench.records import (
    META_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    Outcome,
    RecordLog,
    RequestRecord,
    read_json,
    read_records,
    read_samples,
    write_records,
)
from headrace.bench.scrape import Scraper
from headrace.bench.settings import RunSettings, WriterSettings
from headrace.bench.summary import NOTHING_FITS, summarize
from headrace.bench.worker import RunMeta, ShareReport, Start, drive_share
from headrace.bench.workloads import find_workload, workload_options

RECORDS = "records.jsonl"
_HIDDEN = "***"


class InvalidRun(Exception):
    """The run cannot be done or shows nothing; the message gives the reason (exit code 3)."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Follows the progress of a run: `note` gets a line of text, `record` each ended request."""

    note: Callable[[str], None] = lambda _text: None
    record: Callable[[RequestRecord], None] = lambda _record: None


def check(settings: RunSettings) -> Arrivals:
    """The settings' arrivals; `InvalidInput` naming the option that is wrong, before anything is started."""
    settings.check()
    kind = find_workload(settings.workload)
    workload_options(kind, settings.workload_options)
    return settings.arrivals.resolve(has_arrivals=kind.gives_arrivals(settings.arrivals.kind), seed=settings.seed)


async def run(
    settings: RunSettings, out: Path, watch: Watch | None = None, *, headroom: bool = True, natural_length: bool = False
) -> dict[str, Any]:
    """Run into the new folder `out` and return the summary that is also written there.

    Raises `InvalidInput` for wrong settings, `InvalidRun` when the endpoint does not answer or the client
    itself would be measured. A summary whose `valid` is false has its reasons in `invalid_because`.
    """
    watch = watch or Watch()
    arrivals = check(settings)
    if (out / META_FILE).exists():
        raise InvalidInput(
            f"{out} already holds a run", field="--out", remedy="another folder, or headrace bench resume"
        )
    settings, notes = await _resolve(settings, natural_length)
    for note in notes:
        watch.note(note)
    out.mkdir(parents=True, exist_ok=True)
    meta = RunMeta(settings=settings, created=_now(), host=host(), notes=list(notes))
    warm: list[RequestRecord] = []
    if settings.warmup:
        watch.note(f"warming up with {settings.warmup} requests")
        warm = await _warm_up(settings, arrivals.concurrency if isinstance(arrivals, Closed) else settings.warmup)
        if not warm:  # only requests that the context has no room for are not sent
            raise InvalidRun(NOTHING_FITS)
        if all(record.outcome is not Outcome.OK for record in warm):
            raise InvalidRun(f"no warm-up request was answered: {warm[0].outcome}: {warm[0].error}")
    if headroom:
        settings = await _check_headroom(settings, warm, meta, watch)
        meta.settings = settings
    _write_meta(out, meta)
    return await _send(out, meta, watch, frozenset(), 0.0)


async def resume(
    out: Path, watch: Watch | None = None, *, api_key: str | None = None, aim: RunSettings | None = None
) -> dict[str, Any]:
    """Continue a run that was interrupted: what is recorded stays, the rest is sent, the clock continues where it stopped.

    A session that was under way starts again from its first request, since its history is gone. One process goes on,
    however many there were. Keys are not stored with a run: `api_key` gives the bearer token anew, or `aim` everything
    about where to send: address, headers and target (a started engine listens elsewhere after its restart).
    """
    watch = watch or Watch()
    if not (out / META_FILE).exists():
        raise InvalidInput(f"{out} holds no run", field="DIR")
    meta = read_json(out / META_FILE, RunMeta)
    meta.settings = _with_key(meta.settings, api_key) if aim is None else _re_aimed(meta.settings, aim)
    if meta.finished:
        raise InvalidInput(f"the run in {out} has finished", field="DIR")
    _merge_parts(out)
    records = read_records(out / RECORDS) if (out / RECORDS).exists() else []
    already_s = max((record.end_s for record in records), default=0.0)
    meta.resumed_at_s.append(already_s)
    watch.note(f"resuming after {len(records)} recorded requests")
    return await _send(out, meta, watch, frozenset(record.index for record in records), already_s)


async def _send(out: Path, meta: RunMeta, watch: Watch, done: frozenset[int], already_s: float) -> dict[str, Any]:
    settings = meta.settings
    if settings.idle_wait_s:
        await wait_until_idle(settings.idle_wait_s)
    meta.load_average = [os.getloadavg()[0]]
    async with _client_processes(out, 1 if done else settings.processes) as processes:
        meta.origin_s = time.monotonic() - already_s + _lead_s(settings)
        _write_meta(out, meta)
        with RecordLog(out / SAMPLES_FILE) as samples:
            endpoint = settings.endpoint
            scraper = Scraper(endpoint.url, dict(endpoint.headers), samples, meta.origin_s, settings.scrape_period_s)
            await scraper.start()
            neighbours = Neighbours()
            try:
                report = await _drive(settings, out, meta.origin_s, watch, done, already_s, processes)
            finally:
                await scraper.stop()
            meta.foreign_cores = neighbours.cores() if settings.target.get("command") else None
    meta.finished = True
    meta.load_average.append(os.getloadavg()[0])
    _write_meta(out, meta)
    return sum_up(out, report, engine=scraper.engine)


def sum_up(out: Path, report: ShareReport, *, engine: str = "") -> dict[str, Any]:
    """Compute and write the summary of a finished run's folder."""
    meta = read_json(out / META_FILE, RunMeta)
    summary = summarize(meta, report, read_records(out / RECORDS), read_samples(out / SAMPLES_FILE), engine)
    write_atomic(out / SUMMARY_FILE, msgspec.json.format(msgspec.json.encode(summary), indent=1))
    return summary


async def _drive(
    settings: RunSettings, out: Path, origin_s: float, watch: Watch, done: frozenset[int], already_s: float,
    processes: list[asyncio.subprocess.Process],
) -> ShareReport:  # fmt: skip
    if not processes:
        with RecordLog(out / RECORDS) as log:

            def keep(record: RequestRecord) -> None:
                record.segment = 1 if done else 0
                log.append(record)
                watch.record(record)

            return await drive_share(settings, origin_s, Share(), keep, done, already_s)
    start = msgspec.json.encode(Start(settings, origin_s)) + b"\n"
    reports = await asyncio.gather(*(_share_of(process, start, watch) for process in processes))
    _merge_parts(out)
    return ShareReport(
        sum(report.unsent for report in reports), reports[0].skipped, reports[0].clipped, reports[0].exhausted
    )


@asynccontextmanager
async def _client_processes(out: Path, count: int) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Client processes that have loaded everything and wait for their start; none where this process is enough."""
    processes: list[asyncio.subprocess.Process] = []
    pipe = asyncio.subprocess.PIPE
    try:
        for part in range(count if count > 1 else 0):
            line = [sys.executable, "-m", "headrace.bench.worker", str(out), str(part), str(count)]
            processes.append(await asyncio.create_subprocess_exec(*line, stdin=pipe, stdout=pipe, limit=2**20))
        for process in processes:
            assert process.stdout is not None
            if (await process.stdout.readline()).strip() != b"READY":
                raise InvalidRun("a client process did not start")
        yield processes
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _share_of(process: asyncio.subprocess.Process, start: bytes, watch: Watch) -> ShareReport:
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdin.write(start)
    await process.stdin.drain()
    last = b""
    placeholder = RequestRecord(index=-1, intended_s=0.0)
    async for text in process.stdout:
        if text.strip() == b"R":
            watch.record(placeholder)
        else:
            last = text
    if await process.wait():
        raise InvalidRun(f"a client process ended with code {process.returncode}")
    return msgspec.json.decode(last, type=ShareReport)


def _merge_parts(out: Path) -> None:
    parts = sorted(out.glob("records.[0-9]*.jsonl"))
    if not parts:
        return
    records = [record for part in parts for record in read_records(part)]
    with RecordLog(out / RECORDS) as log:
        for record in sorted(records, key=lambda record: record.index):
            log.append(record)
    for part in parts:
        part.unlink()


async def _resolve(settings: RunSettings, natural_length: bool) -> tuple[RunSettings, tuple[str, ...]]:
    """Fill in what only the endpoint knows."""
    given = settings.prompt_writer() if settings.writer.tokenizer else None
    try:
        found = await probe(settings.endpoint, natural_length=natural_length)
    except EndpointError as error:
        raise InvalidRun(str(error)) from None
    writer = WriterSettings(
        tokens_per_word=1.0 if given else found.writer.tokens_per_word,
        template_tokens=found.writer.template_tokens,
        message_tokens=found.writer.message_tokens,
        source=f"tokenizer {settings.writer.tokenizer}" if given else found.writer.source,
        tokenizer=settings.writer.tokenizer,
    )
    max_context = settings.max_context or found.max_context
    notes = (
        found.notes if max_context else (*found.notes, "context length unknown: no request is left out (--max-context)")
    )
    return msgspec.structs.replace(settings, endpoint=found.endpoint, writer=writer, max_context=max_context), notes


async def _warm_up(settings: RunSettings, concurrency: int) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    warm = msgspec.structs.replace(
        settings,
        requests=settings.warmup,
        duration_s=None,
        salt=settings.salt + "/warm-up",
        seed=settings.seed + 7_919,
        arrivals=ArrivalOptions(concurrency=max(1, min(concurrency, settings.warmup)), kind="closed"),
    )
    await drive_share(warm, time.monotonic(), Share(), records.append)
    return records


async def _check_headroom(settings: RunSettings, warm: list[RequestRecord], meta: RunMeta, watch: Watch) -> RunSettings:
    kind = find_workload(settings.workload)
    arrivals = settings.arrivals.resolve(has_arrivals=kind.gives_arrivals(settings.arrivals.kind), seed=settings.seed)
    concurrency = arrivals.concurrency if isinstance(arrivals, Closed) else None
    rate = arrivals.rate_rps if isinstance(arrivals, Renewal) else None
    if rate is None and concurrency is None:
        concurrency = 32
    watch.note("proving the client's headroom on the golden server")
    while True:
        found = await prove(settings, load_of(warm), concurrency, rate, run_golden)
        meta.headroom = msgspec.to_builtins(found)
        if found.ok:
            watch.note(
                f"the client adds {found.delay_p50_s * 1e3:.2f} ms (p50), {found.delay_p99_s * 1e3:.2f} ms (p99) "
                f"at {found.events_per_s:.0f} events/s"
            )
            return settings
        if settings.processes >= min(most_processes(), concurrency or 64):
            raise InvalidRun(found.advice())
        settings = msgspec.structs.replace(settings, processes=settings.processes * 2)
        watch.note(f"one more try with {settings.processes} client processes")


async def run_golden(settings: RunSettings, out: Path) -> list[RequestRecord]:
    """Drive a golden server: no probe, no warm-up, no samples; the way `headroom.prove` runs its test."""
    async with _client_processes(out, settings.processes) as processes:
        meta = RunMeta(settings=settings, origin_s=time.monotonic() + _lead_s(settings))
        _write_meta(out, meta)
        await _drive(settings, out, meta.origin_s, Watch(), frozenset(), 0.0, processes)
    return read_records(out / RECORDS)


def _lead_s(settings: RunSettings) -> float:
    """Time to open connections before the run's zero."""
    return 0.2 + 0.002 * (settings.arrivals.concurrency or 0)


def _write_meta(out: Path, meta: RunMeta) -> None:
    write_atomic(out / META_FILE, msgspec.json.format(msgspec.json.encode(_without_secrets(meta)), indent=1))


def _without_secrets(meta: RunMeta) -> RunMeta:
    """Keys do not belong into files: values of authorization headers are replaced, and a resume takes them anew."""
    hidden = tuple((k, _HIDDEN if k.lower() in SECRET_HEADERS else v) for k, v in meta.settings.endpoint.headers)
    endpoint = replace(meta.settings.endpoint, headers=hidden)
    return msgspec.structs.replace(meta, settings=msgspec.structs.replace(meta.settings, endpoint=endpoint))


def _re_aimed(settings: RunSettings, aim: RunSettings) -> RunSettings:
    endpoint = replace(settings.endpoint, url=aim.endpoint.url, headers=aim.endpoint.headers)
    return msgspec.structs.replace(settings, endpoint=endpoint, target=aim.target)


def _with_key(settings: RunSettings, api_key: str | None) -> RunSettings:
    kept = tuple((name, value) for name, value in settings.endpoint.headers if value != _HIDDEN)
    if len(kept) < len(settings.endpoint.headers) and not api_key:
        raise InvalidInput("the run used a key, which is not stored", field="--api-key", remedy="give it again")
    headers = (*kept, ("Authorization", f"Bearer {api_key}")) if api_key else kept
    return msgspec.structs.replace(settings, endpoint=replace(settings.endpoint, headers=headers))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


__all__ = ["InvalidRun", "Watch", "resume", "run", "sum_up", "write_records"]
