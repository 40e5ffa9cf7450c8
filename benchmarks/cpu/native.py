"""How long a native step takes, and how near that is to what the machine can do.

    python benchmarks/cpu/native.py --out FILE.json [--quick] [--foreign]

In process, no server. For SmolLM2-135M: decode step time by batch and context, prefill speed, bytes per second of batch 1
against a plain read of the same memory, int8 operations per second against a loop of nothing but dot products; with
`--foreign`, the same steps beside a process that takes 10 % and 30 % of one core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import headrace_native
import numpy as np

from headrace.engine.batch import Batch
from headrace.engine.executors.native import BACKEND
from headrace.engine.native.compute import NativeCompute
from headrace.engine.native.memory import buffer
from headrace.engine.native.rotations import Rotations
from headrace.spec.accounting import Span, cache_layout, file_weights_read_bytes, flops, kv_bytes_per_token
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

MODEL = "smollm2-135m"


class Bench:
    """One model with a KV pool that `batch` sequences of `context` tokens fit into."""

    def __init__(self, tokens: int, options: tuple[tuple[str, str], ...], threads: int | None, kv: str) -> None:
        self.files = locate(MODEL)
        config = EngineConfig(model=MODEL, backend="native", options=options, threads=threads, kv=kv)
        self.model = BACKEND.load(self.files, config)
        self.spec = self.model.spec
        layout = cache_layout(self.spec, self.model.kv_precision, 16)
        self.blocks = -(-tokens // 16) + 80
        made = self.model._plan.build(
            self.model._pool, layout, dict(options).get("kernels", "auto"), self.model._options.exact_activations
        )
        rotations = [Rotations(rope, self.spec.max_context) for rope in self.model._plan.ropes]
        self.compute = NativeCompute(made, self.model._pool, layout, self.blocks, rotations, self.spec.vocab_size)
        self.compute.kv[:] = 0  # touched once, so that no step pays for new pages
        self.rng = np.random.default_rng(0)

    def batch(self, starts: list[int], lengths: list[int]) -> Batch:
        count, rows = len(starts), sum(lengths)
        starts_, lengths_ = np.array(starts, np.int64), np.array(lengths, np.int64)
        firsts = np.cumsum(lengths_) - lengths_
        width = max(-(-(s + n) // 16) for s, n in zip(starts, lengths, strict=True))
        tables = self.rng.permutation(self.blocks)[: count * width].astype(np.int32).reshape(count, width)
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        ids = self.rng.integers(100, self.spec.vocab_size, rows)
        empty = np.empty(0, np.int64)
        return Batch(ids, positions, [], np.arange(count), starts_, lengths_, firsts, [tables], 16, empty)

    def seconds(self, starts: list[int], lengths: list[int], least_s: float = 0.6) -> list[float]:
        """Times of whole steps: layers, head over one row per sequence, greedy choice left out."""
        batch = self.batch(starts, lengths)
        rows = batch.first_rows + batch.lengths - 1
        found: list[float] = []
        begin = time.perf_counter()
        while len(found) < 5 or time.perf_counter() - begin < least_s:
            at = time.perf_counter()
            self.compute.hidden(batch, rows)
            self.compute.logits(0, len(rows))
            found.append(time.perf_counter() - at)
        return found[1:]


def read_bandwidth(threads: int) -> float:
    """Bytes per second of reading far more than the caches hold, by as many threads as steps use."""
    pool = headrace_native.Pool(threads)
    data = buffer(512 << 20)
    data[:] = 1
    best = 0.0
    for _ in range(6):
        at = time.perf_counter()
        headrace_native.checksum(data, pool)
        best = max(best, len(data) / (time.perf_counter() - at))
    return best


def busy(share: float) -> None:
    """Take `share` of one core in slices of 20 ms, until killed."""
    while True:
        end = time.perf_counter() + 0.02 * share
        while time.perf_counter() < end:
            pass
        time.sleep(0.02 * (1 - share))


def summary(times: list[float]) -> dict[str, float]:
    return {"median_ms": 1e3 * statistics.median(times), "best_ms": 1e3 * min(times), "steps": len(times)}


def measure(bench: Bench, quick: bool) -> dict[str, object]:
    spec, header = bench.spec, bench.files.gguf()
    weights = file_weights_read_bytes(spec, header)
    per_token = kv_bytes_per_token(spec, bench.model.kv_precision)
    found: dict[str, object] = {"weights_read_bytes": weights}
    decode = []
    grid = [(b, 128) for b in (1, 2, 4, 8, 16, 32, 64)]
    grid += [(b, c) for c in (512, 2048, 7900) for b in ((1, 8) if quick else (1, 2, 4, 8, 16, 32, 64))]
    for count, context in grid:
        if count * context > 16 * bench.blocks:
            continue
        row = {"batch": count, "context": context} | summary(bench.seconds([context] * count, [1] * count))
        work = flops(spec, [Span(context, 1)] * count)
        row["gops"] = (work.gemm + work.head) / row["median_ms"] / 1e6
        if count == 1:
            row["gb_per_s"] = (weights + context * per_token) / row["median_ms"] / 1e6
        decode.append(row)
        print(row, file=sys.stderr)
    prefill = []
    for length in (128, 256, 512, 1024, 4096):
        row = {"length": length} | summary(bench.seconds([0], [length]))
        row["tokens_per_s"] = length / row["median_ms"] * 1e3
        row["gops"] = flops(spec, [Span(0, length)]).gemm / row["median_ms"] / 1e6
        prefill.append(row)
        print(row, file=sys.stderr)
    return found | {"decode": decode, "prefill": prefill}


def foreign_load(bench: Bench) -> list[dict[str, float]]:
    """Step time of batch 1 and 8 beside a neighbour, interleaved with steps without one."""
    rows = []
    for share in (0.1, 0.3):
        for count in (1, 8):
            alone: list[float] = []
            beside: list[float] = []
            for _ in range(3):
                alone += bench.seconds([200] * count, [1] * count)
                neighbour = multiprocessing.Process(target=busy, args=(share,), daemon=True)
                neighbour.start()
                beside += bench.seconds([200] * count, [1] * count, 1.0)
                neighbour.terminate()
                neighbour.join()
            ratio = statistics.mean(beside) / statistics.mean(alone)
            rows.append({"share": share, "batch": count, "slower": ratio, "alone_ms": 1e3 * statistics.mean(alone)})
            print(rows[-1], file=sys.stderr)
    return rows


def draw(record: dict[str, object], path: Path) -> None:
    """Step time over context, one line per batch size."""
    import altair

    rows = list(record["decode"])  # type: ignore[call-overload]
    chart = altair.Chart(altair.Data(values=rows), title="One decode step of SmolLM2-135M").mark_line(point=True)
    chart.encode(
        x=altair.X("context:Q", scale=altair.Scale(type="log"), title="context, tokens"),
        y=altair.Y("median_ms:Q", scale=altair.Scale(type="log"), title="step, ms"),
        color=altair.Color("batch:O", title="batch"),
    ).properties(width=560, height=360).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--foreign", action="store_true")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE of the backend")
    args = parser.parse_args()
    options = tuple((name, value) for name, _, value in (text.partition("=") for text in args.option))
    bench = Bench(16 * 8192, options, args.threads, args.kv)
    record: dict[str, object] = {
        "command": " ".join(sys.argv),
        "machine": platform.processor() or platform.machine(),
        "cpu": subprocess.run(["lscpu"], capture_output=True, text=True).stdout,
        "notes": bench.model.notes(),
        "read_gb_per_s": read_bandwidth(bench.model._options.threads) / 1e9,
    }
    print(record["notes"], record["read_gb_per_s"], file=sys.stderr)
    record |= measure(bench, args.quick)
    if args.foreign:
        record["foreign_load"] = foreign_load(bench)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        draw(record, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
