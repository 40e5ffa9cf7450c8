"""Which configuration a product runs with: a shipped table per card, a heuristic for shapes that are not in it.

`headrace tune` measures and writes the user's own table, which wins over the shipped one; nothing is tuned at start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from headrace.base.files import data_dir
from headrace.engine.kernels.gemm import SPECIALIZED_BYTES, GemmConfig
from headrace.engine.kernels.quantized import DIRECT_INPUTS, QuantMatrix, not_direct, not_specialized
from headrace.engine.kernels.unpack import INT8

SHIPPED = Path(__file__).parent / "configs"
BUCKETS = (4, 16, 32, 64, 128, 192, 256)
"""Padded rows of products."""
QUANTIZED_BUCKETS = (1, 8, 16, 32, 64, 128, 256)
"""The same of quantized weights."""
STREAMED_AS = {"w8a8": "int8", "fp8_e4m3": "fp8_channel"}
"""Formats whose codes are streamed as those of another."""
BULK = "bulk"
"""In the place of a KV format, tells entries of decode attention by bulk copies from others."""
DECODE_BUCKETS = (4, 8, 16, 32, 64, 128, 256)
"""Rows up to which a configuration of decode attention counts."""


LIBRARY_ROWS = 64
"""Up to so many rows products are never those of `LibraryTable`."""


class LibraryTable:
    """Which algorithm of cuBLASLt multiplies, by rows, columns and inner dimension (`headrace.engine.cuda.library`).

    Entries have `algorithm`, its eight words in hexadecimal, and `parts` of the inner dimension; None: what the library takes.
    With `cut` so many columns are a product of their own, and `rest` is the algorithm of the others. They count from the next
    smaller number of rows on. `version`: the library's that they were measured with.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self._entries: dict[tuple[int, int], dict[int, dict[str, Any] | None]] = {}

    def add(self, read: Mapping[str, Any]) -> None:
        """Take a file's entries; those of another version replace all before."""
        if read["version"] != self.version:
            self.version, self._entries = read["version"], {}
        for name, entry in read["products"].items():
            rows, columns, inner = map(int, name.split("x"))
            self._entries.setdefault((columns, inner), {})[rows] = entry

    def entry(self, rows: int, columns: int, inner: int) -> dict[str, Any] | None:
        """What the least number of rows in the table that holds `rows` says."""
        found = self._entries.get((columns, inner))
        if found is None or rows <= LIBRARY_ROWS:
            return None
        least = min((n for n in found if n >= rows), default=None)
        return None if least is None else found[least]

    def in_parts(self, columns: int, inner: int) -> list[tuple[int, int]]:
        """(rows at most, parts) of the entries with more than one part."""
        found = self._entries.get((columns, inner), {})
        return [(n, e["parts"]) for n, e in sorted(found.items()) if e is not None and e["parts"] > 1]


def user_folder() -> Path:
    """Where `headrace tune` puts tables."""
    return data_dir() / "kernels"


def file_name(card: str) -> str:
    return card.lower().replace(" ", "_").replace("/", "_") + ".json"


class GemmTable:
    """Configurations of one card by padded rows, columns, inner dimension and whether columns come in pairs."""

    def __init__(self, card: str, sms: int) -> None:
        self._sms = sms
        self.sources: list[str] = []
        self._entries: dict[str, dict[str, int] | None] = {}
        self._decode: dict[str, dict[str, int]] = {}
        self.library = LibraryTable()
        for folder in (SHIPPED, user_folder()):
            path = folder / file_name(card)
            if path.exists():
                read = json.loads(path.read_text())
                self._entries |= read["gemm"]
                self._decode |= read.get("decode", {})
                if "library" in read:
                    self.library.add(read["library"])
                self.sources.append(str(path.name if folder == SHIPPED else path))

    def config(self, rows: int, columns: int, inner: int, *, pair: bool) -> GemmConfig | None:
        """How to run a product of `rows`, or None where cuBLAS is the better one; the least bucket in the table counts."""
        for bucket in BUCKETS:
            name = key(bucket, columns, inner, pair=pair)
            if rows <= bucket and name in self._entries:
                entry = self._entries[name]
                return None if entry is None else GemmConfig(**({"rows": max(16, bucket)} | entry))
        return self.guess(columns, inner, pair=pair) if rows <= 16 else None

    def quantized(
        self, rows: int, w: QuantMatrix, *, pair: bool, rounded: bool, direct: bool = False, specialized: bool = False
    ) -> GemmConfig | None:
        """How codes of `w` are streamed for `rows`, or None where a product of dequantized weights, or (`rounded`) of
        activations of 8 bits, is the better one. `direct`, `specialized`: whether such configurations can run."""
        columns, inner = w.shape[0] // (2 if pair else 1), w.shape[1]
        for bucket in QUANTIZED_BUCKETS:
            name = key(bucket, columns, inner, pair=pair, form=STREAMED_AS.get(w.form, w.form))
            if rows <= bucket and name in self._entries:
                entry = self._entries[name]
                if entry is None:
                    return None
                found = GemmConfig(**({"rows": bucket} | entry))
                if found.block_m:
                    fits = specialized and not_specialized(w, found) is None
                else:
                    fits = not found.direct or (direct and not_direct(w, columns, found) is None)
                if fits:
                    return found
        if rows > (16 if rounded else 64):
            return specialized_guess(rows, w) if specialized and not rounded else None
        if direct and rows == 1 and (chosen := direct_guess(w, columns, pair=pair)) is not None:
            return chosen
        # Two warps unpack 32 outputs; eight programs on every multiprocessor hide the latency of their loops.
        least = max(w.group, 2 * w.chunk_bytes)
        block_k = next(k for k in (256, 128, 64, least) if inner % k == 0 and k % least == 0)
        tiles = -(-columns // 32)
        split = 1
        while tiles * split < 8 * self._sms and split < 8 and inner % (2 * split * block_k) == 0:
            split *= 2
        bucket = next(b for b in QUANTIZED_BUCKETS if max(rows, 2) <= b)
        return GemmConfig(
            32, block_k, split if bucket <= 16 else min(split, 2), 2, 4 if bucket <= 16 else 3, rows=bucket
        )

    def decode(self, rows: int, head_dim: int, kv: str = "") -> dict[str, int] | None:
        """How attention of so many rows is cut and run (splits, min_chunk, block_n, num_warps, stages), if it was tuned.

        `kv`: the cache's format, of which those with codes have entries of their own, or else take the plain ones.
        """
        bucket = next((b for b in DECODE_BUCKETS if rows <= b), None)
        if bucket is None:
            return None
        return self._decode.get(decode_key(bucket, head_dim, kv), self._decode.get(decode_key(bucket, head_dim)))

    def has_decode(self, head_dim: int, kv: str) -> bool:
        """Whether `decode` has entries of this format's own."""
        return any(decode_key(b, head_dim, kv) in self._decode for b in DECODE_BUCKETS)

    def bulk_decode(self, rows: int, head_dim: int, kv: str = "") -> dict[str, int] | None:
        """The same of attention by bulk copies: warps, stages, programs of each KV head over all rows, least pages of each, and
        with codes (`kv`: the cache's format) the pages that a warp takes at once."""
        bucket = next((b for b in DECODE_BUCKETS if rows <= b), None)
        return None if bucket is None else self._decode.get(decode_key(bucket, head_dim, BULK + kv))

    def guess(self, columns: int, inner: int, *, pair: bool) -> GemmConfig:
        """Enough programs to keep two on every multiprocessor, each with some KiB of weights in flight."""
        block_n = 16 if pair else 32
        tiles = -(-columns // block_n)
        block_k = 256 if inner >= 1024 else 64
        split = 1
        while tiles * split < 2 * self._sms and split < 8 and inner // (2 * split) >= 2 * block_k:
            split *= 2
        return GemmConfig(block_n, block_k, split, 4, 4, rows=16)


def direct_guess(w: QuantMatrix, columns: int, *, pair: bool) -> GemmConfig | None:
    """A direct configuration for one row, where one fits: of what is tuned for 7B shapes on the H200."""
    for warps in (4, 8, 2, 1) if pair else (8, 4, 2, 1):
        for ahead in (2, 1):
            found = GemmConfig(16, DIRECT_INPUTS, 1, warps, ahead, rows=1, direct=True)
            if not_direct(w, columns, found) is None:
                return found
    return None


def specialized_tile(w: QuantMatrix, rows: int, block_m: int, block_n: int) -> GemmConfig:
    """A configuration of `headrace.engine.kernels.quantized_hopper`: two groups of so many outputs, as many stages as fit."""
    stages = SPECIALIZED_BYTES // (256 * block_m + 2 * block_n * (128 if w.kind == INT8.value else 64))
    return GemmConfig(block_n, 128, 1, 8, stages, rows=rows, block_m=block_m, column_groups=2)


def specialized_guess(rows: int, w: QuantMatrix) -> GemmConfig | None:
    """Such a configuration for more rows than few, where one fits."""
    # Wide tiles read x less often, but cut products of few outputs into too many parts of tiles.
    wide = rows <= 128 and len(w) >= 64 * 256
    block_m = 128 if rows <= 128 else 256
    found = specialized_tile(w, block_m, block_m, 128 if wide else 64)
    return found if not_specialized(w, found) is None else None


def decode_key(bucket: int, head_dim: int, kv: str = "") -> str:
    return f"{bucket}x{head_dim}{f'x{kv}' if kv else ''}"


def key(bucket: int, columns: int, inner: int, *, pair: bool, form: str = "") -> str:
    return f"{form}{':' if form else ''}{bucket}x{columns}x{inner}{'x2' if pair else ''}"


def entry_of(config: GemmConfig | None) -> dict[str, int] | None:
    """As it is stored: the bucket says the rows, and what is not usual is named."""
    if config is None:
        return None
    usual = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    return {k: v for k, v in asdict(config).items() if k != "rows" and (k not in usual or v != usual[k])}
