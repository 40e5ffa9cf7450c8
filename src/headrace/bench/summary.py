"""The summary of one run: every metric with its interval, every failure counted, and whether the run is valid."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.bench.metrics import measure
from headrace.bench.neighbours import NOTICEABLE_CORES
from headrace.bench.records import Outcome, RequestRecord, ServerSample, TokenSource
from headrace.bench.slo import Slo
from headrace.bench.view import Price, RunView

if TYPE_CHECKING:
    from headrace.bench.worker import RunMeta, ShareReport

SCHEMA = "headrace-bench-summary/1"
_FAILURES_LISTED = 20

NOTHING_FITS = (
    "no request of the workload fits the context (--isl or --set ask for shorter ones, --too-long clip shortens them)"
)
_EXACT = (TokenSource.CHUNK_USAGE, TokenSource.TOKEN_IDS, TokenSource.ONE_PER_CHUNK)


def summarize(
    meta: RunMeta, report: ShareReport, records: list[RequestRecord], samples: list[ServerSample], engine: str = ""
) -> dict[str, Any]:
    """The summary as plain data; docs/bench.md describes each key."""
    settings = meta.settings
    ordered = tuple(sorted(records, key=lambda record: record.sent_s))
    view = RunView(
        ordered,
        tuple(samples),
        Slo.parse(settings.slo) if settings.slo else None,
        Price(settings.usd_per_hour) if settings.usd_per_hour is not None else None,
    )
    outcomes = Counter(record.outcome.value for record in records)
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "created": meta.created,
        "model": settings.endpoint.model,
        "engine": settings.target.get("engine") or (f"unknown, with the metrics of {engine}" if engine else ""),
        "workload": settings.workload,
        "settings": msgspec.to_builtins(settings),
        "host": meta.host,
        "load_average": meta.load_average,
        "foreign_cores": meta.foreign_cores,
        "duration_s": view.duration_s,
        "arrival_span_s": _arrival_span_s(view),
        "requests": {
            "sent": len(records),
            "ok": outcomes[Outcome.OK.value],
            "failed": len(records) - outcomes[Outcome.OK.value],
            "by_outcome": dict(outcomes),
            "unsent": report.unsent,
            "too_long_skipped": report.skipped,
            "too_long_clipped": report.clipped,
        },
        "failures": [
            {"index": r.index, "outcome": r.outcome.value, "http_status": r.http_status, "error": r.error}
            for r in records
            if r.outcome is not Outcome.OK
        ][:_FAILURES_LISTED],
        "tokens": _tokens(view),
        "headroom": meta.headroom,
        "resumed_at_s": meta.resumed_at_s,
    }
    summary |= measure(view)
    if view.slo is not None:
        misses = view.slo.misses(summary)
        summary["slo"] = {"objective": str(view.slo), "kept": not misses, "misses": misses}
    summary["notes"] = [*meta.notes, *_notes(view, report, settings.limit)]
    if meta.foreign_cores is not None and meta.foreign_cores >= NOTICEABLE_CORES:
        summary["notes"].append(
            f"other programs used {meta.foreign_cores:.2f} cores during the run: the figures are not those of a quiet machine"
        )
    summary["invalid_because"] = _invalid(view, settings.max_failures, settings.max_client_delay_s, report.skipped)
    summary["valid"] = not summary["invalid_because"]
    return summary


def _arrival_span_s(view: RunView) -> float:
    """From the first intended send to one mean gap after the last: what the offered rate is counted over."""
    intended = sorted(r.intended_s for r in view.records)
    if len(intended) < 2:
        return 0.0
    return (intended[-1] - intended[0]) * len(intended) / (len(intended) - 1)


def _tokens(view: RunView) -> dict[str, Any]:
    ok = view.ok
    counted = [r for r in ok if r.prompt_tokens is not None]
    return {
        "prompt": sum(r.prompt_tokens if r.prompt_tokens is not None else r.prompt_tokens_declared for r in ok),
        "prompt_declared": sum(r.prompt_tokens_declared for r in ok),
        "prompts_as_declared": sum(r.prompt_tokens == r.prompt_tokens_declared for r in counted),
        "prompts_counted_by_server": len(counted),
        "output": sum(r.tokens_out for r in ok),
        "sources": dict(Counter(r.token_source.value for r in ok)),
        "cached_undeclared": _excess_hits(view),
    }


def _notes(view: RunView, report: ShareReport, limit: int | None) -> list[str]:
    ok, notes = view.ok, []
    estimated = sum(r.token_source not in _EXACT for r in ok)
    if estimated:
        notes.append(f"tokens per chunk are estimated in {estimated} of {len(ok)} answers: ITL is approximate there")
    if report.skipped or report.clipped:
        notes.append(f"longer than the context: {report.skipped} requests left out, {report.clipped} clipped")
    if again := sum(r.reconnected for r in view.records):
        notes.append(f"{again} requests were sent on a second connection: the server had closed the idle one")
    if report.unsent:
        notes.append(f"{report.unsent} calls were not sent: their sessions ended early, at a failure or at the limit")
    if report.exhausted and limit is not None and len(view.records) + report.unsent < limit:
        notes.append(f"the workload has only {len(view.records)} requests, {limit} were asked for")
    if len(ok) < 100:
        notes.append(f"p99 over {len(ok)} requests is close to their maximum: read it with its interval")
    if (extra := _excess_hits(view)) > 0:
        notes.append(
            f"{extra:.0f} prompt tokens came from a prefix cache beyond what the workload shares: an earlier run left "
            "them there (flush the cache, or give --salt)"
        )
    return notes


def _excess_hits(view: RunView) -> float:
    """Cached tokens beyond those declared as shared, less one cache block of slack per request."""
    cached = [(r.cached_tokens, r.shared_tokens_declared) for r in view.ok if r.cached_tokens is not None]
    return float(sum(max(0, hit - shared - 32) for hit, shared in cached))


def _invalid(view: RunView, max_failures: float, max_client_delay_s: float, skipped: int) -> list[str]:
    because = []
    if not view.records:
        return [NOTHING_FITS if skipped else "no request was sent"]
    if not view.ok:
        return ["no request was answered completely"]
    failed = 1 - len(view.ok) / len(view.records)
    if failed > max_failures:
        because.append(f"{failed:.1%} of the requests failed, more than {max_failures:.1%} (--max-failures)")
    late = sorted(r.sent_s - r.intended_s for r in view.records)[int(0.99 * (len(view.records) - 1))]
    typical = sorted(r.event_s[0] - r.intended_s for r in view.ok)[len(view.ok) // 2]
    if late > max(5 * max_client_delay_s, 0.1 * typical):
        because.append(f"the client sent late (p99 {late * 1e3:.0f} ms): it could not keep the schedule")
    return because
