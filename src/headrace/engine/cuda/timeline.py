"""Where a step's time goes on the device: kernels by kind, from the profiler's own records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

KINDS = (
    ("attention", ("_decode", "_prefill", "_prefix", "_merge_parts")),
    ("rope and cache", ("_rope_cache", "_code_groups", "stage_keys")),
    ("norm", ("_add_norm",)),
    ("activation", ("_activate", "_round_rows")),
    (
        "gemm",
        (
            "_skinny",
            "_quantized",
            "_dequantize",
            "_rescale",
            "gemm",
            "nvjet",
            "cutlass",
            "splitK",
            "cublas",
            "gemv",
            "Kernel2",
        ),
    ),
    ("sampling", ("_greedy", "_draw")),
    ("embedding", ("_embed",)),
    ("copies", ("Memcpy", "Memset", "_scatter", "_copy", "_gather")),
)


@dataclass(frozen=True, slots=True)
class KindTime:
    """Device time of one kind of kernel: per step, number of launches per step."""

    kind: str
    us: float
    launches: float
    names: dict[str, float]


def kind_of(name: str) -> str:
    """The kind that a kernel's name belongs to."""
    if name == "kernel":  # of the modules whose one kernel has no other name, all of them products
        return "gemm"
    return next((kind for kind, parts in KINDS if any(p in name for p in parts)), "other")


def profiled(run: Callable[[], object], steps: int, trace: Path | None = None) -> tuple[list[KindTime], float]:
    """Run `run`, which makes `steps` steps, under the profiler; time per step by kind and from first to last kernel, us."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return summed(((e.name, e.time_range.start, e.time_range.end) for e in events), steps)


def summed(events: Iterable[tuple[str, float, float]], steps: int) -> tuple[list[KindTime], float]:
    """The table of `profiled` from (name, start us, end us)."""
    time: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    names: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    first, last = float("inf"), float("-inf")
    for name, start, end in events:
        kind = kind_of(name)
        time[kind] += end - start
        count[kind] += 1
        names[kind][name.split("<")[0][:60]] += (end - start) / steps
        first, last = min(first, start), max(last, end)
    kinds = [
        KindTime(k, time[k] / steps, count[k] / steps, dict(names[k])) for k in sorted(time, key=lambda k: -time[k])
    ]
    return kinds, (last - first) / steps if kinds else 0.0
