"""How much of this host other programs used while a run went on: what no interval can show when it favours one side."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

NOTICEABLE_CORES = 0.15
_PROBE_S = 2.0


def _busy_s() -> float:
    """CPU seconds that all programs of the host have used (user, nice, system, interrupts)."""
    fields = [int(value) for value in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:8]]
    user, nice, system, _idle, _iowait, irq, softirq = fields
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """CPU seconds of this process and all below it, those that have ended and were waited for included."""
    stats: dict[int, tuple[int, float]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
        except (OSError, IndexError):  # it ended while we looked
            continue
        stats[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    mine, waiting = set(), [os.getpid()]
    while waiting:
        pid = waiting.pop()
        mine.add(pid)
        waiting += [child for child, (parent, _) in stats.items() if parent == pid and child not in mine]
    return sum(stats[pid][1] for pid in mine if pid in stats)


class Neighbours:
    """Cores used by programs that are not this process or below it, between `Neighbours()` and `cores`.

    A server that this process started is below it; one that was already running counts as a neighbour, so the figure
    means something only for started targets. None where the system has no /proc.
    """

    def __init__(self) -> None:
        self._began = self._look()

    def cores(self) -> float | None:
        """Mean cores used by others since the beginning."""
        now = self._look()
        if self._began is None or now is None:
            return None
        (busy, own, at), (busy_then, own_then, then) = now, self._began
        return max(0.0, ((busy - busy_then) - (own - own_then)) / max(at - then, 1e-9))

    @staticmethod
    def _look() -> tuple[float, float, float] | None:
        try:
            return _busy_s(), _own_s(), time.monotonic()
        except (OSError, ValueError):
            return None


async def wait_until_idle(limit_s: float) -> float | None:
    """Wait until others use less than 0.15 cores for two seconds, at most `limit_s`; returns what they used last."""
    deadline_s = time.monotonic() + limit_s
    while True:
        watched = Neighbours()
        await asyncio.sleep(_PROBE_S)
        used = watched.cores()
        if used is None or used < NOTICEABLE_CORES or time.monotonic() >= deadline_s:
            return used
