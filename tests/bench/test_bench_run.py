"""Whole runs against a golden server in this process: numbering, limits, sessions, resume, validity, series."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestServer

from headrace.base.errors import InvalidInput
from headrace.bench import series
from headrace.bench.arrivals import ArrivalOptions
from headrace.bench.compare import compare_folders, compare_runs
from headrace.bench.endpoint import Endpoint, parse_url
from headrace.bench.golden import GoldenScript, GoldenServer
from headrace.bench.records import RecordLog, RequestRecord, read_records, read_samples
from headrace.bench.run import InvalidRun, Watch, resume, run
from headrace.bench.settings import RunSettings, WriterSettings
from headrace.bench.slo import Slo
from headrace.bench.targets._process import RunningTarget
from headrace.bench.worker import RunMeta, joined

FAST = GoldenScript(ttft_ms=1.0, itl_ms=0.2)
CLOSED = ArrivalOptions(concurrency=4)


@asynccontextmanager
async def golden(script: GoldenScript = FAST) -> AsyncIterator[tuple[GoldenServer, str]]:
    server = GoldenServer(script)
    async with TestServer(server.app) as running:
        yield server, str(running.make_url("/")).rstrip("/")


def load(url: str, workload: str = "random", **fields: Any) -> RunSettings:
    options = {"isl": "8:16", "osl": "4:8"} if workload == "random" else {}
    known: dict[str, Any] = {
        "endpoint": Endpoint(url, "golden"), "workload": workload, "workload_options": options, "requests": 12,
        "arrivals": CLOSED, "scrape_period_s": 0.02, "max_client_delay_s": 5.0,
    }  # fmt: skip
    return RunSettings(**(known | fields))


async def once(settings: RunSettings, out: Path, **how: Any) -> dict[str, Any]:
    return await run(settings, out, headroom=False, **how)


async def test_a_run_leaves_records_samples_and_a_summary(tmp_path: Path) -> None:
    async with golden() as (server, url):
        seen: list[RequestRecord] = []
        summary = await run(load(url, warmup=3), tmp_path / "r", Watch(record=seen.append), headroom=False)
    records = read_records(tmp_path / "r" / "records.jsonl")
    assert [r.index for r in records] == list(range(12))
    assert len(seen) == 12
    assert summary["valid"]
    assert summary["requests"]["ok"] == 12
    assert summary["tokens"]["prompts_as_declared"] == 12
    assert {"mean", "p50", "p90", "p99"} <= summary["ttft_s"].keys() & summary["itl_s"].keys()
    assert {"mean", "p50", "p90", "p99"} <= summary["tpot_s"].keys() & summary["e2e_s"].keys()
    assert summary["output_tokens_per_s"].keys() == {"value", "low", "high"}
    assert read_samples(tmp_path / "r" / "samples.jsonl")
    assert json.loads((tmp_path / "r" / "summary.json").read_text()) == json.loads(msgspec.json.encode(summary))
    assert len({r.prompt_hash for r in records}) == 12
    asked = [t for t in server.truth if t.prompt_tokens <= 16]
    assert len(asked) >= 15, "the warm-up is sent too, and not recorded"


@pytest.mark.parametrize("warmup", [0, 3])
async def test_a_workload_of_which_nothing_fits_the_context_says_so(tmp_path: Path, warmup: int) -> None:
    async with golden() as (_, url):
        settings = load(url, warmup=warmup, max_context=20, workload_options={"isl": "50:60", "osl": "4:8"})
        if warmup:
            with pytest.raises(InvalidRun, match="fits the context"):
                await once(settings, tmp_path / "r")
        else:
            summary = await once(settings, tmp_path / "r")
            assert not summary["valid"]
            assert "fits the context" in summary["invalid_because"][0]


async def test_equal_seeds_send_equal_bodies(tmp_path: Path) -> None:
    async with golden() as (_, url):
        hashes = []
        for k, seed in enumerate((1, 1, 2)):
            await once(load(url, seed=seed), tmp_path / str(k))
            hashes.append([r.prompt_hash for r in read_records(tmp_path / str(k) / "records.jsonl")])
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("arrivals", [CLOSED, ArrivalOptions(rate="400"), ArrivalOptions(rate="400", kind="constant")])
async def test_the_number_of_requests_is_exact_for_sessions(tmp_path: Path, arrivals: ArrivalOptions) -> None:
    options = {"tool": "0", "branches": "3", "rounds": "2", "system": "20", "task": "10", "osl": "4", "review": "3"}
    async with golden() as (_, url):
        settings = load(url, "agentic-branching", workload_options=options, requests=17, arrivals=arrivals)
        summary = await once(settings, tmp_path / "r")
    records = read_records(tmp_path / "r" / "records.jsonl")
    assert [r.index for r in records] == list(range(17))
    assert summary["requests"]["unsent"] == 24 - 17
    # A stage waits for the one before it.
    for session in (0, 1):
        mine = [r for r in records if r.session == session]
        for stage in range(1, max(r.stage for r in mine) + 1):
            ended = max(r.end_s for r in mine if r.stage == stage - 1)
            assert all(r.intended_s >= ended for r in mine if r.stage == stage)


async def test_concurrency_is_never_exceeded_and_is_reached(tmp_path: Path) -> None:
    async with golden(replace(FAST, ttft_ms=10.0)) as (_, url):
        await once(load(url, requests=30), tmp_path / "r")
    records = read_records(tmp_path / "r" / "records.jsonl")
    moments = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    flying, most = 0, 0
    for _, change in moments:
        flying += change
        most = max(most, flying)
    assert most == 4


async def test_open_loop_counts_from_the_intended_time(tmp_path: Path) -> None:
    async with golden(replace(FAST, ttft_ms=20.0, slots=1)) as (_, url):
        summary = await once(load(url, arrivals=ArrivalOptions(rate="200", kind="constant")), tmp_path / "r")
    records = read_records(tmp_path / "r" / "records.jsonl")
    gaps = {round(b.intended_s - a.intended_s, 6) for a, b in itertools.pairwise(records)}
    assert gaps == {0.005}
    assert summary["queue_depth"]["waiting_peak"] >= 1
    assert records[-1].event_s[0] - records[-1].intended_s > 10 * 0.01, "the queue is part of the latency"


async def test_a_duration_stops_new_sessions(tmp_path: Path) -> None:
    async with golden(replace(FAST, ttft_ms=5.0)) as (_, url):
        await once(load(url, requests=None, duration_s=0.3), tmp_path / "r")
    records = read_records(tmp_path / "r" / "records.jsonl")
    assert records
    assert all(r.intended_s < 0.3 for r in records)


async def test_failures_are_counted_listed_and_not_averaged(tmp_path: Path) -> None:
    async with golden(replace(FAST, error_every=4, http_error_every=9)) as (_, url):
        summary = await once(load(url, requests=40, writer=WriterSettings(), max_failures=0.9), tmp_path / "r")
    by = summary["requests"]["by_outcome"]
    assert by["stream_error"] + by["http_error"] == summary["requests"]["failed"] == len(summary["failures"])
    assert summary["ttft_s"]["count"] == by["ok"]
    assert summary["valid"]


async def test_too_many_failures_make_a_run_invalid(tmp_path: Path) -> None:
    # The probe's own questions are the first six requests.
    async with golden(replace(FAST, error_every=7)) as (_, url):
        summary = await once(load(url, requests=40, max_failures=0.05), tmp_path / "r")
    assert not summary["valid"]
    assert "failed" in summary["invalid_because"][0]


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/completions/"])
def test_an_address_is_taken_with_the_path_that_people_copy(path: str) -> None:
    assert parse_url("http://host:1/engines/x" + path) == "http://host:1/engines/x"


async def test_an_endpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRun, match="refused"):
        await once(load("http://127.0.0.1:9"), tmp_path / "r")


async def test_a_folder_is_used_once(tmp_path: Path) -> None:
    async with golden() as (_, url):
        await once(load(url), tmp_path / "r")
        with pytest.raises(InvalidInput, match="already holds"):
            await once(load(url), tmp_path / "r")
        with pytest.raises(InvalidInput, match="finished"):
            await resume(tmp_path / "r")
    with pytest.raises(InvalidInput, match="no run"):
        await resume(tmp_path / "nothing")


async def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "r"
    async with golden(replace(FAST, ttft_ms=10.0)) as (server, url):
        settings = load(url, requests=24)
        work = asyncio.create_task(once(settings, out))
        while not (out / "records.jsonl").exists() or (out / "records.jsonl").read_bytes().count(b"\n") < 6:
            await asyncio.sleep(0.002)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        with (out / "records.jsonl").open("ab") as file:
            file.write(b'{"index":3,"interru')  # what a crash in the middle of a write leaves
        before = read_records(out / "records.jsonl")
        answered = server.count
        summary = await resume(out)
    records = read_records(out / "records.jsonl")
    assert 6 <= len(before) < 24
    assert [r.index for r in records] == list(range(24))
    assert {r.index: r.prompt_hash for r in before}.items() <= {r.index: r.prompt_hash for r in records}.items()
    assert server.count - answered == 24 - len(before)
    known = {r.index for r in before}
    assert min(r.intended_s for r in records if r.index not in known) >= max(r.end_s for r in before) - 1e-6
    assert summary["requests"]["ok"] == 24
    assert summary["resumed_at_s"]


async def test_keys_are_sent_but_not_stored(tmp_path: Path) -> None:
    async with golden() as (_, url):
        endpoint = Endpoint(url, "golden", headers=(("Authorization", "Bearer top-secret"),))
        await once(load(url, endpoint=endpoint), tmp_path / "r")
    assert b"top-secret" not in b"".join(p.read_bytes() for p in (tmp_path / "r").iterdir())
    meta = msgspec.json.decode((tmp_path / "r" / "run.json").read_bytes(), type=RunMeta)
    (tmp_path / "r" / "run.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(meta, finished=False)))
    with pytest.raises(InvalidInput, match="--api-key"):
        await resume(tmp_path / "r")


async def test_two_processes_send_the_same_requests(tmp_path: Path) -> None:
    async with golden(replace(FAST, api_key="top-secret")) as (_, url):  # processes know the key, files do not
        endpoint = Endpoint(url, "golden", headers=(("Authorization", "Bearer top-secret"),))
        await once(load(url, requests=20, endpoint=endpoint), tmp_path / "one")
        summary = await once(load(url, requests=20, processes=2, endpoint=endpoint), tmp_path / "two")
        with pytest.raises(InvalidRun, match="wrong key"):
            await once(load(url), tmp_path / "three")
    assert summary["requests"]["ok"] == 20
    one, two = (read_records(tmp_path / name / "records.jsonl") for name in ("one", "two"))
    assert [(r.index, r.prompt_hash) for r in one] == [(r.index, r.prompt_hash) for r in two]
    assert not list((tmp_path / "two").glob("records.?.jsonl"))


async def test_headroom_is_proved_and_enforced(tmp_path: Path) -> None:
    async with golden(replace(FAST, ttft_ms=20, itl_ms=5)) as (_, url):
        summary = await run(load(url, requests=4), tmp_path / "a")
        assert summary["headroom"]["ok"]
        assert summary["headroom"]["events_per_s"] > 0
        with pytest.raises(InvalidRun, match="max-client-delay"):
            await run(
                load(url, requests=4, max_client_delay_s=1e-9, arrivals=ArrivalOptions(concurrency=1)), tmp_path / "b"
            )


async def test_hits_beyond_the_declared_sharing_are_noted(tmp_path: Path) -> None:
    async with golden(replace(FAST, prefix_cache=True)) as (_, url):
        settings = load(url, workload_options={"isl": "100", "osl": "4"})
        first = await once(settings, tmp_path / "1")
        again = await once(settings, tmp_path / "2")
        salted = await once(msgspec.structs.replace(settings, salt="x"), tmp_path / "3")
    assert not any("earlier run" in note for note in first["notes"] + salted["notes"])
    assert any("earlier run" in note for note in again["notes"])
    assert again["prefix_hit"]["share"] > 0.5 > first["prefix_hit"]["share"]
    cold, warm = (compare_folders(tmp_path / "1", tmp_path / b, margin=None)["warnings"] for b in "32")
    assert not any("prefix cache" in warning for warning in cold)
    assert any(f"0 in A and {again['tokens']['cached_undeclared']:,.0f} in B" in warning for warning in warm)


async def test_the_shared_prefix_is_found_by_a_prefix_cache(tmp_path: Path) -> None:
    async with golden(replace(FAST, prefix_cache=True)) as (_, url):
        options = {"prefix": "160", "isl": "16", "osl": "4"}
        summary = await once(
            load(url, "shared-prefix", workload_options=options, arrivals=ArrivalOptions(concurrency=1)), tmp_path / "r"
        )
    hit = summary["prefix_hit"]
    assert hit["source"] == "server counters"
    # The template's few tokens shift the block border: at most one block less than declared.
    assert hit["declared_share"] - 16 / 180 <= hit["share"] <= hit["declared_share"] + 16 / 180


def target(url: str) -> RunningTarget:
    return RunningTarget(url, "golden", {}, ("POST /reset_prefix_cache",), "")


HOW: dict[str, Any] = {"headroom": False, "natural": False}


async def test_repeats_pool_between_runs_and_compare(tmp_path: Path) -> None:
    async with golden(replace(FAST, ttft_ms=5.0)) as (_, quick), golden(replace(FAST, ttft_ms=120.0)) as (_, slow):
        for name, url in (("a", quick), ("b", slow)):
            summary = await series.repeats(load(url), 3, tmp_path / name, Watch(), target=target(url), **HOW)
            assert summary["runs"] == 3
    found = compare_folders(tmp_path / "a", tmp_path / "b", margin=0.05, primary="ttft_mean_s")
    assert found["verdict"] in ("FAIL", "INCONCLUSIVE")  # with three runs on busy cores the interval may be very wide
    assert found["ratio"] > 2
    assert not found["interleaved"]
    assert found["same_work"]
    assert any("interleaved" in warning for warning in found["warnings"])
    hashes = [r.prompt_hash for k in (1, 2, 3) for r in read_records(tmp_path / "a" / f"run-{k}" / "records.jsonl")]
    assert len(set(hashes)) == len(hashes), "no repeat sends another's words"


async def test_interleaving_is_a_b_b_a_with_equal_work_within_a_pair(tmp_path: Path) -> None:
    order: list[str] = []
    async with golden() as (a_server, a), golden() as (b_server, b):
        settings = load("", requests=5)
        found = await series.interleaved(
            settings, target(a), target(b), ("one", "two"), 4, tmp_path, Watch(note=order.append),
            margin=0.05, primary="output_tokens_per_s", **HOW,
        )  # fmt: skip
    sides = [note.split()[-1] for note in order if note.startswith("pair")]
    assert sides == ["one", "two", "two", "one", "one", "two", "two", "one"]
    assert found["interleaved"]
    assert found["same_work"]
    assert {f["basis"] for f in found["figures"]} == {"interleaved runs"}
    for k in range(1, 5):
        pair = [[r.prompt_tokens_declared for r in read_records(tmp_path / f"{s}-{k}" / "records.jsonl")] for s in "ab"]
        assert pair[0] == pair[1]
    assert a_server.count == b_server.count
    with pytest.raises(InvalidInput, match="--pairs"):
        await series.interleaved(
            settings, target(a), target(b), ("x", "y"), 3, tmp_path / "z", Watch(), margin=None, primary="", **HOW
        )


async def several(kind: str, url: str, out: Path, watch: Watch, requests: int = 8) -> dict[str, Any]:
    """A series of each kind on one golden server."""
    to, settings = target(url), load("", requests=requests)
    match kind:
        case "repeats":
            return await series.repeats(settings, 4, out, watch, target=to, **HOW)
        case "sweep":
            points = [
                (str(c), load("", requests=requests, arrivals=ArrivalOptions(concurrency=c))) for c in (1, 2, 3, 4)
            ]
            return await series.sweep(settings, points, "concurrency", out, watch, target=to, **HOW)
        case "interleaved":
            return await series.interleaved(
                settings,
                to,
                target(url),
                ("one", "two"),
                4,
                out,
                watch,
                margin=None,
                primary="output_tokens_per_s",
                **HOW,
            )
    slow = msgspec.structs.replace(settings, arrivals=ArrivalOptions(kind="constant"))
    return await series.search(slow, Slo.parse("ttft_p90<80ms"), 20.0, out, watch, target=to, **HOW)


@pytest.mark.parametrize("kind", ["repeats", "sweep", "interleaved", "search"])
async def test_an_interrupted_series_goes_on_and_repeats_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "_RESOLUTION", 0.5)
    out = tmp_path / "s"
    async with golden(replace(FAST, ttft_ms=20.0, slots=2)) as (server, url):
        work = asyncio.create_task(several(kind, url, out, Watch()))
        finished: list[Path] = []
        cut: list[Path] = []
        while not (len(finished) >= 2 and cut):  # in the middle of a run, two others are whole
            assert not work.done(), "it ended before it could be interrupted"
            await asyncio.sleep(0.001)
            folders = [path.parent for path in out.glob("*/records.jsonl") if path.read_bytes()]
            finished = [f for f in folders if (f / "summary.json").exists()]
            cut = [f for f in folders if f not in finished]
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        [half] = [f for f in cut if not (f / "summary.json").exists()]
        kept = {f: (f / "records.jsonl").read_bytes() for f in finished}
        partial = (half / "records.jsonl").read_bytes()
        answered = server.count
        notes: list[str] = []
        found = await several(kind, url, out, Watch(note=notes.append))
        again = server.count - answered
        async with golden(replace(FAST, ttft_ms=20.0, slots=2)) as (whole_server, whole_url):
            whole = await several(kind, whole_url, tmp_path / "whole", Watch())
    assert {f: (f / "records.jsonl").read_bytes() for f in finished} == kept
    assert (out / f"{half.name}.interrupted-1" / "records.jsonl").read_bytes() == partial
    assert sum("finished before" in note for note in notes) == len(finished)
    runs = json.loads((out / "series.json").read_text())["runs"]
    if kind != "search":  # which rates a search tries depends on times
        assert [r["folder"] for r in runs] == [
            r["folder"] for r in json.loads((tmp_path / "whole" / "series.json").read_text())["runs"]
        ]
        assert found.keys() == whole.keys()
        per_run = whole_server.count // len(runs)
        assert again == per_run * (len(runs) - len(finished))
        for run_ in runs:
            hashes = [
                [r.prompt_hash for r in read_records(folder / run_["folder"] / "records.jsonl")]
                for folder in (out, tmp_path / "whole")
            ]
            assert hashes[0] == hashes[1]


async def test_different_work_is_said(tmp_path: Path) -> None:
    async with golden() as (_, url):
        await once(load(url), tmp_path / "a")
        await once(load(url, seed=5, requests=9), tmp_path / "b")
    found = compare_runs([tmp_path / "a"], [tmp_path / "b"], "a", "b", margin=None)
    assert not found["same_work"]
    assert any("seed differs" in warning for warning in found["warnings"])
    with pytest.raises(InvalidInput, match="--metric"):
        compare_runs([tmp_path / "a"], [tmp_path / "b"], "a", "b", margin=None, primary="beauty")


async def test_a_sweep_has_a_run_per_point(tmp_path: Path) -> None:
    async with golden() as (_, url):
        points = [(str(c), load(url, arrivals=ArrivalOptions(concurrency=c))) for c in (1, 3)]
        found = await series.sweep(load(url), points, "concurrency", tmp_path, Watch(), target=target(url), **HOW)
    assert [p["x"] for p in found["points"]] == [1.0, 3.0]
    assert found["valid"]
    assert json.loads((tmp_path / "series.json").read_text())["x_name"] == "concurrency"


@pytest.mark.parametrize("start", [1.0, 7.0, 64.0])
async def test_the_rate_search_brackets_the_truth(start: float) -> None:
    async def probe(rate: float) -> dict[str, Any]:
        late = {"p99": 0.01 if rate <= 12.5 else 9.0}
        return {
            "ttft_s": late, "requests": {"sent": 100, "failed": 0}, "arrival_span_s": 100 / rate, "duration_s": 100 / rate,
            "requests_per_s": {"value": rate},
        }  # fmt: skip

    found = await series.find_max(Slo.parse("ttft_p99<100ms"), start, probe)
    assert found.fails_at_rps is not None
    assert found.rate_rps <= 12.5 < found.fails_at_rps
    assert found.fails_at_rps / found.rate_rps <= 1.05


async def test_the_rate_search_ends_when_nothing_keeps_the_objective() -> None:
    async def probe(rate: float) -> dict[str, Any]:
        return {"ttft_s": {"p99": 9.0}, "requests": {"sent": 1, "failed": 0}, "arrival_span_s": 1.0, "duration_s": 1.0}

    found = await series.find_max(Slo.parse("ttft_p99<100ms"), 1.0, probe)
    assert (found.rate_rps, found.note) == (0.0, "no rate keeps the objective")


async def test_a_search_on_a_server_with_two_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_RESOLUTION", 0.5)
    # Two slots of 40 ms each: 50 requests per second is the most it can do.
    async with golden(replace(FAST, ttft_ms=40.0, itl_ms=0.0, slots=2)) as (_, url):
        settings = load(url, requests=40, arrivals=ArrivalOptions(kind="constant"))
        found = await series.search(
            settings, Slo.parse("ttft_p90<80ms"), 10.0, tmp_path, Watch(), target=target(url), **HOW
        )
    assert found["rate_rps"] <= 60
    assert len(found["tried"]) >= 3


def test_records_survive_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with RecordLog(path) as log:
        log.append(RequestRecord(index=1, intended_s=0.5))
    path.write_bytes(path.read_bytes() + b'{"index": 2, "inten')
    with RecordLog(path) as log:
        log.append(RequestRecord(index=0, intended_s=0.25))
        log.append(RequestRecord(index=1, intended_s=0.75))
    assert [(r.index, r.intended_s) for r in read_records(path)] == [(0, 0.25), (1, 0.75)]
    path.write_bytes(b'{"index": "x"}\n')
    with pytest.raises(InvalidInput, match="line 1"):
        read_records(path)


@pytest.mark.parametrize("text", ["ttft_p99<500ms", "itl<20ms, e2e_mean < 2s", "tpot_p50<=3.5ms"])
def test_objectives_can_be_read(text: str) -> None:
    assert Slo.parse(str(Slo.parse(text))) == Slo.parse(text)


@pytest.mark.parametrize("text", ["", "ttft", "ttft_p98<1s", "beauty<1s", "ttft<5"])
def test_bad_objectives_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="--slo"):
        Slo.parse(text)


def test_all_that_is_wrong_in_a_group_is_said_once_and_a_fault_is_not_hidden() -> None:
    first, second = InvalidInput("line 1 is no JSON", field="--file"), InvalidInput("line 7 is empty", field="--file")
    assert joined(BaseExceptionGroup("sessions", [first])) is first
    nested = BaseExceptionGroup("run", [BaseExceptionGroup("sessions", [first, second]), first])
    both = joined(nested)
    assert both is not None
    assert both.field == "--file"
    assert str(both) == "--file: line 1 is no JSON; --file: line 7 is empty"
    other = joined(BaseExceptionGroup("run", [first, InvalidInput("too few", field="--set groups")]))
    assert other is not None
    assert other.field is None
    assert "line 1" in str(other)
    assert "--set groups: too few" in str(other)
    assert joined(BaseExceptionGroup("run", [first, RuntimeError("a fault of ours")])) is None
    assert joined(BaseExceptionGroup("run", [BaseExceptionGroup("deep", [KeyError("x")]), first])) is None


async def test_a_run_over_requests_of_which_two_are_wrong_names_both(tmp_path: Path, monkeypatch: Any) -> None:
    """Sessions that fail in the same turn of the event loop fail as one group."""
    from headrace.bench.drive import Driver

    async def fails(self: Driver, sessions: Any) -> None:
        raise BaseExceptionGroup("sessions", [InvalidInput("line 1", field="a"), InvalidInput("line 2", field="b")])

    monkeypatch.setattr(Driver, "run", fails)
    async with golden() as (_, url):
        with pytest.raises(InvalidInput, match="a: line 1; b: line 2"):
            await once(load(url), tmp_path / "r")
