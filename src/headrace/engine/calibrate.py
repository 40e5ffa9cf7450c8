"""What a GPU reaches: memory bandwidth, matrix products, launches. Measured, and written as a catalog entry."""

from __future__ import annotations

import datetime
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl

from headrace.base.errors import InvalidInput
from headrace.base.files import write_atomic
from headrace.base.units import GIB
from headrace.spec.hardware import FIGURES, Gpu, Sourced, calibrated_dir, find, parse

SIDES = (4096, 8192, 16384)
LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""Products [columns, inner] of a 7B model's layer: what a sustained rate is measured on."""
LAYER_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class GpuCeilings:
    """Bytes and operations per second of one card; products are bf16 on random values, since zeros raise the clock.

    `best_tflops`: the fastest square product. `sustained_tflops`: a 7B layer's products over and over. `launch_us` and
    `graph_us`: from one empty kernel to the next, launched one by one from Python and inside a graph.
    """

    card: str
    memory_gib: float
    read_gbs: float
    copy_gbs: float
    best_tflops: float
    sustained_tflops: float
    launch_us: float
    graph_us: float


@triton.jit
def _read(source, out, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK * TURNS + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for turn in range(TURNS):
        total += tl.load(source + at + turn * BLOCK).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _nothing(out):
    if tl.program_id(0) < 0:
        tl.store(out, 0.0)


def measure_gpu(device: torch.device, seconds: float = 2.0) -> GpuCeilings:
    """Measure one card, about `seconds` for each figure; others' work on it would count against it."""
    if not seconds > 0:
        raise InvalidInput(f"seconds must be above 0, got {seconds}", field="seconds")
    free, memory = torch.cuda.mem_get_info(device)
    size = 1 << min(32, (free // 4).bit_length() - 1)
    source = torch.empty(size // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    block, turns = 4096, 16
    sums = torch.empty(source.numel() // (block * turns), device=device)
    read = size / _median_s(lambda: _read[(len(sums),)](source, sums, block, turns, num_warps=8), seconds)
    copy = 2 * size / _median_s(lambda: target.copy_(source), seconds)
    best = 0.0
    for side in SIDES:
        if 6 * side * side > free // 2:
            break
        left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
        best = max(best, 2 * side**3 / _median_s(lambda a=left, b=right: torch.mm(a, b), seconds / len(SIDES)))
    weights = [torch.randn(n, k, dtype=torch.bfloat16, device=device) * 0.02 for n, k in LAYER]
    inputs = [torch.randn(LAYER_TOKENS, k, dtype=torch.bfloat16, device=device) for _, k in LAYER]
    flops = sum(2 * LAYER_TOKENS * n * k for n, k in LAYER)

    def layer() -> None:
        for x, w in zip(inputs, weights, strict=True):
            torch.mm(x, w.t())

    sustained = flops / _median_s(layer, 2 * seconds)
    launch, graph = _launch_s(device)
    return GpuCeilings(
        torch.cuda.get_device_name(device), memory / GIB, read / 1e9, copy / 1e9, best / 1e12, sustained / 1e12,
        1e6 * launch, 1e6 * graph,
    )  # fmt: skip


def _median_s(run: Callable[[], object], seconds: float) -> float:
    """Median seconds of the runs that fit in the time, at least five, after two to warm up."""
    for _ in range(2):
        run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(begin.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def _launch_s(device: torch.device, count: int = 1000) -> tuple[float, float]:
    out = torch.zeros(1, device=device)

    def many() -> None:
        for _ in range(count):
            _nothing[(1,)](out)

    many()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many()
    return _median_s(many, 0.1) / count, _median_s(graph.replay, 0.1) / count


def write_gpu_entry(found: GpuCeilings, name: str | None = None, price_usd_h: float | None = None) -> Path:
    """Write `<data folder>/gpus/<name>.toml`: the catalog's entry for the card, if it has one, with what was measured.

    `name` is the entry's id, by default the catalog's own, which the new entry then replaces.
    """
    known: Gpu | None
    try:
        known = find(re.sub(r"^NVIDIA ", "", found.card))
    except InvalidInput:
        known = None
    entry = name or (known.id if known is not None else re.sub(r"[^a-z0-9]+", "-", found.card.lower()).strip("-"))
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,40}", entry):
        raise InvalidInput(f"name must be lower case letters, digits and dashes, got {entry!r}", field="name")
    today = datetime.date.today().isoformat()

    def measured(value: float, high: float | None = None) -> Sourced:
        return Sourced(value, value, high or value, "measured", "headrace calibrate", today)

    figures = dict(known.figures) if known is not None else {}
    figures |= {
        "memory_gib": measured(found.memory_gib),
        "measured_read_gbs": measured(found.read_gbs),
        "measured_copy_gbs": measured(found.copy_gbs),
        "measured_bf16_tflops": measured(found.sustained_tflops, max(found.best_tflops, found.sustained_tflops)),
    }
    figures.setdefault("bandwidth_gbs", measured(found.read_gbs))
    figures.setdefault("bf16_tflops", measured(found.best_tflops))
    if price_usd_h is not None:
        figures["price_usd_h"] = Sourced(price_usd_h, price_usd_h, price_usd_h, "exact", "given by the user", today)
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    top: dict[str, object] = {
        "id": entry,
        "name": known.name if known is not None else found.card,
        "generation": known.generation if known is not None else "unknown",
        "arch": known.arch if known is not None else "unknown",
        "capability": known.capability if known is not None else f"{major}.{minor}",
        "link": known.link if known is not None else "none",
        "link_name": known.link_name if known is not None else "none",
        "max_linked_gpus": known.max_linked_gpus if known is not None else 1,
        "memory_gb_marketing": known.memory_gb_marketing if known is not None else round(found.memory_gib, 1),
        "notes": f"launch {found.launch_us:.1f} us, {found.graph_us:.1f} us inside a graph",
    }
    aliases = known.aliases if known is not None and entry == known.id else ()
    lines = [f"{key} = {_toml(value)}" for key, value in top.items()]
    lines.insert(2, "aliases = [" + ", ".join(_toml(alias) for alias in aliases) + "]")
    for figure in FIGURES:
        if (sourced := figures.get(figure)) is not None:
            lines += ["", f"[{figure}]", *_sourced_lines(sourced)]
    text = "\n".join(lines) + "\n"
    path = calibrated_dir() / f"{entry}.toml"
    parse(text, str(path))
    write_atomic(path, text)
    return path


def _sourced_lines(s: Sourced) -> list[str]:
    if s.value is None:
        fields: dict[str, object] = {"absent": s.absent}
    else:
        fields = {
            "value": round(s.value, 3),
            "low": round(s.low or s.value, 3),
            "high": round(s.high or s.value, 3),
            "grade": s.grade,
        }
    fields |= {"source": s.source, "date": s.date} | ({"note": s.note} if s.note else {})
    return [f"{key} = {_toml(value)}" for key, value in fields.items()]


def _toml(value: object) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)
