"""Replay of a (arrival, prompt tokens, output tokens) trace with unique prompts."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from headrace.bench.traffic import Call, Session, TrafficContext, single
from headrace.bench.workloads.random import unique_call


@dataclass(frozen=True, slots=True)
class Options:
    """A trace has nothing to choose: its lengths and arrivals are its own."""


@cache
def read_trace(name: str) -> tuple[tuple[float, int, int], ...]:
    """(arrival seconds, prompt tokens, output tokens) of each request of a bundled trace."""
    text = files("headrace.bench.workloads").joinpath("data", f"{name}.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return tuple((float(r["arrived_at"]), int(r["num_prefill_tokens"]), int(r["num_decode_tokens"])) for r in rows)


def replay(name: str, context: TrafficContext) -> Iterator[Session]:
    """The trace in its order; after its last request it begins again, later by its own span."""
    rows = read_trace(name)
    span_s = rows[-1][0] * (1 + 1 / len(rows))
    context.fitting.scale_to(max(prompt + output for _, prompt, output in rows))
    index, lap = 0, 0
    while True:
        for arrived_s, prompt, output in rows:
            lengths = context.fitting.fit(prompt, output)
            if lengths is None:
                continue

            def make(i: int = index, p: int = lengths[0], o: int = lengths[1]) -> Call:
                return unique_call(context, i, p, o)

            yield single(index, make, arrived_s + lap * span_s)
            index += 1
        lap += 1
        if index == 0:
            return
