"""A multi-turn chat service: real lengths and arrivals, shared prefixes rebuilt from the trace's block hashes.

Equal hash ids become equal text of one block (512 tokens before scaling), so prefixes are shared on the endpoint as
they were in the service. A request that continues an earlier one (their common blocks reach past the first block) is a
later turn of that session: it is not sent before its predecessor has been answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from headrace.bench.traffic import Call, Script, Session, Stage, TrafficContext, WorkloadKind

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Options:
    """A trace has nothing to choose: its lengths and arrivals are its own."""


@dataclass(frozen=True, slots=True)
class Row:
    arrival_s: float
    prompt: int
    output: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class _Turns:
    rows: list[tuple[Row, int, int]] = field(default_factory=list)


@cache
def read_trace() -> tuple[Row, ...]:
    """Requests of the bundled sample in order of arrival."""
    text = files("headrace.bench.workloads").joinpath("data", "mooncake_conversation.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return tuple(Row(r["timestamp"] / 1e3, r["input_length"], r["output_length"], tuple(r["hash_ids"])) for r in rows)


def group_turns(rows: list[tuple[Row, int, int]]) -> list[list[tuple[Row, int, int]]]:
    """Rows put together into sessions of consecutive turns, sessions in order of their first arrival."""
    sessions: list[_Turns] = []
    last_turn: dict[tuple[int, ...], _Turns] = {}
    for entry in rows:
        blocks = entry[0].blocks
        turns = next((last_turn[blocks[:k]] for k in range(len(blocks), 1, -1) if blocks[:k] in last_turn), None)
        if turns is None:
            turns = _Turns()
            sessions.append(turns)
        turns.rows.append(entry)
        for k in range(2, len(blocks)):
            last_turn[blocks[:k]] = turns
    return [turns.rows for turns in sessions]


def sessions(_options: Options, context: TrafficContext) -> Iterator[Session]:
    trace, fitting = read_trace(), context.fitting
    fitting.scale_to(max(row.prompt + row.output for row in trace))
    span_s = trace[-1].arrival_s * (1 + 1 / len(trace))
    index, lap = 0, 0
    while True:
        fitted = [(row, lengths) for row in trace if (lengths := fitting.fit(row.prompt, row.output))]
        if not fitted:
            return
        for turns in group_turns([(row, *lengths) for row, lengths in fitted]):
            yield _session(index, turns, lap, lap * span_s, context)
            index += 1
        lap += 1


def _session(index: int, turns: list[tuple[Row, int, int]], lap: int, at_s: float, context: TrafficContext) -> Session:
    def script() -> Script:
        for row, prompt, output in turns:
            yield Stage((_call(row, prompt, output, lap, context),), not_before_s=row.arrival_s + at_s)

    return Session(index, len(turns), script, turns[0][0].arrival_s + at_s)


def _call(row: Row, prompt: int, output: int, lap: int, context: TrafficContext) -> Call:
    block = context.fitting.scaled(BLOCK_TOKENS)
    left, parts, shared = max(1, prompt - context.writer.template_tokens), [], 0
    for block_id in row.blocks:
        if left <= 0:
            break
        take = min(block, left)
        text = context.writer.unique_text(context.words("block", lap, block_id), block, 500_000 * lap + block_id, "")
        parts.append(
            text if take == block else " ".join(text.split(" ")[: round(take / context.writer.tokens_per_word)])
        )
        shared += take if _first_row(block_id) is not row else 0
        left -= take
    if left > 0:
        parts.append(context.writer.text(context.words("tail", lap, row.arrival_s, row.blocks[-1]), left))
    return Call(" ".join(parts), prompt, output, shared)


@cache
def _first_rows() -> dict[int, Row]:
    first: dict[int, Row] = {}
    for row in read_trace():
        for block_id in row.blocks:
            first.setdefault(block_id, row)
    return first


def _first_row(block_id: int) -> Row:
    return _first_rows()[block_id]


WORKLOAD = WorkloadKind("multi-turn chat with shared 512-token blocks (Mooncake)", Options, sessions, has_arrivals=True)
