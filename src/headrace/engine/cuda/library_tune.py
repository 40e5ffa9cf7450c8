"""Which algorithm of cuBLASLt is the fastest for the plain products of a model's large steps: part of `headrace tune`.

Decode steps and short chunks of prompts are measured product by product in captured graphs over several copies of the weight,
with the norm that follows where the product may come in parts. Long chunks keep a card at its power limit, where an algorithm
counts that spends less energy: candidates run for a while each, so that the clock settles on what each of them allows.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.engine.cuda.library import CutProduct, Library, LibraryProduct
from headrace.engine.kernels.norm import add_norm
from headrace.engine.kernels.table import LIBRARY_ROWS, LibraryTable
from headrace.spec.model import ModelSpec

FEW = (*range(LIBRARY_ROWS + 16, 257, 16), 320, 384, 512, 640, 768)
MANY = (1024, 1536, 2048, 3072, 4096, 8192, 16384)
"""Rows that are measured; each counts from the next smaller number on."""
_COPIES_BYTES = 160 << 20
_WORTH = 0.985
"""Of the time that the library's own choice takes, at most, for an entry."""
_SETTLED_S = 0.045
_PROPOSALS = 12


@dataclass(frozen=True, slots=True)
class Plain:
    """A product's columns (of both halves of pairs) and inner dimension; `summand`: it is added to the residual stream."""

    columns: int
    inner: int
    summand: bool = False


Entry = dict[str, str | int] | None


def plain_products(spec: ModelSpec) -> list[Plain]:
    """The distinct products of a decoder's layers."""
    found: dict[Plain, None] = {}
    hidden = spec.hidden_size
    for layer in spec.layers:
        a, mlp = layer.mixer, layer.mlp
        attended = a.num_heads * a.head_dim
        found[Plain(attended + 2 * a.num_kv_heads * a.head_dim, hidden)] = None
        found[Plain(hidden, attended, summand=True)] = None
        found[Plain(mlp.intermediate * (2 if mlp.gated else 1), hidden)] = None
        found[Plain(hidden, mlp.intermediate, summand=True)] = None
    return list(found)


def measure_library(
    shapes: Sequence[Plain],
    device: torch.device,
    report: Callable[[str], None],
    few: Sequence[int] = FEW,
    many: Sequence[int] = MANY,
) -> dict[str, Any] | None:
    """The table's `library` entry for these products in bf16; None, and the reason told, where it cannot be called."""
    library = Library(LibraryTable(), torch.bfloat16, device)
    if not library.version:
        report(f"algorithms of the library's products are not measured, since {library.why_not}")
        return None
    found: dict[str, Entry] = {}
    # What was proposed for fewer rows may be the best for more; of many rows only what was chosen is tried, to save time.
    known: dict[tuple[Plain, int], list[str]] = {}
    for rows in sorted({*few, *many}):
        for shape in shapes:
            bench = _Bench(library, shape, rows, device)
            for parts in (1, 2) if rows in few and shape.summand else (1,):
                others = known.setdefault((shape, parts), [])
                proposed = bench.offer(others, parts)
                if rows in few:
                    others += [a for a in proposed if a not in others]
            if rows in few and not shape.summand:
                bench.offer_halves()
            entry, ratio = bench.graphed() if rows in few else bench.settled()
            if entry is not None and rows in many:
                known[shape, 1] = [*dict.fromkeys([*known[shape, 1], str(entry["algorithm"])])][-_PROPOSALS:]
            found[f"{rows}x{shape.columns}x{shape.inner}"] = entry
            report(f"{rows} rows, {shape.columns} x {shape.inner}: {ratio:.3f} of {bench.count} {entry or ''}")
            del bench
    return {"version": library.version, "products": found}


_Name = tuple[tuple[str, str | int], ...] | None
"""An entry's items; None: the library's own choice."""


class _Bench:
    """One product, by each algorithm that is offered."""

    def __init__(self, library: Library, shape: Plain, rows: int, device: torch.device) -> None:
        self._library, self._shape, self._rows = library, shape, rows
        copies = max(2, min(6, _COPIES_BYTES // (2 * shape.columns * shape.inner) + 1)) if rows < 1024 else 1

        def made(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, dtype=torch.bfloat16, device=device)

        self._w = [made(shape.columns, shape.inner).mul_(0.02) for _ in range(copies)]
        self._x, self._out = made(rows, shape.inner), made(rows, shape.columns)
        self._parts = made(2, rows, shape.columns) if shape.summand else self._out
        self._stream, self._gain = made(rows, shape.columns), made(shape.columns)
        self._found: dict[_Name, LibraryProduct | CutProduct] = {}

    @property
    def count(self) -> int:
        return len(self._found)

    def _proposals(self, columns: int, parts: int = 1) -> list[str]:
        product = self._library.product(self._rows, columns, self._shape.inner, parts, self._shape.columns)
        found = product.proposals(_PROPOSALS)
        product.close()
        return found

    def _try(self, entry: dict[str, str | int]) -> None:
        product = self._library.made(self._rows, self._shape.columns, self._shape.inner, entry)
        if product is not None:
            self._found[tuple(entry.items())] = product

    def offer(self, others: Sequence[str], parts: int) -> list[str]:
        """Take what the library proposes, which is returned, and `others`."""
        proposed = self._proposals(self._shape.columns, parts)
        for algorithm in dict.fromkeys([*proposed, *others]):
            self._try({"algorithm": algorithm, "parts": parts})
        return proposed

    def offer_halves(self) -> None:
        """Take halves of the columns, one after the other, which fill a card's multiprocessors otherwise."""
        half = self._shape.columns // 2
        for algorithm in self._proposals(half):
            self._try({"algorithm": algorithm, "parts": 1, "cut": half, "rest": algorithm})

    def _run(self, name: _Name, w: torch.Tensor, *, normed: bool) -> None:
        product = None if name is None else self._found[name]
        out = self._out if product is None or product.parts == 1 else self._parts
        adds = self._shape.summand and not normed
        if adds:
            out = self._stream
        if product is not None:
            product.run(self._x, w, out, scale=1e-3 if adds else 1.0, add=adds)
        elif adds:
            torch.addmm(out, self._x, w.t(), alpha=1e-3, out=out)
        else:
            torch.mm(self._x, w.t(), out=out)
        if self._shape.summand and normed:
            add_norm(self._stream, out, self._gain, self._out, 1e-5, scale=1e-3, pdl=True)

    def graphed(self) -> tuple[Entry, float]:
        """The best for few rows and its share of the usual time."""
        graphs: dict[_Name, torch.cuda.CUDAGraph] = {}
        for name in (None, *self._found):
            self._run(name, self._w[0], normed=True)
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                for w in self._w:
                    self._run(name, w, normed=True)
        times: dict[_Name, list[float]] = {name: [] for name in graphs}

        def turn(names: list[_Name]) -> None:
            random.shuffle(names)
            for name in names:
                times[name].append(_ms(graphs[name].replay))

        for _ in range(5):
            turn(list(graphs))
        for _ in range(12):
            turn([None, *self._best(times, 3)])
        return self._decided(times)

    def settled(self) -> tuple[Entry, float]:
        """The best for many rows, each run long enough for the clock to settle."""

        def run(name: _Name, count: int = 1) -> float:
            def launch() -> None:
                for _ in range(count):
                    self._run(name, self._w[0], normed=False)

            return _ms(launch) / count

        names: list[_Name] = [None, *self._found]
        times = {name: [run(name) for _ in range(2)][1:] for name in names}
        for _ in range(2):
            random.shuffle(names)
            for name in names:
                times[name].append(run(name))
        best = self._best(times, 3)
        count = max(2, int(1e3 * _SETTLED_S / min(times[None])))
        settled: dict[_Name, list[float]] = {name: [] for name in (None, *best)}
        for _ in range(2):
            for name in settled:
                settled[name].append(run(name, count))
        return self._decided(settled)

    @staticmethod
    def _best(times: dict[_Name, list[float]], count: int) -> list[_Name]:
        named = [name for name in times if name is not None]
        return sorted(named, key=lambda name: statistics.median(times[name]))[:count]

    def _decided(self, times: dict[_Name, list[float]]) -> tuple[Entry, float]:
        if not self._found:
            return None, 1.0
        (best,) = self._best(times, 1)
        ratio = statistics.median(times[best]) / statistics.median(times[None])
        return (dict(best) if best is not None and ratio < _WORTH else None), ratio


def _ms(launch: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
