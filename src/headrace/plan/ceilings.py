"""What this CPU reaches: memory bandwidth and matrix multiplication, measured, as a catalog entry."""

from __future__ import annotations

import datetime
import importlib.util
import math
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import InvalidInput
from headrace.base.files import write_atomic
from headrace.base.units import GIB
from headrace.spec.hardware import calibrated_dir, parse

SIZE_BYTES = 256 * 2**20
"""Larger than any cache, so that the copy runs from memory."""
SIDE = 1024


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best of the runs: bytes read and written per second, and FLOP/s of an fp32 matrix product."""

    bandwidth_gbs: float
    tflops: float
    memory_gib: float
    how: str


def measure(seconds: float = 2.0) -> Ceilings:
    """Measure for about `seconds` each, with numpy, and with torch too where it is installed; the better one counts."""
    if not 0 < seconds < math.inf:
        raise InvalidInput(f"seconds must be a number above 0, got {seconds}", field="seconds")
    import numpy as np

    source = np.ones(SIZE_BYTES // 8)
    target = np.empty_like(source)
    bandwidth = 2 * SIZE_BYTES / _best(lambda: np.copyto(target, source), seconds)
    left = np.ones((SIDE, SIDE), dtype=np.float32)
    product = np.empty_like(left)
    flops = 2 * SIDE**3 / _best(lambda: np.matmul(left, left, out=product), seconds)
    how = "numpy, fp32"
    if importlib.util.find_spec("torch") is not None:
        by_torch = _torch_flops(seconds)
        if by_torch > flops:
            flops, how = by_torch, "torch, fp32"
    return Ceilings(bandwidth / 1e9, flops / 1e12, _memory_gib(), how)


def _torch_flops(seconds: float) -> float:
    """In a process of its own: this package never loads torch."""
    import subprocess
    import sys

    program = (
        "import torch, time\n"
        f"a = torch.ones({SIDE}, {SIDE}); a @ a; best = 1e9; end = time.perf_counter() + {seconds}\n"
        "while time.perf_counter() < end:\n"
        "    t = time.perf_counter(); a @ a; best = min(best, time.perf_counter() - t)\n"
        "print(best)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120 + seconds)
    return 2 * SIDE**3 / float(done.stdout) if done.returncode == 0 else 0.0


def _best(run: Callable[[], object], seconds: float) -> float:
    """Shortest of the runs that fit in the time, at least three, after one to warm up."""
    run()
    best, count, end = float("inf"), 0, time.perf_counter() + seconds
    while count < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best, count = min(best, time.perf_counter() - start), count + 1
    return best


def _memory_gib() -> float:
    """Installed memory, or the control group's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return total / GIB


def _processor() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    name = match[1] if match else platform.processor() or platform.machine()
    return re.sub(r"[^\w ().@-]", "", name)[:60]


def write_entry(name: str, found: Ceilings, price_usd_h: float | None = None) -> Path:
    """Write the entry `<data folder>/gpus/<name>.toml`, which the catalog then lists like any other."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,40}", name):
        raise InvalidInput(f"name must be lower case letters, digits and dashes, got {name!r}", field="name")
    if price_usd_h is not None and not 0 < price_usd_h < math.inf:
        raise InvalidInput(f"price must be a number above 0, got {price_usd_h}", field="price")
    today = datetime.date.today().isoformat()
    text = "\n".join(
        [
            f'id = "{name}"',
            f'name = "{_processor()} ({os.cpu_count()} threads)"',
            'generation = "cpu"',
            'arch = "CPU"',
            f'capability = "{platform.machine()}"',
            'link = "none"',
            'link_name = "none"',
            "max_linked_gpus = 1",
            f"memory_gb_marketing = {found.memory_gib:.1f}",
            *_figure("memory_gib", found.memory_gib, "reported by the system", today),
            *_figure("bandwidth_gbs", found.bandwidth_gbs, "measured: copy of 256 MiB", today),
            *_figure("bf16_tflops", found.tflops, f"measured: {SIDE} x {SIDE} product, {found.how}", today),
            *([] if price_usd_h is None else _figure("price_usd_h", price_usd_h, "given by the user", today)),
            "",
        ]
    )
    path = calibrated_dir() / f"{name}.toml"
    parse(text, str(path))
    write_atomic(path, text)
    return path


def _figure(name: str, value: float, source: str, date: str) -> list[str]:
    return ["", f"[{name}]", f"value = {value:.4f}", 'grade = "measured"', f'source = "{source}"', f'date = "{date}"']
