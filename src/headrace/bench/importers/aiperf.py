"""aiperf's artifacts: `profile_export.jsonl` (or the folder that holds it), one line per request with chunk gaps."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.importers import Imported, Importer, spread
from headrace.bench.records import Outcome, RequestRecord, TokenSource

_FILE = "profile_export.jsonl"


def read(source: Path, _document: Any) -> Imported:
    """All requests of the profiling phase; warm-up is left out."""
    path = source / _FILE if source.is_dir() else source
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines() if line.strip()]
    wanted = [line for line in lines if line["metadata"].get("benchmark_phase", "profiling") == "profiling"]
    origin_ns = min(line["metadata"]["request_start_ns"] for line in wanted)
    records = [_record(index, line, origin_ns) for index, line in enumerate(wanted)]
    summary = path.parent / "profile_export_aiperf.json"
    model = "unknown"
    if summary.exists():
        config = msgspec.json.decode(summary.read_bytes()).get("input_config") or {}
        names = (config.get("endpoint") or {}).get("model_names") or ["unknown"]
        model = str(names[0])
    return Imported("aiperf", model, records)


def _record(index: int, line: dict[str, Any], origin_ns: int) -> RequestRecord:
    meta, metrics = line["metadata"], line.get("metrics") or {}

    def value(name: str) -> Any:
        return (metrics.get(name) or {}).get("value")

    sent_s = (meta["request_start_ns"] - origin_ns) / 1e9
    issued = meta.get("credit_issued_ns")
    error = line.get("error")
    times: list[float] = []
    if value("time_to_first_token") is not None:
        gaps_s = [gap / 1e3 for gap in value("inter_chunk_latency") or []]
        times = list(accumulate([sent_s + value("time_to_first_token") / 1e3, *gaps_s]))
    output = value("usage_completion_tokens")
    output = output if output is not None else value("output_sequence_length")
    exact = output == len(times)
    prompt = value("usage_prompt_tokens") or value("input_sequence_length")
    cancelled = bool(meta.get("was_cancelled"))
    return RequestRecord(
        index=index,
        intended_s=min(sent_s, (issued - origin_ns) / 1e9) if issued else sent_s,
        sent_s=sent_s,
        first_byte_s=times[0] if times else 0.0,
        end_s=(meta["request_end_ns"] - origin_ns) / 1e9,
        event_s=times,
        event_tokens=spread(float(output or len(times)), len(times)),
        token_source=TokenSource.ONE_PER_CHUNK if exact else TokenSource.SPREAD,
        prompt_tokens=int(prompt) if prompt is not None else None,
        prompt_tokens_declared=int(prompt or 0),
        cached_tokens=value("usage_prompt_cache_read_tokens"),
        output_tokens=int(output) if output is not None else None,
        output_tokens_asked=int(output or 0),
        outcome=Outcome.STREAM_ERROR if error else Outcome.CUT if cancelled else Outcome.OK if times else Outcome.EMPTY,
        error=str(error or "")[:300],
        http_status=200,
    )


def recognises(source: Path, document: Any) -> bool:
    if document is not None:
        return False
    path = source / _FILE if source.is_dir() else source
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.readline()
    return b'"request_start_ns"' in first


IMPORTER = Importer("aiperf profile_export.jsonl", recognises, read)
