"""Traffic and service levels: what requests look like, when they come, and how fast they must be served."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec

from headrace.base.errors import InvalidInput

TRACE_BLOCK_TOKENS = 512
"""Tokens of one block of a trace's `hash_ids`."""


class Slo(msgspec.Struct, frozen=True):
    """Service levels in milliseconds; None is no limit. `tpot_ms` is the mean time between a request's tokens."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidInput(
                    f"{name} must be above 0, got {value}", field=name, remedy="leave it out for no limit"
                )

    def met(self, ttft_ms: float, tpot_ms: float) -> bool:
        """Whether one request was served in time."""
        return (self.ttft_ms is None or ttft_ms <= self.ttft_ms) and (self.tpot_ms is None or tpot_ms <= self.tpot_ms)


class Preset(msgspec.Struct, frozen=True):
    """A kind of use: lengths, service levels and, if it matters, the least context that must fit."""

    name: str
    isl: int
    osl: int
    slo: Slo
    description: str
    turns: int = 1
    prefix_hit_rate: float = 0.0


PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        Preset("premium-chat", 1024, 512, Slo(500, 20), "interactive chat that feels instant", 5, 0.5),
        Preset("async-agents", 8192, 1024, Slo(5000, 60), "agents working in the background on long contexts", 10, 0.7),
        Preset("offline-batch", 2048, 512, Slo(None, None), "a queue of documents; only dollars count"),
        Preset("voice", 512, 128, Slo(250, 15), "speech: the first sentence must start at once", 8, 0.5),
        Preset("code", 4096, 256, Slo(800, 15), "completion in an editor", 1, 0.6),
        Preset("documents", 32768, 512, Slo(10_000, 50), "questions about long documents", 3, 0.3),
    )
}


def preset(name: str) -> Preset:
    """The preset called `name`; `InvalidInput` lists all."""
    found = PRESETS.get(name)
    if found is None:
        raise InvalidInput(f"unknown preset {name!r}", field="preset", remedy="choose one of: " + ", ".join(PRESETS))
    return found


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `blocks`: ids of its prompt's blocks of `TRACE_BLOCK_TOKENS` tokens, where a trace gives them."""

    at_s: float
    isl: int
    osl: int
    blocks: tuple[int, ...] = ()


def poisson(rate_rps: float, count: int, isl: int, osl: int, seed: int = 0, spread: float = 0.0) -> list[Arrival]:
    """`count` requests at exponential gaps; lengths vary by up to `spread` (a fraction) around the given ones."""
    _check_lengths(isl, osl, spread)
    if not 0 < rate_rps < math.inf:
        raise InvalidInput(f"rate must be above 0 requests per second, got {rate_rps}", field="rate")
    draw = random.Random(seed)
    now, found = 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate_rps)
        found.append(Arrival(now, *_lengths(draw, isl, osl, spread)))
    return found


def burst(count: int, isl: int, osl: int, seed: int = 0, spread: float = 0.0) -> list[Arrival]:
    """`count` requests that are all there at the start (an offline queue, or the stock of a closed loop)."""
    _check_lengths(isl, osl, spread)
    draw = random.Random(seed)
    return [Arrival(0.0, *_lengths(draw, isl, osl, spread)) for _ in range(count)]


def _check_lengths(isl: int, osl: int, spread: float) -> None:
    for name, tokens in (("isl", isl), ("osl", osl)):
        if tokens < 1:
            raise InvalidInput(f"{name} must be at least 1, got {tokens}", field=name)
    if not 0 <= spread <= 1:
        raise InvalidInput(f"spread must be from 0 to 1, got {spread}", field="spread")


def _lengths(draw: random.Random, isl: int, osl: int, spread: float) -> tuple[int, int]:
    def near(n: int) -> int:
        return max(1, round(n * (1 + draw.uniform(-spread, spread))))

    return near(isl), near(osl)


def traces() -> list[str]:
    """Names of the shipped traces."""
    folder = resources.files("headrace.spec").joinpath("traces")
    return sorted(f.name.rsplit(".", 1)[0] for f in folder.iterdir() if f.name.endswith((".csv", ".jsonl")))


def trace(name: str, limit: int | None = None, speed: float = 1.0) -> list[Arrival]:
    """A shipped trace by name, or a file of the same form, replayed `speed` times as fast."""
    if not 0 < speed < math.inf:
        raise InvalidInput(f"speed must be above 0, got {speed}", field="speed")
    text, kind = _trace_text(name)
    rows = sorted(_mooncake(text) if kind == "jsonl" else _azure(text), key=lambda a: a.at_s)
    return [Arrival(a.at_s / speed, a.isl, a.osl, a.blocks) for a in rows[:limit]]


def _trace_text(name: str) -> tuple[str, str]:
    folder = resources.files("headrace.spec").joinpath("traces")
    for kind in ("csv", "jsonl"):
        if folder.joinpath(f"{name}.{kind}").is_file():
            return folder.joinpath(f"{name}.{kind}").read_text(), kind
    path = Path(name).expanduser()
    if path.is_file() and path.suffix in (".csv", ".jsonl"):
        try:
            return path.read_text(encoding="utf-8-sig"), path.suffix[1:]
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{path.name} is not UTF-8 text: {error.reason}", field="trace") from None
    raise InvalidInput(
        f"unknown trace {name!r}", field="trace", remedy="give a .csv or .jsonl file, or one of: " + ", ".join(traces())
    )


def _azure(text: str) -> list[Arrival]:
    try:
        return [
            _arrival(float(r["arrived_at"]), int(r["num_prefill_tokens"]), int(r["num_decode_tokens"]))
            for r in csv.DictReader(text.splitlines())
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"not a trace of arrived_at, num_prefill_tokens, num_decode_tokens: {error}", field="trace"
        ) from None


def _mooncake(text: str) -> list[Arrival]:
    try:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [
            _arrival(r["timestamp"] / 1e3, int(r["input_length"]), int(r["output_length"]), map(int, r["hash_ids"]))
            for r in rows
        ]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(
            f"not a trace of timestamp, input_length, output_length, hash_ids: {error}", field="trace"
        ) from None


def _arrival(at_s: float, isl: int, osl: int, blocks: Iterable[int] = ()) -> Arrival:
    if not 0 <= at_s < math.inf:
        raise ValueError(f"a request at {at_s} seconds")
    return Arrival(at_s, max(1, isl), max(1, osl), tuple(blocks))


def prompt_tokens(arrivals: Sequence[Arrival]) -> list[tuple[int, ...]]:
    """Token ids for each request such that prompts share exactly what their blocks share; without blocks, nothing."""
    found = []
    for number, a in enumerate(arrivals):
        ids: list[int] = []
        for block in a.blocks:
            ids.extend(range(block * TRACE_BLOCK_TOKENS, (block + 1) * TRACE_BLOCK_TOKENS))
        if len(ids) < a.isl:
            # Ids above any block's, different for every request.
            start = (1 << 31) + (number % 4096) * (1 << 18)
            ids.extend(range(start, start + a.isl - len(ids)))
        found.append(tuple(ids[: a.isl]))
    return found
