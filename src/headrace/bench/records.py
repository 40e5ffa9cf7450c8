"""What is kept of a run: one line per request, written when the request ends, never rewritten."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Annotated, TypeVar

import msgspec

from headrace.base.errors import InvalidInput
from headrace.base.files import naming

RECORDS_FILE = "records.jsonl"
SAMPLES_FILE = "samples.jsonl"
META_FILE = "run.json"
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"

_S = TypeVar("_S", bound=msgspec.Struct)
_T = TypeVar("_T")
MOST_TOKENS = 10**9
"""Of one answer or event: no server counts more and is right."""
_Tokens = Annotated[float, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class Outcome(StrEnum):
    """How a request ended; everything but `ok` is counted and listed, and never enters an average."""

    OK = "ok"
    REFUSED = "refused"
    HTTP_ERROR = "http_error"
    STREAM_ERROR = "stream_error"
    CUT = "cut"
    TIMEOUT = "timeout"
    EMPTY = "empty"
    WRONG_LENGTH = "wrong_length"
    NEGATIVE_TIME = "negative_time"


class TokenSource(StrEnum):
    """Where the tokens of each event come from; `spread` and `assumed` are estimates and are reported as such."""

    CHUNK_USAGE = "chunk_usage"
    TOKEN_IDS = "token_ids"
    ONE_PER_CHUNK = "one_per_chunk"
    SPREAD = "spread"
    ASSUMED = "assumed"


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. Times are seconds since the run's origin, on CLOCK_MONOTONIC of the client.

    intended: when the arrival process, the free slot or the end of think time wanted it · sent: the body left ·
    headers, first_byte: the response's · reconnected: sent again,
    since the server had closed the idle connection · event_s, event_tokens: each event that carried text · end: the stream's end.
    """

    index: int
    session: int = 0
    stage: int = 0
    branch: int = 0
    segment: int = 0
    intended_s: float
    sent_s: float = 0.0
    headers_s: float = 0.0
    first_byte_s: float = 0.0
    end_s: float = 0.0
    event_s: list[float] = []
    event_tokens: list[_Tokens] = []
    token_source: TokenSource = TokenSource.ASSUMED
    prompt_tokens_declared: int = 0
    shared_tokens_declared: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens_asked: int = 0
    output_tokens: int | None = None
    finish_reason: str | None = None
    outcome: Outcome = Outcome.OK
    http_status: int = 0
    error: str = ""
    response_id: str = ""
    reconnected: bool = False
    prompt_hash: str = ""

    @property
    def tokens_out(self) -> float:
        """Tokens received: the server's count where it gives one, else what the events carried."""
        return float(self.output_tokens) if self.output_tokens is not None else float(sum(self.event_tokens))


class ServerSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the server's `/metrics` said at one moment of the run; None where it has no such metric."""

    at_s: float
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    energy_j: float | None = None


class RecordLog:
    """Appends records to a file, one JSON line each, flushed at once so that a crash loses nothing that had ended."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_partial_line(path)
        self._path = path
        self._file = path.open("ab")
        self._encoder = msgspec.json.Encoder()

    def append(self, record: msgspec.Struct) -> None:
        with naming(self._path):
            self._file.write(self._encoder.encode(record) + b"\n")
            self._file.flush()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()

    def __enter__(self) -> RecordLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _drop_partial_line(path: Path) -> None:
    """A process that died while writing leaves half a line; cut it off so that the next line starts clean."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)


def read_records(path: Path) -> list[RequestRecord]:
    """All whole records of a file, the latest one of each index, in index order."""
    latest = {record.index: record for record in read_lines(path, RequestRecord)}
    for record in latest.values():
        if len(record.event_s) != len(record.event_tokens):
            raise InvalidInput(
                f"request {record.index} has {len(record.event_s)} events and tokens of {len(record.event_tokens)}",
                field=str(path),
            )
    return [latest[index] for index in sorted(latest)]


def read_samples(path: Path) -> list[ServerSample]:
    """All server samples of a file in time order; empty when the file is missing."""
    return sorted(read_lines(path, ServerSample), key=lambda sample: sample.at_s) if path.exists() else []


def read_lines(path: Path, kind: type[_S]) -> Iterator[_S]:
    """What a `RecordLog` wrote, in order, up to a last line that was cut off. `InvalidInput` names a damaged line."""
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidInput(f"line {number} is not a {kind.__name__}: {error}", field=str(path)) from error


def read_json(path: Path, kind: type[_T]) -> _T:
    """A file that a run wrote whole, as `kind`. `InvalidInput` names the file and what is wrong in it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} is damaged: {error}", field="DIR") from None


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """Write a whole record file (importers)."""
    path.unlink(missing_ok=True)
    with RecordLog(path) as log:
        for record in records:
            log.append(record)
