"""How long a native step takes, and how near that is to what the machine can do.

    python benchmarks/cpu/native.py --out FILE.json [--model NAME] [--foreign] [--drift] [--quick]

In process, no server: decode step time by batch and context, prefill speed, bytes per second of batch 1 against a plain
read of memory, operations per second against a loop of nothing but byte dot products (`peak.cpp`). `--foreign`: the same
steps beside a process that takes 10 % and 30 % of one core. `--drift`: how far int8 activations and each KV type move the
distributions on English text from those with fp32 ones. Beside FILE.json, FILE.svg shows step time over context and batch.

    python benchmarks/cpu/native.py --out FILE.json --model CONFIG.json --layers N --weights int4

A model without weights, of which a config.json says all: N layers of it with random ones. Two such runs give the time of a layer
and of the rest, so a model larger than the machine is measured in parts.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import headrace_native
import numpy as np
import numpy.typing as npt
import psutil
from noise import Noise, machine
from scipy.stats import t as student

from headrace.base.units import ceil_div
from headrace.control.step import Chunk
from headrace.engine.backend import Limits
from headrace.engine.batch import Slots
from headrace.engine.executors.native import BACKEND
from headrace.engine.native.memory import buffer
from headrace.spec.accounting import (
    Span,
    cache_layout,
    default_block_tokens,
    file_weights_read_bytes,
    flops,
    kv_bytes,
    native_weight_bytes,
)
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate
from headrace.text.tokenizer import Tokenizer

BATCHES = (1, 2, 4, 8, 16, 32, 64, 256)
CONTEXTS = (128, 512, 2048, 8192)
PREFILLS = (32, 128, 256, 512, 1024, 4096)
QUICK_BATCHES, QUICK_CONTEXTS, QUICK_PREFILLS = (1, 8), (128, 512), (32, 128)
POOL_SHARE = 0.6
"""Of the memory available, at most this much for the KV pool; what does not fit is listed as left out."""


class Bench:
    """One model with a KV pool of `tokens` tokens, driven below the scheduler."""

    def __init__(
        self,
        model: str,
        tokens: int,
        threads: int | None,
        kv: str,
        options: tuple[tuple[str, str], ...],
        weights: str = "auto",
    ) -> None:
        self.files = locate(model)
        self.weights = weights
        config = EngineConfig(
            model=model,
            backend="native",
            options=options,
            threads=threads,
            kv=kv,
            weights=weights,
            load_format="auto" if self.files.weights else "dummy",
        )
        if (reason := BACKEND.unavailable(self.files, config)) is not None:
            raise SystemExit(f"{model}: {reason}")
        self.model = BACKEND.load(self.files, config)
        self.spec = self.model.spec
        kv_stored = self.model.kv_precision
        self.layout = cache_layout(self.spec, kv_stored, default_block_tokens(kv_stored))
        most = int(psutil.virtual_memory().available * POOL_SHARE) // self.layout.bytes_per_block
        self.blocks = min(self.width(tokens) * self.layout.num_groups + 80, most)
        limits = Limits(self.blocks, max(BATCHES), self.spec.max_context, max(PREFILLS))
        self.executor = self.model.executor(self.layout, limits)
        self.compute = self.executor._step.__self__._compute
        self.compute.kv[:] = 0  # touched once, so that no step pays for new pages
        self.random = np.random.default_rng(0)

    def close(self) -> None:
        self.executor.close()

    def width(self, tokens: int) -> int:
        """Blocks of one group that hold so many tokens of a sequence."""
        return ceil_div(tokens, self.layout.block_tokens)

    def fits(self, sequences: int, context: int) -> bool:
        return sequences * self.width(context) * self.layout.num_groups <= self.blocks

    def slots(self, starts: list[int], lengths: list[int], ids: list[int] | None = None) -> Slots:
        """As a server holds them: sequences of given ids, or random ones, over blocks in random order."""
        ends = [s + n for s, n in zip(starts, lengths, strict=True)]
        width = max(self.width(end) for end in ends)
        slots = Slots(self.layout, len(starts), max(ends))
        shape = self.layout.num_groups, len(starts), width
        slots.tables[:, :, :width] = self.random.permutation(self.blocks)[: math.prod(shape)].reshape(shape)
        for slot, (start, end) in enumerate(zip(starts, ends, strict=True)):
            slots.tokens[slot, start:end] = ids or self.random.integers(100, self.spec.vocab_size, end - start)
        return slots

    def seconds(self, starts: list[int], lengths: list[int], least_s: float) -> list[float]:
        """Times of whole steps: layers and the head over one row per sequence; choosing a token is left out."""
        chunks = [Chunk(i, s, n, sample=True) for i, (s, n) in enumerate(zip(starts, lengths, strict=True))]
        batch = self.slots(starts, lengths).batch(chunks)
        rows = batch.first_rows + batch.lengths - 1
        found: list[float] = []
        begin = time.perf_counter()
        while len(found) < 5 or time.perf_counter() - begin < least_s:
            at = time.perf_counter()
            self.compute.hidden(batch, rows, lambda: None)
            self.compute.logits(0, len(rows))
            found.append(time.perf_counter() - at)
        return found[1:]

    def decode(self, sequences: int, context: int, least_s: float) -> list[float]:
        """Steps of `sequences` rows that attend to `context` tokens each, their own included."""
        return self.seconds([context - 1] * sequences, [1] * sequences, least_s)

    def log_probabilities(self, ids: list[int], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """[rows, vocab] after the chosen positions of one text, computed in chunks of 256 tokens."""
        slots = self.slots([0], [len(ids)], ids)
        found = []
        for start in range(0, len(ids), 256):
            length = min(256, len(ids) - start)
            chosen = rows[(rows >= start) & (rows < start + length)] - start
            self.compute.hidden(slots.batch([Chunk(0, start, length, sample=True)]), chosen, lambda: None)
            found.append(log_softmax(self.compute.logits(0, len(chosen))))
        return np.concatenate(found)


def log_softmax(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    top = x.max(-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)


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


def int8_peak(threads: int) -> dict[str, object]:
    """Operations per second of nothing but byte dot products in registers; left out without a compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return {"left_out": "no C++ compiler"}
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/peak"
        source = Path(__file__).with_name("peak.cpp")
        subprocess.run([compiler, "-O2", "-march=native", "-pthread", str(source), "-o", program], check=True)
        out = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True).stdout
    found: dict[str, object] = json.loads(out)
    return found


NEIGHBOUR = """
import sys, time
share, begin = float(sys.argv[1]), time.perf_counter()
while True:
    while time.process_time() < share * (time.perf_counter() - begin):
        pass
    time.sleep(0.02 * (1 - share))
"""


@contextmanager
def neighbour(share: float) -> Iterator[psutil.Process]:
    """A process that takes `share` of one core, in slices of about 20 ms; one that got less catches up."""
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(share)])
    try:
        time.sleep(0.3)
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def summary(times: list[float]) -> dict[str, float]:
    return {"median_ms": 1e3 * statistics.median(times), "best_ms": 1e3 * min(times), "steps": len(times)}


def measure(bench: Bench, quick: bool, least_s: float) -> dict[str, object]:
    spec = bench.spec
    kv = bench.model.kv_precision
    if bench.files.kind == "gguf" and bench.weights == "auto":
        weights = file_weights_read_bytes(spec, bench.files.gguf())
    else:  # all but the table that is only looked up
        (held,) = (item.actual_bytes for item in bench.model.memory() if item.name == "weights")
        untied = native_weight_bytes(spec, bench.weights) - native_weight_bytes(
            replace(spec, tied_embeddings=True), bench.weights
        )
        weights = held - untied
    decode, left_out = [], []
    for context in QUICK_CONTEXTS if quick else CONTEXTS:
        for count in QUICK_BATCHES if quick else BATCHES:
            if context > spec.max_context or not bench.fits(count, context):
                left_out.append({"batch": count, "context": context})
                continue
            row = {"batch": count, "context": context} | summary(bench.decode(count, context, least_s))
            work = flops(spec, [Span(context - 1, 1)] * count)
            row["tokens_per_s"] = count / row["median_ms"] * 1e3
            row["gops"] = (work.gemm + work.head) / row["median_ms"] / 1e6
            if count == 1:
                row["gb_per_s"] = (weights + kv_bytes(spec, kv, context)) / row["median_ms"] / 1e6
            decode.append(row)
            print(json.dumps(row), file=sys.stderr)
    prefill = []
    for length in QUICK_PREFILLS if quick else PREFILLS:
        if length > spec.max_context or not bench.fits(1, length):
            continue
        row = {"length": length} | summary(bench.seconds([0], [length], least_s))
        row["tokens_per_s"] = length / row["median_ms"] * 1e3
        # in the last layer only a few rows go further than their keys and values
        row["gops"] = flops(replace(spec, layers=spec.layers[:-1]), [Span(0, length)]).gemm / row["median_ms"] / 1e6
        prefill.append(row)
        print(json.dumps(row), file=sys.stderr)
    return {"weights_read_bytes": weights, "decode": decode, "left_out": left_out, "prefill": prefill}


def foreign_load(bench: Bench, rounds: int, least_s: float) -> list[dict[str, float]]:
    """Step time beside a neighbour over step time alone, in turns; `took` is what the neighbour really got of a core."""
    rows = []
    for share in (0.1, 0.3):
        for count in (1, 8):
            logs, alone, took = [], [], []
            for _ in range(rounds):
                quiet = statistics.fmean(bench.decode(count, 200, least_s))
                with neighbour(share) as process:
                    used, at = sum(process.cpu_times()[:2]), time.perf_counter()
                    beside = statistics.fmean(bench.decode(count, 200, least_s))
                    took.append((sum(process.cpu_times()[:2]) - used) / (time.perf_counter() - at))
                logs.append(math.log(beside / quiet))
                alone.append(quiet)
            mean = statistics.fmean(logs)
            half = student.ppf(0.975, rounds - 1) * statistics.stdev(logs) / math.sqrt(rounds)
            row = {
                "share_of_a_core": share,
                "took": statistics.fmean(took),
                "batch": count,
                "slower": math.exp(mean),
                "low": math.exp(mean - half),
                "high": math.exp(mean + half),
                "alone_ms": 1e3 * statistics.fmean(alone),
                "rounds": rounds,
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
    return rows


def english(model: str, count: int) -> list[int]:
    """The beginning of a slice of the Python language reference, as CPython ships it."""
    files = locate(model)
    tokenizer = (
        Tokenizer.from_gguf(files.gguf().metadata) if files.kind == "gguf" else Tokenizer.from_folder(files.root)
    )
    topics = pydoc_data.topics.topics
    keys = sorted(topics)
    random.Random(7).shuffle(keys)
    return tokenizer.encode("\n\n".join(topics[key] for key in keys[:12]))[:count]


def drift(model: str, threads: int | None, count: int) -> list[dict[str, object]]:
    """KL divergence and agreement of the best token with fp32 activations and fp32 KV, at every fourth position."""
    ids = english(model, count)
    rows = np.arange(3, len(ids), 4)
    expected: npt.NDArray[np.float32] | None = None
    found: list[dict[str, object]] = []
    coded = (("int8", kv) for kv in ("bf16", "fp16", "int8", "fp8", "int4"))
    for activations, kv in (("fp32", "fp32"), ("fp32", "fp16"), *coded):
        bench = Bench(model, len(ids), threads, kv, (("activations", activations),))
        got = bench.log_probabilities(ids, rows)
        bench.close()
        if expected is None:
            expected = got
            continue
        kl = np.array(
            [
                (np.exp(e.astype(np.float64)) * (e.astype(np.float64) - g)).sum()
                for e, g in zip(expected, got, strict=True)
            ]
        )
        half = 1.96 * kl.std() / math.sqrt(len(kl))
        row = {"activations": activations, "kv": kv, "kl": kl.mean(), "kl_95": [kl.mean() - half, kl.mean() + half]}
        row |= {"same_best": float((got.argmax(-1) == expected.argmax(-1)).mean()), "positions": len(rows)}
        found.append(row)
        print(json.dumps(row), file=sys.stderr)
    return found


@contextmanager
def cut(model: str, layers: int | None) -> Iterator[str]:
    """The config.json `model`, or a file of the catalog that holds one, with its first `layers` layers; or the model itself."""
    if layers is None:
        yield model
        return
    found = json.loads(Path(model).read_text())
    config = found.get("config", found)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{Path(model).stem}-{layers}-layers.json")
        path.write_text(json.dumps(config | {"num_hidden_layers": layers}))
        yield str(path)


def draw(record: dict[str, object], path: Path) -> None:
    """Step time over context by batch, and over batch by context."""
    import altair

    data = altair.Data(values=list(record["decode"]))  # type: ignore[call-overload]
    log = altair.Scale(type="log")
    time_ = altair.Y("median_ms:Q", scale=log, title="step, ms")

    def panel(over: str, by: str, values: tuple[int, ...], title: str) -> altair.Chart:
        x = altair.X(f"{over}:Q", scale=log, title=title, axis=altair.Axis(values=list(values)))
        colour = altair.Color(f"{by}:O", title=by, scale=altair.Scale(scheme="viridis"))
        return (
            altair.Chart(data)
            .mark_line(point=True)
            .encode(x=x, y=time_, color=colour)
            .properties(width=420, height=320)
        )

    both = altair.hconcat(
        panel("context", "batch", CONTEXTS, "context, tokens"), panel("batch", "context", BATCHES, "batch, sequences")
    )
    both.resolve_scale(color="independent").properties(title=f"One decode step of {record['model']}").save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quick", action="store_true", help="a few small points, to see that it works")
    parser.add_argument("--foreign", action="store_true")
    parser.add_argument("--drift", action="store_true")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--layers", type=int, help="so many of a config.json's layers, with random weights")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE of the backend")
    args = parser.parse_args()
    options = tuple((name, value) for name, _, value in (text.partition("=") for text in args.option))
    least_s, rounds = (0.05, 2) if args.quick else (0.6, 6)
    batches, contexts = (QUICK_BATCHES, QUICK_CONTEXTS) if args.quick else (BATCHES, CONTEXTS)
    record: dict[str, object] = {"command": " ".join(sys.argv), "model": args.model, "machine": machine()}
    with Noise([]) as noise, cut(args.model, args.layers) as model:
        if args.drift:
            record["drift"] = drift(args.model, args.threads, 128 if args.quick else 1024)
        bench = Bench(model, max(batches) * max(contexts), args.threads, args.kv, options, args.weights)
        threads = args.threads or int(bench.model._pool.threads)
        record["notes"] = bench.model.notes()
        record["read_gb_per_s"] = read_bandwidth(threads) / 1e9
        record["int8_peak"] = int8_peak(threads)
        print(record["notes"], record["read_gb_per_s"], record["int8_peak"], file=sys.stderr)
        record |= measure(bench, args.quick, least_s)
    record["foreign_cores"] = noise.foreign
    if args.foreign:
        record["foreign_load"] = foreign_load(bench, rounds, 3 * least_s)
    bench.close()
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        draw(record, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
