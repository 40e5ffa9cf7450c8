"""Several runs that belong together: repeats, a sweep over rates or users, two targets interleaved, a search.

Each can go on in the folder where it was interrupted: runs that had finished are taken as they are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.base.files import write_atomic
from headrace.bench import stats
from headrace.bench.compare import COMPARISON_FILE, FIGURES, SERIES_FILE, Series, compare_runs
from headrace.bench.job import finished_summary
from headrace.bench.records import SUMMARY_FILE
from headrace.bench.run import InvalidRun, Watch, run
from headrace.bench.settings import RunSettings
from headrace.bench.slo import Slo
from headrace.bench.targets._process import RunningTarget

_RESOLUTION = 0.05
_KEEPS_UP = 0.9


def write_series(out: Path, series: Series) -> None:
    """Write `series.json`."""
    write_atomic(out / SERIES_FILE, msgspec.json.format(msgspec.json.encode(series), indent=1))


async def _flushed_run(
    settings: RunSettings, target: RunningTarget, folder: Path, watch: Watch, *, headroom: bool, natural: bool
) -> dict[str, Any]:
    """The summary of one run of a series, on an emptied cache; a run that had finished before is not done again."""
    found = finished_summary(folder)
    if found is not None:
        watch.note(f"{folder.name}: finished before")
        return found
    if not await target.flush():
        watch.note(f"cache {target.info['cache_before']}")
    return await run(aimed(settings, target), folder, watch, headroom=headroom, natural_length=natural)


def aimed(settings: RunSettings, target: RunningTarget) -> RunSettings:
    """The settings pointed at a running target."""
    endpoint = replace(settings.endpoint, url=target.url, model=settings.endpoint.model or target.model)
    return msgspec.structs.replace(settings, endpoint=endpoint, target=target.info)


async def repeats(
    settings: RunSettings, count: int, out: Path, watch: Watch, *, target: RunningTarget, headroom: bool, natural: bool
) -> dict[str, Any]:
    """The same run `count` times, each with other words, the cache flushed between where the engine can.

    The summary written to `out` is the first run's with each figure replaced by the mean over the runs and the
    interval of that mean between runs.
    """
    summaries: list[dict[str, Any]] = []
    series = Series(kind="repeats", title=f"{count} repeats of {settings.workload}")
    for k in range(count):
        one = msgspec.structs.replace(settings, salt=f"{settings.salt}/{k}" if k else settings.salt)
        watch.note(f"run {k + 1} of {count}")
        summary = await _flushed_run(
            one, target, out / f"run-{k + 1}", watch, headroom=headroom and k == 0, natural=natural
        )
        summaries.append(summary)
        series.runs.append({"folder": f"run-{k + 1}", "label": f"run {k + 1}", "x": None})
        write_series(out, series)
    pooled = pool(summaries)
    write_atomic(out / SUMMARY_FILE, msgspec.json.format(msgspec.json.encode(pooled), indent=1))
    return pooled


def pool(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """One summary for several runs: means over runs, and Student's interval of each mean between runs."""
    pooled = dict(summaries[0])
    keys = {figure.key for figure in FIGURES} | {"ttft_raw_s", "input_tokens_per_s", "chunk_gap_s"}
    for key in sorted(keys):
        found = [s[key] for s in summaries if s.get(key)]
        if len(found) != len(summaries):
            continue
        if "value" in found[0]:
            mean = stats.mean_interval(np.array([f["value"] for f in found]))
            pooled[key] = {"value": mean.value, "low": mean.low, "high": mean.high}
            continue
        pooled[key] = dict(found[0])
        for name in ("mean", *stats.QUANTILES):
            mean = stats.mean_interval(np.array([f[name] for f in found]))
            pooled[key] |= {name: mean.value, f"{name}_interval": [mean.low, mean.high]}
    pooled["runs"] = len(summaries)
    pooled["intervals"] = "between runs (Student's t)"
    pooled["valid"] = all(s["valid"] for s in summaries)
    pooled["invalid_because"] = [reason for s in summaries for reason in s["invalid_because"]]
    return pooled


async def sweep(
    settings: RunSettings, points: list[tuple[str, RunSettings]], x_name: str, out: Path, watch: Watch,
    *, target: RunningTarget, headroom: bool, natural: bool,
) -> dict[str, Any]:  # fmt: skip
    """One run per point of load; words differ from point to point, so that no point finds another's prompts cached."""
    series = Series(kind="sweep", title=f"{settings.workload} against {x_name}", x_name=x_name)
    if settings.slo:
        series.facts["slo"] = settings.slo
    results: list[dict[str, Any]] = []
    for number, (label, point) in enumerate(points):
        one = msgspec.structs.replace(point, salt=f"{settings.salt}/{number}")
        watch.note(f"{x_name} {label}")
        folder = f"{x_name}-{label}"
        summary = await _flushed_run(one, target, out / folder, watch, headroom=headroom, natural=natural)
        series.runs.append({"folder": folder, "label": label, "x": float(label)})
        write_series(out, series)
        results.append({"x": float(label), "folder": folder, "summary": summary})
    return {
        "schema": "headrace-bench-sweep/1",
        "x_name": x_name,
        "points": results,
        "valid": all(r["summary"]["valid"] for r in results),
        "invalid_because": [reason for r in results for reason in r["summary"]["invalid_because"]],
    }


async def interleaved(
    settings: RunSettings, a: RunningTarget, b: RunningTarget, labels: tuple[str, str], pairs: int, out: Path,
    watch: Watch, *, margin: float | None, primary: str, headroom: bool, natural: bool,
) -> dict[str, Any]:  # fmt: skip
    """Run two targets A B B A A B B A …; within a pair both get the same words, which no other pair has."""
    stats.check_pairs(pairs)
    series = Series(kind="interleaved", title=f"{labels[1]} against {labels[0]}", facts={"labels": list(labels)})
    folders: dict[str, list[Path]] = {"a": [], "b": []}
    for k in range(pairs):
        for side in "ab" if k % 2 == 0 else "ba":
            target, folder = (a if side == "a" else b), f"{side}-{k + 1}"
            watch.note(f"pair {k + 1} of {pairs}: {labels[0] if side == 'a' else labels[1]}")
            one = msgspec.structs.replace(settings, salt=f"{settings.salt}/{k}")
            await _flushed_run(one, target, out / folder, watch, headroom=headroom and k == 0, natural=natural)
            folders[side].append(out / folder)
            series.runs.append({"folder": folder, "label": f"{side} {k + 1}", "x": None})
            write_series(out, series)
    found = compare_runs(folders["a"], folders["b"], *labels, margin=margin, primary=primary, interleaved=True)
    write_atomic(out / COMPARISON_FILE, msgspec.json.format(msgspec.json.encode(found), indent=1))
    return found


Probe = Callable[[float], Awaitable[dict[str, Any]]]


class RateSearch(msgspec.Struct, kw_only=True):
    """What a search for the highest rate found. The true limit lies between `rate_rps` and `fails_at_rps`."""

    rate_rps: float
    fails_at_rps: float | None
    tried: list[dict[str, Any]]
    note: str = ""


async def find_max(slo: Slo, start_rps: float, probe: Probe, *, most_rps: float = 10_000.0) -> RateSearch:
    """The highest request rate that meets the objective, to 5 %.

    Doubles (or halves) from `start_rps` until one rate keeps it and one does not, then bisects. A rate counts as kept
    when the objective holds, nothing failed, and the server answered at least 90 % of the offered rate.
    """
    tried: list[dict[str, Any]] = []

    async def kept(rate: float) -> bool:
        summary = await probe(rate)
        misses = slo.misses(summary)
        done = (summary.get("requests_per_s") or {}).get("value") or 0.0
        offered = summary["requests"]["sent"] / max(summary["arrival_span_s"], 1e-9)
        if summary["requests"]["failed"]:
            misses.append(f"{summary['requests']['failed']} requests failed")
        if done < _KEEPS_UP * offered and summary["duration_s"] > summary["arrival_span_s"] * 1.5:
            misses.append(f"answered {done:.2f} of {offered:.2f} requests per second")
        tried.append({"rate_rps": rate, "kept": not misses, "misses": misses, "folder": summary.get("folder", "")})
        return not misses

    low: float | None = None
    high: float | None = None
    rate = start_rps
    while low is None or high is None:
        if rate > most_rps or rate < start_rps / 4096:
            break
        if await kept(rate):
            low, rate = rate, rate * 2
        else:
            high, rate = rate, rate / 2
    if low is None:
        return RateSearch(rate_rps=0.0, fails_at_rps=high, tried=tried, note="no rate keeps the objective")
    while high is not None and high / low > 1 + _RESOLUTION:
        middle = (low * high) ** 0.5
        if await kept(middle):
            low = middle
        else:
            high = middle
    return RateSearch(rate_rps=low, fails_at_rps=high, tried=tried)


async def search(
    settings: RunSettings, slo: Slo, start_rps: float, out: Path, watch: Watch,
    *, target: RunningTarget, headroom: bool, natural: bool,
) -> dict[str, Any]:  # fmt: skip
    """`find_max` on a running target; each tried rate is a run of its own under `out`."""
    if settings.duration_s is None and settings.requests is None:
        settings = msgspec.structs.replace(settings, duration_s=20.0)
    series = Series(kind="sweep", title="search for the highest rate", x_name="rate", facts={"slo": str(slo)})

    async def probe(rate: float) -> dict[str, Any]:
        folder = f"rate-{rate:.4g}"
        arrivals = replace(
            settings.arrivals, rate=f"{rate:.6g}", concurrency=None, kind=settings.arrivals.kind or "poisson"
        )
        one = msgspec.structs.replace(settings, arrivals=arrivals, salt=f"{settings.salt}/{rate:.6g}", slo=str(slo))
        summary = await _flushed_run(one, target, out / folder, watch, headroom=headroom, natural=natural)
        series.runs.append({"folder": folder, "label": f"{rate:.4g}", "x": rate})
        series.runs.sort(key=lambda entry: float(entry["x"]))
        watch.note(f"{rate:.4g} requests/s: {'kept' if not slo.misses(summary) else '; '.join(slo.misses(summary))}")
        return summary | {"folder": folder}

    found = await find_max(slo, start_rps, probe)
    series.facts |= {"max_rate_rps": found.rate_rps, "fails_at_rps": found.fails_at_rps}
    write_series(out, series)
    if not found.tried:
        raise InvalidRun("no rate could be tried")
    result = {"schema": "headrace-bench-find-max/1", "slo": str(slo), "valid": True, "invalid_because": []}
    result |= msgspec.to_builtins(found)
    write_atomic(out / SUMMARY_FILE, msgspec.json.format(msgspec.json.encode(result), indent=1))
    return result
