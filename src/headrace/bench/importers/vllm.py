"""The result file of `vllm bench serve --save-result`, with single requests where it was run with --save-detailed."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from headrace.bench.importers import Imported, Importer, spread
from headrace.bench.records import Outcome, RequestRecord, TokenSource

_STATISTICS = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99"}
_METRICS = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2el": "e2e_s"}


def read(_source: Path, document: Any) -> Imported:
    """Single requests need `start_times`; without them only the tool's own figures can be taken."""
    model = str(document.get("model_id", "unknown"))
    if document.get("start_times") and document.get("itls"):
        return Imported("vllm bench serve", model, _records(document))
    note = "the file has no times of single requests (--save-detailed): its own figures, without intervals"
    return Imported("vllm bench serve", model, [], _figures(document), (note,))


def _records(document: dict[str, Any]) -> list[RequestRecord]:
    origin_s = min(document["start_times"])
    rows = zip(
        document["start_times"],
        document["ttfts"],
        document["itls"],
        document["input_lens"],
        document["output_lens"],
        document.get("errors") or [""] * len(document["ttfts"]),
        strict=True,
    )
    records = []
    for index, (start_s, ttft_s, gaps_s, prompt, output, error) in enumerate(rows):
        sent_s = start_s - origin_s
        times = list(accumulate([sent_s + ttft_s, *gaps_s])) if output else []
        records.append(
            RequestRecord(
                index=index,
                intended_s=sent_s,
                sent_s=sent_s,
                first_byte_s=times[0] if times else 0.0,
                end_s=times[-1] if times else sent_s,
                event_s=times,
                event_tokens=spread(float(output), len(times)),
                token_source=TokenSource.ONE_PER_CHUNK if output == len(times) else TokenSource.SPREAD,
                prompt_tokens=prompt,
                prompt_tokens_declared=prompt,
                output_tokens=output,
                output_tokens_asked=output,
                outcome=Outcome.STREAM_ERROR if error else Outcome.OK if times else Outcome.EMPTY,
                error=str(error)[:300],
                http_status=200,
            )
        )
    return records


def _figures(document: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for short, key in _METRICS.items():
        found = {
            ours: document[f"{theirs}_{short}_ms"] / 1e3
            for theirs, ours in _STATISTICS.items()
            if document.get(f"{theirs}_{short}_ms") is not None
        }
        if found:
            figures[key] = found
    for theirs, ours in (("output_throughput", "output_tokens_per_s"), ("request_throughput", "requests_per_s")):
        value = float(document[theirs])
        figures[ours] = {"value": value, "low": value, "high": value}
    completed, failed = int(document["completed"]), int(document.get("failed") or 0)
    figures["duration_s"] = float(document["duration"])
    figures["requests"] = {
        "sent": completed + failed,
        "ok": completed,
        "failed": failed,
        "by_outcome": {"ok": completed, **({Outcome.STREAM_ERROR.value: failed} if failed else {})},
    }
    figures["requests"] |= {"unsent": 0, "too_long_skipped": 0, "too_long_clipped": 0}
    return figures


def recognises(_source: Path, document: Any) -> bool:
    return isinstance(document, dict) and "output_throughput" in document and "completed" in document


IMPORTER = Importer("vllm bench serve result", recognises, read)
