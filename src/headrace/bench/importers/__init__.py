"""Results of other load generators as runs of ours, one file each, so that they can be compared and reported alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import InvalidInput
from headrace.base.files import write_atomic
from headrace.base.registry import Registry
from headrace.bench.endpoint import Endpoint
from headrace.bench.records import META_FILE, SUMMARY_FILE, RequestRecord, write_records
from headrace.bench.settings import RunSettings
from headrace.bench.summary import SCHEMA, summarize
from headrace.bench.worker import RunMeta, ShareReport

IMPORTERS = Registry("headrace.bench.importers", "IMPORTER", kind="format")


@dataclass(frozen=True, slots=True)
class Imported:
    """What a foreign file holds. Where it has no single requests, `figures` are the tool's own, without intervals."""

    tool: str
    model: str
    records: list[RequestRecord]
    figures: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Importer:
    """`recognises` looks at a parsed JSON document (None for a folder or JSONL); `read` may raise KeyError and the like."""

    what: str
    recognises: Callable[[Path, Any], bool]
    read: Callable[[Path, Any], Imported]


def import_results(source: Path, out: Path) -> dict[str, Any]:
    """Read a foreign result into the new folder `out` and return its summary.

    Times are taken as they were recorded; where the tool knows when a request was meant to be sent, latencies count
    from then. Raises `InvalidInput` for a file of no known format, or a damaged one.
    """
    document = _document(source)
    for name, importer in IMPORTERS:
        if not importer.recognises(source, document):
            continue
        try:
            found: Imported = importer.read(source, document)
            msgspec.convert(msgspec.to_builtins(found.records), list[RequestRecord])  # what it says may be of any type
        except (msgspec.ValidationError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise InvalidInput(
                f"{source} looks like a result of {name} but cannot be read: {error!r}", field="FILE"
            ) from error
        return _write(found, source, out)
    raise InvalidInput(f"{source} has an unknown format", field="FILE", remedy="known: " + ", ".join(IMPORTERS.names()))


def _document(source: Path) -> Any:
    if source.is_dir() or source.suffix == ".jsonl":
        return None
    try:
        return msgspec.json.decode(source.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidInput(f"cannot read {source}: {error}", field="FILE") from None


def _write(found: Imported, source: Path, out: Path) -> dict[str, Any]:
    notes = [f"imported from {found.tool}: {source.name}", *found.notes]
    meta = RunMeta(
        settings=RunSettings(endpoint=Endpoint("", found.model), workload=found.tool), notes=notes, finished=True
    )
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / META_FILE, msgspec.json.encode(meta))
    if found.records:
        write_records(out / "records.jsonl", found.records)
        summary = summarize(meta, ShareReport(0, 0, 0, False), found.records, [])
        # Lateness is the other tool's, and no reason to call its run invalid here.
        summary |= {"valid": True, "invalid_because": []}
    else:
        summary = {
            "schema": SCHEMA,
            "model": found.model,
            "workload": found.tool,
            "notes": notes,
            "valid": True,
        } | found.figures
        summary |= {"invalid_because": [], "host": {}, "created": "", "failures": [], "settings": {}}
    write_atomic(out / SUMMARY_FILE, msgspec.json.format(msgspec.json.encode(summary), indent=1))
    return summary


def spread(total: float, events: int) -> list[float]:
    """Tokens of each of `events` events when only their total is known."""
    return [total / events] * events if events else []
