"""Choose configurations of skinny products on this card by measuring them: `headrace tune`, never at an engine's start.

Every candidate runs over several copies of its weight, so that none stays in the L2 cache, inside one captured graph. A padded
row count takes the fused products only if they beat cuBLAS and the separate kernels that they replace.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headrace.base.files import write_atomic
from headrace.engine.cuda.decoder import product
from headrace.engine.cuda.products import Products
from headrace.engine.cuda.repack import repacked
from headrace.engine.kernels.decode import DecodeWorkspace, decode_attention
from headrace.engine.kernels.gemm import (
    MAX_ROWS,
    PART_ROWS,
    SPECIALIZED_BYTES,
    Gained,
    GemmConfig,
    GemmWorkspace,
    fused_gemm,
    unfit,
    why_not_specialized,
)
from headrace.engine.kernels.launchers import separate_launchers
from headrace.engine.kernels.quantized import (
    DIRECT_INPUTS,
    DIRECT_ROWS,
    QuantMatrix,
    has_gluon,
    not_direct,
    not_specialized,
    quantized_gemm,
)
from headrace.engine.kernels.table import (
    BULK,
    DECODE_BUCKETS,
    QUANTIZED_BUCKETS,
    STREAMED_AS,
    GemmTable,
    decode_key,
    entry_of,
    file_name,
    key,
    specialized_tile,
    user_folder,
)
from headrace.engine.kernels.unpack import NF4_CODES
from headrace.engine.quant.formats import Format
from headrace.spec.model import ModelSpec

_COPIES_BYTES = 400 << 20
_IN_CHAIN = 6
"""Candidates of a product that are tried beside the other products."""
TUNED = (4, 32, 64)
"""Padded rows that are measured: one set of kernels for a single stream, and for up to so many rows."""
TUNED_SPECIALIZED = (128, 192, 256)
"""More of them where the card runs warp-specialized products; beyond, cuBLAS."""
SPECIALIZED_TILES = {
    64: ((64, 64, 1, 1), (64, 64, 1, 2), (64, 128, 1, 1), (64, 128, 1, 2)),
    128: ((64, 64, 2, 1), (64, 128, 2, 1)),
    192: ((64, 64, 3, 1), (64, 128, 3, 1)),
    256: ((128, 64, 2, 1), (128, 128, 2, 1)),
}
"""Rows and outputs of a group of warps, groups along the rows and along the outputs, by padded rows."""
_SEPARATE_KERNEL_US = 2.5
"""What a small kernel of its own costs inside a graph: launch, ramp and tail."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One product of a model: columns (of each half, if `pair`), inner dimension, and what is fused into it."""

    role: str
    columns: int
    inner: int
    norm: bool = False
    pair: bool = False
    residual: bool = False


def shapes(spec: ModelSpec) -> list[Shape]:
    """The distinct products of a decoder with gated MLPs, the output head among them."""
    hidden = spec.hidden_size
    found: dict[Shape, None] = {}
    for layer in spec.layers:
        a, width = layer.mixer, layer.mlp.intermediate
        attended = a.num_heads * a.head_dim
        found[Shape("qkv", attended + 2 * a.num_kv_heads * a.head_dim, hidden, norm=True)] = None
        found[Shape("out", hidden, attended, residual=True)] = None
        found[Shape("up", width, hidden, norm=True, pair=True)] = None
        found[Shape("down", hidden, width, residual=True)] = None
    found[Shape("head", spec.vocab_size, hidden, norm=True)] = None
    return list(found)


def candidates(bucket: int, shape: Shape, sms: int, *, tma: bool) -> Iterator[GemmConfig]:
    """Configurations worth a measurement: enough programs, stages that fit into shared memory."""
    small = bucket <= 16
    for block_n, block_k, split, warps, stages in itertools.product(
        (16, 32, 64),
        (128, 256, 512) if small else (128, 256),
        (1, 2, 4, 8) if small else (1, 2, 4),
        (4, 8),
        (3, 4, 6) if small else (3, 4),
    ):
        if bucket > 64 or (shape.pair and block_n >= 64 and small):
            continue
        tiles = -(-shape.columns // block_n)
        programs = tiles * split
        weights = block_n * block_k * 2 * (2 if shape.pair else 1)
        shared = (weights + max(16, bucket) * block_k * 2) * (stages - 1)
        if shape.inner % (block_k * split) or shape.columns % block_n or shared > 180_000:
            continue
        if shape.role == "head" and split > 1:
            continue
        in_flight = shared * min(max(1, 200_000 // shared), -(-programs // sms))
        if programs < sms or programs > 16 * sms or in_flight < 40_000 or weights < 8192:
            continue
        if warps == 8 and (block_n * block_k < 64 * 256 or bucket < 32):
            continue
        yield GemmConfig(block_n, block_k, split, warps, stages)
    if not tma or bucket < 16:
        return
    for m, n, row_groups, column_groups in SPECIALIZED_TILES.get(bucket, ()):
        groups = row_groups * column_groups
        stages = SPECIALIZED_BYTES // ((m * row_groups + n * column_groups) * 128)
        found = GemmConfig(
            n, 64, 1, 4 * groups, stages, rows=bucket, block_m=m, row_groups=row_groups, column_groups=column_groups
        )
        if unfit(found, shape.columns, shape.inner, pair=shape.pair) is None:
            yield found
    if bucket > 64:
        return
    for block_n, block_k, split, stages, warps in itertools.product(
        (32, 64, 128), (64, 128), (1, 2, 4), (3, 4, 6, 8), (4,) if bucket <= 64 else (4, 8)
    ):
        programs = shape.columns // block_n * split
        weights = block_n * block_k * 2 * (2 if shape.pair else 1)
        shared = (weights + max(16, bucket) * block_k * 2) * stages
        if shape.inner % (block_k * split) or shape.columns % block_n or not 60_000 < shared < 220_000:
            continue
        if (shape.role == "head" and split > 1) or programs < 0.9 * sms or programs > 8 * sms:
            continue
        registers = bucket * block_n * (2 if shape.pair else 1) // (32 * warps)
        if split * bucket > PART_ROWS or registers > 128:
            continue
        yield GemmConfig(block_n, block_k, split, warps, stages, tma=True)


def quantized_candidates(bucket: int, shape: Shape, w: QuantMatrix, sms: int) -> Iterator[GemmConfig]:
    """The same for quantized weights, whose unpacking takes many warps."""
    if bucket <= DIRECT_ROWS and has_gluon():
        narrow = [(16, *more) for more in itertools.product((2, 4, 8, 16), (1, 2, 4, 7, 8), (0, 80, 128))]
        wide = [] if shape.pair else [(32, *more) for more in itertools.product((8, 16), (1, 2), (0,))]
        for block_n, warps, ahead, registers in narrow + wide:
            found = GemmConfig(block_n, DIRECT_INPUTS, 1, warps, ahead, rows=bucket, direct=True, registers=registers)
            crowded = ahead * (2 if shape.pair else 1) * (8 if w.kind <= NF4_CODES.value else 16) > 120
            if not_direct(w, shape.columns, found) is None and not crowded:
                yield found
        if bucket == 1:
            return
    if bucket >= 32 and why_not_specialized(torch.cuda.get_device_capability(), torch.bfloat16) is None:
        for block_m, block_n in itertools.product({min(bucket, 128), bucket}, (64, 128)):
            found = specialized_tile(w, bucket, block_m, block_n)
            if block_m * block_n <= 16384 and not_specialized(w, found) is None:
                yield found
    if bucket > 64:
        return
    least = max(w.group, 2 * w.chunk_bytes) if w.kind <= NF4_CODES.value else max(w.group, 64)
    shapes = [(16, 1), (32, 2), (64, 2)]
    if bucket >= 64:
        shapes = [(32, 2), (64, 4), (128, 4), (128, 8)]
    for (block_n, warps), block_k, split, stages in itertools.product(
        shapes, (128, 256) if bucket <= 32 else (128,), (1, 2, 4, 8), (3, 4, 6) if bucket <= 32 else (2, 3, 4)
    ):
        programs = shape.columns // block_n * split
        shared = (w.nbytes * block_n * block_k // (len(w) * w.shape[1]) + bucket * block_k * 2) * (stages - 1)
        if shape.inner % (block_k * split) or shape.columns % block_n or block_k % least or shared > 200_000:
            continue
        on_card = min(programs / sms, 220_000 // max(shared, 1), 64 // warps)
        registers = bucket * block_n // (32 * warps) * (2 if w.group else 1)
        if split * bucket > PART_ROWS or registers > 160 or programs < sms or programs > 48 * sms:
            continue
        if bucket <= 32 and (on_card * warps < 5 or on_card * shared < 24_000):
            continue
        yield GemmConfig(block_n, block_k, split, warps, stages, rows=bucket)


def measure_quantized(
    wanted: list[Shape],
    form: Format,
    device: torch.device,
    report: Callable[[str], None],
    *,
    buckets: Sequence[int] = QUANTIZED_BUCKETS,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, dict[str, int] | None]:
    """The table's entries for products with weights of a format, the head left out, which stays as it is.

    As in `measure` the best few of each product alone are tried in a chain of layers.
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    entries: dict[str, dict[str, int] | None] = {}
    products = [s for s in wanted if s.role != "head"]
    benches = {s: QuantizedBench(s, form, dtype, device) for s in products}
    work = {
        (b, s): list(quantized_candidates(b, s, benches[s].weights[0], sms)) for b in buckets for s in products
    }  # fmt: skip
    jobs = [(pair, config) for pair, found in work.items() for config in found]

    def fits(job: tuple[tuple[int, Shape], GemmConfig]) -> bool:
        (bucket, shape), config = job
        return benches[shape].fits(bucket, config)

    with ThreadPoolExecutor(14 if separate_launchers() else 1) as threads:
        good = {job for job, fine in zip(jobs, threads.map(fits, jobs), strict=True) if fine}
    torch.cuda.synchronize(device)
    for bucket in buckets:
        ours = theirs = 0.0
        best: dict[Shape, GemmConfig] = {}
        leading: dict[Shape, list[GemmConfig]] = {}
        for shape in products:
            bench = benches[shape]
            tried = [c for c in work[bucket, shape] if ((bucket, shape), c) in good]
            count = len(bench.weights)
            timed = sorted(
                (graph_us(lambda c=c, b=bench, r=bucket: b.run(r, c), count, 3), i) for i, c in enumerate(tried)
            )
            other = graph_us(lambda b=bench, r=bucket: b.otherwise(r), count, 3)
            us = timed[0][0] if timed else float("inf")
            report(
                f"{form.name} {bucket:3d} {shape.role:5s} {shape.columns}x{shape.inner}: {us:.1f} us "
                f"({bench.weights[0].nbytes / us / 1e6:.2f} TB/s) {tried[timed[0][1]] if timed else 'no candidate fits'}; "
                f"without streaming {other:.1f} us; "
                f"next {[(round(t, 1), astuple(tried[i])[:5]) for t, i in timed[1:4]]}"
            )
            ours, theirs = ours + us, theirs + other + _SEPARATE_KERNEL_US * (shape.norm + shape.pair)
            leading[shape] = [tried[i] for _, i in timed[:_IN_CHAIN]]
            if timed:
                best[shape] = tried[timed[0][1]]
        if all(leading.values()):
            chained, chosen = _chained(benches, leading, bucket, quantized_gemm)
            if chosen:
                report(f"{form.name} {bucket:3d} layer in a chain: {chained:.1f} us, {list(chosen.values())}")
                best = chosen
        report(
            f"{form.name} {bucket:3d} layer: streamed {ours:.1f} us; otherwise, with separate kernels, {theirs:.1f} us"
        )
        for shape in products:
            name = key(bucket, shape.columns, shape.inner, pair=shape.pair, form=STREAMED_AS.get(form.name, form.name))
            entries[name] = entry_of(best[shape]) if ours < theirs else None
    return entries


class QuantizedBench:
    """Measures one product with weights of a format."""

    def __init__(self, shape: Shape, form: Format, dtype: torch.dtype, device: torch.device) -> None:
        width = shape.columns * (2 if shape.pair else 1)
        first = repacked([form.quantize(torch.randn(width, shape.inner, device=device) * 0.02)])
        copies = max(2, min(24, _COPIES_BYTES // 2 // first.nbytes))
        again = [replace(first, codes=first.codes.clone(), scales=first.scales.clone()) for _ in range(copies - 1)]
        self.shape, self.weights, self._device, self._dtype = shape, [first, *again], device, dtype
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.work = GemmWorkspace(PART_ROWS * width, width // 16 + 1, device, sms)
        self.pdl = torch.cuda.get_device_capability(device) >= (9, 0)
        self.squares = torch.ones(shape.columns // 16 + 64, MAX_ROWS.value, dtype=torch.float32, device=device)
        self.norm = torch.ones(shape.columns, dtype=dtype, device=device)
        table = GemmTable("", 1)
        self.products = Products(
            [first],
            table,
            self.work,
            512,
            dtype,
            device,
            capability=torch.cuda.get_device_capability(device),
            pdl=False,
        )
        self.products.config = lambda *_, **__: None  # what is measured beside streaming

    def run(self, rows: int, config: GemmConfig, copies: int | None = None) -> None:
        s = self.shape
        x = torch.empty(rows, s.inner, dtype=self._dtype, device=self._device)
        out = torch.empty(rows, s.columns, dtype=self._dtype, device=self._device)
        gained = Gained(torch.empty_like(out), self.squares) if s.residual else None
        for w in self.weights[:copies]:
            quantized_gemm(
                Gained(x, self.squares, 64) if s.norm else x, w, out, self.work, config, eps=1e-5,
                residual=out if s.residual else None, scale=1e-3, pair="silu" if s.pair else None,
                gain=self.norm if s.residual else None, gained=gained, pdl=self.pdl,
            )  # fmt: skip

    def fits(self, rows: int, config: GemmConfig) -> bool:
        from triton.runtime.errors import OutOfResources

        torch.cuda.set_device(self._device)
        try:
            self.run(rows, config, 1)
        except OutOfResources:
            return False
        return True

    def otherwise(self, rows: int) -> None:
        """Without streaming codes; activation and norms left out."""
        x = torch.zeros(rows, self.shape.inner, dtype=self._dtype, device=self._device)
        out = torch.empty(rows, len(self.weights[0]), dtype=self._dtype, device=self._device)
        for w in self.weights:
            self.products.linear(x, w, None, out)


def graph_us(launch: Callable[[], None], launches: int, repeats: int = 7) -> float:
    """Median microseconds of one of the `launches` that `launch` makes, replayed as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


class Bench:
    """Measures one product in all its ways."""

    def __init__(
        self, shape: Shape, rows: int, dtype: torch.dtype, device: torch.device, copies: int | None = None
    ) -> None:
        width = shape.columns * (2 if shape.pair else 1)
        copies = copies or max(2, min(24, _COPIES_BYTES // (width * shape.inner * 2)))
        self.shape = shape
        self.weights = [torch.randn(width, shape.inner, dtype=dtype, device=device) * 0.02 for _ in range(copies)]
        self.x = torch.randn(rows, shape.inner, dtype=dtype, device=device)
        self.norm = torch.ones(shape.columns, dtype=dtype, device=device)
        self.squares = torch.ones(shape.columns // 16 + 64, MAX_ROWS.value, dtype=torch.float32, device=device)
        kind = torch.float32 if shape.role == "head" else dtype
        self.out = torch.zeros(rows, shape.columns, dtype=kind, device=device)
        self.wide = torch.zeros(rows, width, dtype=kind, device=device)
        capability, card = torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device)
        programs = card.multi_processor_count if why_not_specialized(capability, dtype) is None else 0
        self.work = GemmWorkspace(PART_ROWS * width, width // 16 + 1, device, programs)
        self.pdl = capability >= (9, 0)

    def skinny(self, config: GemmConfig) -> None:
        s = self.shape
        x = Gained(self.x, self.squares, 64) if s.norm else self.x
        gained = Gained(torch.empty_like(self.out), self.squares) if s.residual else None
        for w in self.weights:
            fused_gemm(
                x, w, self.out, self.work, config, eps=1e-5, residual=self.out if s.residual else None, scale=1e-3,
                pair="silu" if s.pair else None, gain=self.norm if s.residual else None, gained=gained, pdl=self.pdl,
            )  # fmt: skip

    def cublas(self) -> None:
        for w in self.weights:
            product(self.x, w, self.wide)

    @property
    def nbytes(self) -> int:
        return self.weights[0].nbytes


def measure(
    wanted: list[Shape],
    device: torch.device,
    report: Callable[[str], None],
    *,
    buckets: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, dict[str, int] | None]:
    """The table's entries for these products; `report` gets one line per product and padded row count.

    The best few of each product alone are then tried in a chain of layers, where one kernel's end is the next one's begin.
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    entries: dict[str, dict[str, int] | None] = {}
    if buckets is None:
        specialized = why_not_specialized(torch.cuda.get_device_capability(device), dtype) is None
        buckets = (*TUNED, *(TUNED_SPECIALIZED if specialized else ()))
    pairs = list(itertools.product(buckets, wanted))
    tma = torch.cuda.get_device_capability(device) >= (9, 0)
    work = {pair: list(candidates(pair[0], pair[1], sms, tma=tma)) for pair in pairs}
    fits = _compile_all(work, dtype, device)
    for bucket in buckets:
        theirs = 0.0
        leading: dict[Shape, list[GemmConfig]] = {}
        benches: dict[Shape, Bench] = {}
        for shape in wanted:
            name = key(bucket, shape.columns, shape.inner, pair=shape.pair)
            bench = Bench(shape, _rows(bucket), dtype, device)
            tried = [c for c, good in zip(work[bucket, shape], fits[bucket, shape], strict=True) if good]
            timed = sorted(
                (graph_us(lambda c=c, b=bench: b.skinny(c), len(bench.weights)), i) for i, c in enumerate(tried)
            )
            cublas = graph_us(bench.cublas, len(bench.weights))
            separate = _SEPARATE_KERNEL_US * (shape.norm + shape.pair)
            best = timed[0][0] if timed else float("inf")
            report(
                f"{bucket:3d} {shape.role:5s} {shape.columns}x{shape.inner}: {best:.1f} us "
                f"({bench.nbytes / best / 1e6:.2f} TB/s) {tried[timed[0][1]] if timed else 'no candidate fits'}; "
                f"cuBLAS alone {cublas:.1f} us"
            )
            entries[name] = None
            if shape.role == "head":
                if best < cublas + separate:
                    entries[name] = entry_of(tried[timed[0][1]])
                continue
            theirs += cublas + separate
            leading[shape] = [tried[i] for _, i in timed[:_IN_CHAIN]]
            benches[shape] = bench
        ours, chosen = float("inf"), {}
        if all(leading.values()):
            ours, chosen = _chained(benches, leading, _rows(bucket), fused_gemm)
        report(f"{bucket:3d} layer: fused, in a chain {ours:.1f} us; cuBLAS and separate kernels {theirs:.1f} us")
        if ours < theirs:
            for shape, config in chosen.items():
                report(f"{bucket:3d} {shape.role:5s} {config}")
                entries[key(bucket, shape.columns, shape.inner, pair=shape.pair)] = entry_of(config)
    return entries


def _chained(
    benches: Mapping[Shape, Bench | QuantizedBench],
    leading: dict[Shape, list[GemmConfig]],
    rows: int,
    multiply: Callable[..., None],
) -> tuple[float, dict[Shape, GemmConfig]]:
    """The best of each product's candidates beside the others' (one changed at a time), and the time of a layer of them.

    The products of a layer follow each other as in the model, attention left out: what one writes the next one reads.
    """
    roles = {s.role: s for s in benches}
    if len(roles) < len(benches) or set(roles) != {"qkv", "out", "up", "down"}:
        return float("inf"), {}  # layers of several kinds: no one chain stands for them
    qkv, out, up, down = (benches[roles[r]] for r in ("qkv", "out", "up", "down"))
    projected, x, wide = (
        torch.zeros(rows, b.shape.columns, dtype=b.norm.dtype, device=b.norm.device) for b in (qkv, out, up)
    )
    hidden = Gained(torch.randn_like(x), torch.ones_like(out.squares), 64)
    between = Gained(torch.randn_like(x), torch.ones_like(out.squares), 64)
    layers = 12

    def launch(configs: dict[Shape, GemmConfig]) -> None:
        def product(bench: Bench | QuantizedBench, source, target, i: int, **more) -> None:
            weight = bench.weights[i % len(bench.weights)]
            multiply(
                source, weight, target, bench.work, configs[bench.shape], eps=1e-5, pdl=bench.pdl, scale=1e-3, **more
            )

        for i in range(layers):
            product(qkv, hidden, projected, i)
            product(out, projected[:, : out.shape.inner], x, i, residual=x, gain=out.norm, gained=between)
            product(up, between, wide, i, pair="silu")
            product(down, wide, x, i, residual=x, gain=down.norm, gained=hidden)

    best = {shape: found[0] for shape, found in leading.items()}
    least = graph_us(lambda: launch(best), layers)
    for shape, found in leading.items():
        for config in found[1:]:
            tried = best | {shape: config}
            if (us := graph_us(lambda t=tried: launch(t), layers)) < least:
                best, least = tried, us
    return least, best


def _rows(bucket: int) -> int:
    """Rows that a bucket is measured with: the smallest bucket stands for a single stream."""
    return 1 if bucket == TUNED[0] else bucket


def _compile_all(
    work: dict[tuple[int, Shape], list[GemmConfig]], dtype: torch.dtype, device: torch.device
) -> dict[tuple[int, Shape], list[bool]]:
    """Which configurations compile and fit, found by processes side by side; their code is in the disk cache afterwards."""
    jobs = [(pair, config) for pair, configs in work.items() for config in configs]
    count = max(1, min(len(jobs), (os.cpu_count() or 2) - 2))
    parts = [jobs[i::count] for i in range(count)]
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(_compile_part, parts, [dtype] * count, [str(device)] * count))
    good = {
        job: fine for part, found in zip(parts, results, strict=True) for job, fine in zip(part, found, strict=True)
    }
    return {pair: [good[pair, config] for config in configs] for pair, configs in work.items()}


def _compile_part(jobs: list[tuple[tuple[int, Shape], GemmConfig]], dtype: torch.dtype, device: str) -> list[bool]:
    from triton.runtime.errors import OutOfResources

    found = []
    benches: dict[tuple[int, Shape], Bench] = {}
    for pair, config in jobs:
        if pair not in benches:
            benches = {pair: Bench(pair[1], _rows(pair[0]), dtype, torch.device(device), copies=1)}
        try:
            benches[pair].skinny(config)
            torch.cuda.synchronize()
            found.append(True)
        except OutOfResources:
            found.append(False)
    return found


_DECODE_KINDS = (
    (64, 2, 3), (64, 2, 4), (64, 2, 2), (64, 1, 3), (32, 1, 5), (32, 1, 4), (32, 1, 3), (64, 4, 2), (64, 4, 3),
    (32, 2, 4), (32, 2, 6), (128, 4, 2),
)  # fmt: skip
"""Keys at once, warps, stages of decode attention."""
_BULK_KINDS = ((1, 6), (1, 5), (1, 4), (1, 3), (2, 6), (2, 4), (2, 3), (4, 3))
"""Warps and stages of decode attention by bulk copies."""


def measure_decode(
    spec: ModelSpec, device: torch.device, report: Callable[[str], None], *, buckets=DECODE_BUCKETS
) -> dict[str, dict[str, int]]:
    """The table's entries for decode attention by rows: the least time at 64 to 1,216 tokens, for a single row at 160 and 16,384."""
    from triton.runtime.errors import OutOfResources

    a = spec.layers[0].mixer
    heads, kv_heads, dim, block = a.num_heads, a.num_kv_heads, a.head_dim, 16
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    turns = torch.rand(16384, dim, device=device)
    capability = torch.cuda.get_device_capability(device)
    pdl = capability >= (9, 0)
    no_bulk = "no Gluon"
    if has_gluon():
        from headrace.engine.kernels.decode_hopper import decode_hopper
        from headrace.engine.kernels.decode_hopper import fits as bulk_fits

        no_bulk = bulk_fits(capability, torch.bfloat16, dim, heads // kv_heads, block)
    entries = {}
    for bucket in buckets:
        # Many rows have contexts of all lengths, as in a batch of requests, the longest first.
        rows, contexts = (1, (160, 16384)) if bucket == buckets[0] else (bucket, (1216,))
        lengths = {
            c: torch.linspace(c, c if rows == 1 else 64, rows, device=device).int() for c in contexts
        }  # fmt: skip
        layers = max(2, min(16, _COPIES_BYTES // (rows * contexts[-1] * kv_heads * dim * 4)))
        qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=device, dtype=torch.bfloat16)
        out = torch.zeros(rows, heads * dim, device=device, dtype=torch.bfloat16)
        blocks = rows * contexts[-1] // block
        pools = [
            torch.randn(blocks + 1, 2, kv_heads, block, dim, device=device, dtype=torch.bfloat16) for _ in range(layers)
        ]
        table = torch.randperm(blocks, device=device).int().view(rows, -1)
        slots = torch.arange(rows, dtype=torch.int32, device=device)
        work = DecodeWorkspace(rows, kv_heads, heads // kv_heads, dim, lambda n: 100, device)
        filled = {max(1, -(-k * sms // (rows * kv_heads))) for k in (2, 3, 4)}
        splits = {min(100, n) for n in filled} | ({1, 2, 4} if rows > 1 else set())
        chunks = (64, 128) if rows == 1 else (128, 256, 512)

        def launch(kind, split, chunk, context, pools=pools, rest=(qkv, out, table, slots, work, lengths)) -> None:
            qkv, out, table, slots, work, lengths = rest
            at = lengths[context] - 1
            for kv in pools:
                decode_attention(
                    qkv, out, kv, table, slots, at, work, heads, scale=dim**-0.5, cos_sin=turns, rope_dim=dim,
                    splits=split, min_chunk=chunk, block_n=kind[0], num_warps=kind[1], stages=kind[2], pdl=pdl,
                )  # fmt: skip

        def fits(kind, launch=launch, pools=pools, context=contexts[0]) -> bool:
            torch.cuda.set_device(device)
            try:
                launch(kind, 1, 128, context, pools[:1])
            except OutOfResources:
                return False
            return True

        with ThreadPoolExecutor(12 if separate_launchers() else 1) as threads:
            good = [k for k, fine in zip(_DECODE_KINDS, threads.map(fits, _DECODE_KINDS), strict=True) if fine]
        torch.cuda.synchronize(device)
        timed = []
        for kind, split, chunk in itertools.product(good, sorted(splits), chunks):
            us = [graph_us(lambda c=c: launch(kind, split, chunk, c), layers, 5) for c in contexts]  # noqa: B023
            timed.append((sum(us), us, kind, split, chunk))
        timed.sort()
        for total, us, kind, split, chunk in timed[:3]:
            rate = int(lengths[contexts[-1]].sum()) * kv_heads * dim * 4 / us[-1] / 1e6
            report(f"attention of {rows} rows: {total:.1f} us = {[round(u, 1) for u in us]} up to {contexts}, {rate:.2f} TB/s: "
                   f"keys, warps, stages {kind}, splits {split}, at least {chunk} keys")  # fmt: skip
        _, _, kind, split, chunk = timed[0]
        entries[decode_key(bucket, dim)] = {
            "block_n": kind[0], "num_warps": kind[1], "stages": kind[2], "splits": split, "min_chunk": chunk,
        }  # fmt: skip
        if no_bulk is None:

            def bulk(way, split, least, context, pools=pools, rest=(qkv, out, table, slots, work, lengths)) -> None:
                qkv, out, table, slots, work, lengths = rest
                at = lengths[context] - 1
                for kv in pools:
                    decode_hopper(
                        qkv, out, kv, table, slots, at, work, heads, scale=dim**-0.5, cos_sin=turns, rope_dim=dim,
                        splits=split, least=least, warps=way[0], stages=way[1], pdl=pdl,
                    )  # fmt: skip

            entries[decode_key(bucket, dim, BULK)] = _fastest_bulk(
                bulk, rows, sorted(splits), contexts, layers, device, report
            )  # fmt: skip
        pools.clear()
    return entries


def _fastest_bulk(launch, rows, splits, contexts, layers, device, report) -> dict[str, int]:
    """The entry of decode attention by bulk copies: of all ways, programs and least pages, those of the least time."""

    def compile_way(way) -> None:
        torch.cuda.set_device(device)
        launch(way, 1, 4, contexts[0])

    with ThreadPoolExecutor(12 if separate_launchers() else 1) as threads:
        list(threads.map(compile_way, _BULK_KINDS))
    torch.cuda.synchronize(device)
    timed = []
    # Many rows fill the card by themselves: then only long contexts are cut.
    leasts = (4, 8) if rows <= 32 else (64,)
    for way, split, least in itertools.product(_BULK_KINDS, splits, leasts):
        us = [graph_us(lambda c=c: launch(way, split, least, c), layers, 5) for c in contexts]  # noqa: B023
        timed.append((sum(us), us, way, split, least))
    timed.sort()
    for total, us, way, split, least in timed[:3]:
        report(f"attention of {rows} rows by bulk copies: {total:.1f} us = {[round(u, 1) for u in us]} up to {contexts}: "
               f"warps, stages {way}, splits {split}, at least {least} pages")  # fmt: skip
    _, _, way, split, least = timed[0]
    return {"warps": way[0], "stages": way[1], "programs": rows * split, "least": least}


def write_table(
    card: str,
    entries: dict[str, dict[str, int] | None],
    folder: Path | None = None,
    decode: dict[str, dict[str, int]] | None = None,
    library: Mapping[str, Any] | None = None,
) -> Path:
    """Add entries to the card's own table below `folder` (the user's data folder); returns its path.

    `library`: what `measure_library` found; it takes the place of entries that another version of the library was measured with.
    """
    folder = user_folder() if folder is None else folder
    path = folder / file_name(card)
    known = json.loads(path.read_text()) if path.exists() else {}
    table = {
        "card": card,
        "decode": known.get("decode", {}) | (decode or {}),
        "gemm": known.get("gemm", {}) | entries,
    }
    before = known.get("library")
    if library is None:
        library = before
    elif before is not None and before["version"] == library["version"]:
        library = {**library, "products": before["products"] | library["products"]}
    if library is not None:
        table["library"] = library
    write_atomic(path, json.dumps(table, indent=1) + "\n")
    return path
