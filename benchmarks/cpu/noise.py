"""How much of the machine other processes took while a measurement ran (Linux)."""

from __future__ import annotations

import time
from pathlib import Path

import psutil


def _busy_s() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)


def _own_s(roots: list[int]) -> float:
    total = 0.0
    for process in {p for root in roots for p in family(root)}:  # a root may be another's child
        try:
            t = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += t.user + t.system
    return total


def family(root: int) -> list[psutil.Process]:
    """A process and all that descend from it, as far as they still run."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class Noise:
    """Cores taken by processes other than ours (`foreign`) over the block."""

    def __init__(self, roots: list[int]) -> None:
        self.roots = [*roots, psutil.Process().pid]
        self.foreign = 0.0

    def __enter__(self) -> Noise:
        self._start = (time.perf_counter(), _busy_s(), _own_s(self.roots))
        return self

    def __exit__(self, *_: object) -> None:
        began, busy, own = self._start
        wall = time.perf_counter() - began
        self.foreign = max(0.0, (_busy_s() - busy) - (_own_s(self.roots) - own)) / wall


def wait_idle(roots: list[int], limit: float, patience_s: float) -> bool:
    """Wait until other processes use under `limit` cores; False when patience ran out."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        with Noise(roots) as noise:
            time.sleep(2.0)
        if noise.foreign < limit:
            return True
    return False


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    info = {"cores": str(psutil.cpu_count()), "memory_gib": f"{psutil.virtual_memory().total / 2**30:.1f}"}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "flags") and key.strip() not in info:
            wanted = value.strip()
            if key.strip() == "flags":
                flags = set(wanted.split())
                wanted = " ".join(
                    f for f in ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni") if f in flags
                )
            info[key.strip()] = wanted
    return info
