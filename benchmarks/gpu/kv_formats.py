"""Steps of the KV formats beside each other in one process; one JSON line a result.

    kv_formats.py MODEL [REPEATS] [--kv bf16 fp8 int8 int4] [--pool-gb 36]

The weights (random, if MODEL is a folder with nothing but a configuration) are shared, each format has a pool of at most the same
bytes (less where the largest step needs less), and the formats take turns. Contexts are not computed: their blocks hold random
numbers, since a step's time does not depend on them. Times are those of the device for a whole step, medians of ten steps;
ratios are to bf16 if it is among the formats.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time

import torch

from headrace.control.request import Sampling
from headrace.control.step import BlockAppend, Chunk, SlotInit, StepPlan
from headrace.engine.backend import Limits
from headrace.engine.executors.cuda import BACKEND
from headrace.spec.accounting import cache_layout, default_block_tokens
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

FORMATS = ("bf16", "fp8", "int8", "int4")
SEQS, LENGTH = 72, 16640
DECODE = (
    (1, 512),
    (8, 512),
    (64, 512),
    (1, 4096),
    (8, 4096),
    (64, 4096),
    (1, 16384),
    (8, 16384),
    (16, 16384),
    (32, 16384),
)
MIXED = ((64, 512, 0, 256), (64, 512, 4096, 256), (0, 0, 0, 4096), (0, 0, 12288, 4096))
"""Rows that decode, their contexts; cached tokens of a prompt and how many more it brings."""

ROOM = 64
"""Tokens that a sequence has blocks for behind its context."""


def largest_step() -> int:
    """Tokens of the step that needs the most blocks."""
    return max(rows * (context + ROOM) for rows, context in DECODE)


def report(**fields) -> None:
    print("RES", json.dumps(fields), flush=True)


class Format:
    """An executor of one KV format and what is needed to make its steps by hand."""

    def __init__(self, model, name: str, pool_bytes: int) -> None:
        self.name = name
        self.block_tokens = default_block_tokens(name)
        model = copy.copy(model)
        model.kv_precision, model._memory, model._notes = name, list(model._memory), []
        layout = cache_layout(model.spec, name, self.block_tokens)
        self.blocks = min(pool_bytes // layout.bytes_per_block, largest_step() // self.block_tokens)
        begin = time.perf_counter()
        self.executor = model.executor(layout, Limits(self.blocks, SEQS, LENGTH, 4096))
        (pool,) = [m for m in model.memory() if m.name == "kv_pool"]
        report(
            step="ready", kv=name, s=round(time.perf_counter() - begin, 1), pool=[pool.predicted_bytes, pool.actual_bytes],
            pool_tokens=self.blocks * self.block_tokens, block_tokens=self.block_tokens,
            bytes_of_a_token=layout.bytes_per_block // self.block_tokens,
        )  # fmt: skip
        self._fill(self.executor.runner._decoder.pool)
        self.steps = 0

    def _fill(self, pool) -> None:
        for slot in range(len(pool.blocks)):
            kv, scales = pool.layer(slot)
            if self.name == "bf16":
                kv.normal_()
            elif scales is None:
                kv.random_(-(1 << 15), 1 << 15).bitwise_and_(-16449)  # 0xBFBF: no exponent of 2 and more, so no NaN
            else:
                kv.random_(-(1 << 15), 1 << 15)
                scales.fill_(0.01)

    def begin(self, contexts: list[int]) -> tuple[tuple[SlotInit, ...], tuple[BlockAppend, ...]] | None:
        """Slots 0, 1, … with so many cached tokens, and room for some more; None if the pool cannot hold them."""
        inits, appends, at = [], [], 0
        for slot, context in enumerate(contexts):
            count = -(-min(context + ROOM, LENGTH) // self.block_tokens)
            tokens = (7,) * context
            inits.append(SlotInit(slot, f"r{slot}", tokens, context, Sampling(max_tokens=200, temperature=0.0)))
            appends.append(BlockAppend(slot, 0, 0, tuple(range(at, at + count))))
            at += count
        return None if at > self.blocks else (tuple(inits), tuple(appends))

    def step(self, chunks, inits=(), appends=()) -> float:
        self.steps += 1
        result = self.executor.submit(StepPlan(self.steps, (), inits, appends, (), chunks)).result()
        assert not any(r.error for r in result.rows), result.rows
        return 1e3 * result.compute_s

    def decode(self, rows: int, context: int) -> float | None:
        made = self.begin([context] * rows)
        if made is None:
            return None
        times = []
        for k in range(13):
            chunks = tuple(Chunk(slot, context - 1 + k, 1, True) for slot in range(rows))
            times.append(self.step(chunks, *(made if k == 0 else ((), ()))))
        return statistics.median(times[3:])

    def mixed(self, rows: int, context: int, cached: int, length: int) -> float | None:
        times = []
        for _ in range(4):
            made = self.begin([context] * rows + [cached + length])
            if made is None:
                return None
            chunks = tuple(Chunk(slot, context - 1, 1, True) for slot in range(rows))
            times.append(self.step((*chunks, Chunk(rows, cached, length, True)), *made))
        return statistics.median(times[1:])


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("repeats", type=int, nargs="?", default=3)
    parser.add_argument("--kv", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--pool-gb", type=float, default=36.0, help="most that the pool of one format takes")
    return parser.parse_args(given)


def main(a: argparse.Namespace) -> None:
    config = EngineConfig(model=a.model, backend="cuda", device="cuda", weights="bf16", kv="bf16", load_format="dummy")
    files = locate(a.model)
    loaded = BACKEND.load(files, config)
    budget = loaded.kv_budget_bytes(0.9, 256, 4096)
    for name in a.kv:
        tokens_of_a_block = default_block_tokens(name)
        layout = cache_layout(loaded.spec, name, tokens_of_a_block)
        tokens = budget // layout.bytes_per_block * tokens_of_a_block
        report(step="whole card", kv=name, bytes=budget, pool_tokens=tokens, users_at_16k=tokens // 16384)
    formats = [Format(loaded, name, int(a.pool_gb * 1e9)) for name in a.kv]
    torch.cuda.synchronize()
    points = [("decode", *p) for p in DECODE] + [("mixed", *p) for p in MIXED]
    found: dict[tuple, dict[str, list[float]]] = {p: {n: [] for n in a.kv} for p in points}
    for _ in range(a.repeats):
        for kind, *point in points:
            for one in formats:
                ms = getattr(one, kind)(*point)
                if ms is not None:
                    found[kind, *point][one.name].append(round(ms, 3))
    for (kind, *point), times in found.items():
        best = {n: statistics.median(t) for n, t in times.items() if t}
        ratios = {n: round(ms / best["bf16"], 3) for n, ms in best.items() if n != "bf16" and "bf16" in best}
        report(step=kind, point=point, ms=times, to_bf16=ratios)
    report(step="done", peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 1))


if __name__ == "__main__":
    main(arguments())
