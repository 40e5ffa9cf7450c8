"""CUDA graphs of steps: one per padded size and kind, in one memory pool."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

MAX_GROUPS = 8


def graph_sizes(max_rows: int) -> list[int]:
    """Padded row counts: every one up to 4, then steps of an eighth or so of the size, which bounds the waste."""
    sizes = [n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n <= max_rows]
    sizes += [n for n in range(24, max_rows + 1, 8) if n <= 64 or n % 16 == 0]
    if max_rows not in sizes:
        sizes.append(max_rows)
    return sizes


Key = tuple[int, bool] | tuple[str, int, int]
"""Decode steps: rows and whether prefixes are shared; mixed steps: "mixed" or "deep", decode rows, prompt tokens."""


class DecodeGraphs:
    """Captured steps. `replay` runs the one for a key if there is one."""

    def __init__(self) -> None:
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._pool = None
        self.capture_s = 0.0

    @property
    def count(self) -> int:
        return len(self._graphs)

    def capture(self, key: Key, launch: Callable[[], None]) -> None:
        """Record what `launch` launches; it must have run once before, so that nothing is compiled or allocated here."""
        begin = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            launch()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
        self.capture_s += time.perf_counter() - begin

    def replay(self, key: Key) -> bool:
        graph = self._graphs.get(key)
        if graph is None:
            return False
        graph.replay()
        return True
