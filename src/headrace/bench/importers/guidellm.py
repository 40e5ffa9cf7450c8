"""guidellm's JSON report (0.4 and later): each benchmark's requests with their timings.

It keeps the first and last token's times and their number, not the times between: the gaps become equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.errors import InvalidInput
from headrace.bench.importers import Imported, Importer, spread
from headrace.bench.records import Outcome, RequestRecord, TokenSource


def read(source: Path, document: Any) -> Imported:
    """The single benchmark of the file; several are refused, since they are different loads."""
    benchmarks = document["benchmarks"]
    if len(benchmarks) != 1:
        raise InvalidInput(
            f"{source} holds {len(benchmarks)} benchmarks", field="FILE", remedy="export one load at a time"
        )
    requests = benchmarks[0]["requests"]
    origin_s = min(r["info"]["timings"]["request_start"] for kind in requests.values() for r in kind or [])
    records: list[RequestRecord] = []
    for kind, outcome in (("successful", Outcome.OK), ("errored", Outcome.STREAM_ERROR), ("incomplete", Outcome.CUT)):
        for request in requests.get(kind) or []:
            records.append(_record(len(records), request, origin_s, outcome))
    models = {str(b["config"].get("backend", {}).get("model", "")) for b in benchmarks}
    return Imported(
        "guidellm", models.pop() or "unknown", records, notes=("gaps between tokens are means of each request",)
    )


def _record(index: int, request: dict[str, Any], origin_s: float, outcome: Outcome) -> RequestRecord:
    timings = request["info"]["timings"]
    sent_s = timings["request_start"] - origin_s
    targeted = timings.get("targeted_start")
    first, last = timings.get("first_token_iteration"), timings.get("last_token_iteration")
    events = int(timings.get("token_iterations") or 0)
    times: list[float] = (
        np.linspace(first - origin_s, last - origin_s, events).tolist() if first and last and events else []
    )
    output = request.get("output_tokens")
    return RequestRecord(
        index=index,
        intended_s=min(sent_s, targeted - origin_s) if targeted else sent_s,
        sent_s=sent_s,
        first_byte_s=times[0] if times else 0.0,
        end_s=(timings.get("request_end") or timings["request_start"]) - origin_s,
        event_s=times,
        event_tokens=spread(float(output or events), len(times)),
        token_source=TokenSource.ONE_PER_CHUNK if output == events else TokenSource.SPREAD,
        prompt_tokens=request.get("prompt_tokens"),
        prompt_tokens_declared=int(request.get("prompt_tokens") or 0),
        cached_tokens=request.get("cached_tokens"),
        output_tokens=output,
        output_tokens_asked=int(output or 0),
        outcome=outcome if times or outcome is not Outcome.OK else Outcome.EMPTY,
        error=str(request["info"].get("error") or ""),
        response_id=str(request.get("response_id") or ""),
        http_status=200,
    )


def recognises(_source: Path, document: Any) -> bool:
    return isinstance(document, dict) and "benchmarks" in document and "metadata" in document


IMPORTER = Importer("guidellm JSON report", recognises, read)
