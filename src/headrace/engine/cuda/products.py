"""Products with weights that are not plain tensors: which way each takes, by format and rows, and the buffers it needs.

Few rows stream the codes (`headrace.engine.kernels.quantized`). Many rows of FP8 weights, and of INT8 weights where the format
says so, are rounded to the same type per token and multiplied by the tensor cores of 8 bits; all others go to the library in
the activations' type, the matrix dequantized into a buffer first, which costs a pass over it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.engine.kernels.eight_bits import rescale, round_rows
from headrace.engine.kernels.gemm import MAX_ROWS, Gained, GemmConfig, GemmWorkspace, fused_gemm, why_not_specialized
from headrace.engine.kernels.quantized import BY_PART, BY_ROW, QuantMatrix, dequantize, has_gluon, quantized_gemm
from headrace.engine.kernels.rounding import Rounded
from headrace.engine.kernels.table import GemmTable
from headrace.engine.kernels.unpack import FP8, INT8, NF4_CODES
from headrace.engine.quant.formats import Packed

ROWWISE_ROWS = 1024
"""From so many rows on the library's product applies the scales itself; for fewer its kernels without them are faster."""
FP8_CAPABILITY = (8, 9)
INT_MM_ROWS = 17
FEW_ROWS, MANY_ROWS = 64, 1024
"""Beyond the first number of rows products alone take tiles of 256 rows, up to the second; for more the matrix is dequantized."""


@dataclass(frozen=True, slots=True)
class PackedParts:
    """Matrices joined by their outputs that the kernels cannot read: kept in their format's layout, for the reason `why`."""

    shape: tuple[int, int]
    parts: tuple[Packed, ...]
    why: str

    def __len__(self) -> int:
        return self.shape[0]

    def tensors(self) -> list[torch.Tensor]:
        return [t for part in self.parts for t in part.tensors.values()]

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)


Matrix = torch.Tensor | QuantMatrix | PackedParts


def buffer_bytes(matrices: Iterable[Matrix], tokens: int, dtype: torch.dtype) -> int:
    """What `Products` takes at most."""
    found = [m for m in matrices if not isinstance(m, torch.Tensor)]
    dense = max((m.shape[0] * m.shape[1] for m in found), default=0) * dtype.itemsize
    return dense + tokens * (max((m.shape[1] for m in found), default=0) + 4)


class Products:
    """The quantized products of one model; every method only launches work on the current stream."""

    def __init__(
        self,
        matrices: Iterable[Matrix],
        table: GemmTable,
        work: GemmWorkspace,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        capability: tuple[int, int],
        pdl: bool,
    ) -> None:
        self._table, self._work, self._pdl = table, work, pdl
        self._cuda, self._fp8 = device.type == "cuda", device.type == "cuda" and capability >= FP8_CAPABILITY
        self._direct = self._cuda and dtype == torch.bfloat16 and has_gluon()
        self.why_not_specialized = (
            why_not_specialized(capability, dtype) if self._cuda else "the interpreter cannot run it"
        )
        self._specialized = self.why_not_specialized is None and dtype == torch.bfloat16
        found = [m for m in matrices if not isinstance(m, torch.Tensor)]
        dense = max((m.shape[0] * m.shape[1] for m in found if self.rounded_to(m) != torch.float8_e4m3fn), default=0)
        self._scratch = torch.empty(dense, dtype=dtype, device=device)
        widest: dict[torch.dtype, int] = {}
        for m in found:
            if (kind := self.rounded_to(m)) is not None:
                widest[kind] = max(widest.get(kind, 0), m.shape[1])
        self._codes = {k: torch.empty(tokens * w, dtype=k, device=device) for k, w in widest.items()}
        self._scales = torch.empty(tokens if self._codes else 0, dtype=torch.float32, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        tensor_wise = [m for m in found if isinstance(m, QuantMatrix) and m.scaling == BY_PART.value]
        self._by_column = torch.empty(max(map(len, tensor_wise), default=0), dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self._scratch, self._scales, self._by_column, *self._codes.values()))

    def rounded_to(self, w: Matrix) -> torch.dtype | None:
        """The type that many rows of activations are rounded to before they are multiplied by `w`; None: as they are."""
        if (
            not isinstance(w, QuantMatrix)
            or w.scaling not in (BY_ROW.value, BY_PART.value)
            or w.shape[1] % 16
            or len(w) % 16
        ):
            return None
        if w.kind == FP8.value and self._fp8:
            return torch.float8_e4m3fn
        if w.kind == INT8.value and w.form == "w8a8" and self._cuda:
            return torch.int8
        return None

    def rounded_from(self, w: Matrix) -> int:
        """The least rows whose activations can be rounded."""
        return INT_MM_ROWS if isinstance(w, QuantMatrix) and w.kind == INT8.value else 1

    def config(self, rows: int, w: Matrix, *, pair: bool = False) -> GemmConfig | None:
        """How codes are streamed for so many rows, or None where another way is the better one (or the only one)."""
        if rows > MAX_ROWS.value:
            return None
        if isinstance(w, torch.Tensor):
            found = self._table.config(rows, w.shape[0] // (2 if pair else 1), w.shape[1], pair=pair)
            specialized = found is not None and found.block_m > 0
            return None if specialized and self.why_not_specialized is not None else found
        if isinstance(w, PackedParts):
            return None
        rounded = self.rounded_to(w) is not None
        return self._table.quantized(
            rows, w, pair=pair, rounded=rounded, direct=self._direct, specialized=self._specialized
        )  # fmt: skip

    def _many(self, rows: int, w: Matrix) -> GemmConfig | None:
        """How codes are streamed in a product of its own of more rows than few: with one kernel for all numbers of rows."""
        if not isinstance(w, QuantMatrix) or not FEW_ROWS < rows <= MANY_ROWS or not self._specialized:
            return None
        if w.kind == NF4_CODES.value:  # whose values take too long to look up again and again
            return None
        rounded = self.rounded_to(w) is not None
        found = self._table.quantized(MAX_ROWS.value, w, pair=False, rounded=rounded, specialized=True)
        return found if found is not None and found.block_m else None

    def fused(self, x: torch.Tensor | Gained, w: Matrix, out: torch.Tensor, config: GemmConfig, **more: Any) -> None:
        """The product that `config` configures, with its epilogues (`skinny_gemm`)."""
        multiply = fused_gemm if isinstance(w, torch.Tensor) else quantized_gemm
        multiply(x, w, out, self._work, config, **more)

    def adds(self, w: Matrix, rows: int) -> bool:
        """Whether `added` is offered: the library's product adds up by itself."""
        return isinstance(w, torch.Tensor) or (self.rounded_to(w) is None and self.config(rows, w) is None)

    def rounding(self, w: Matrix, rows: int) -> Rounded | None:
        """Where whoever makes the x of the next `linear` may leave it as the codes that are multiplied there; None: nowhere."""
        kind = self.rounded_to(w)
        if kind is None or rows < self.rounded_from(w) or self.config(rows, w) is not None:
            return None
        return Rounded(self._codes[kind][: rows * w.shape[1]].view(rows, w.shape[1]), self._scales[:rows])

    def way(self, rows: int, w: Matrix) -> tuple[object, ...]:
        """What tells the kernels of `linear` with so many rows from those with others."""
        return self._many(rows, w) or self.config(rows, w), self.rounding(w, rows) is None, rows < ROWWISE_ROWS

    def linear(
        self, x: torch.Tensor | Rounded, w: QuantMatrix | PackedParts, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """out [rows, outputs] = x w' + bias; x may be what `rounding` gave for w."""
        if isinstance(x, Rounded):
            self._eight_bits(x, w, bias, out)
            return
        config = self._many(len(x), w) or self.config(len(x), w)
        if config is not None:
            quantized_gemm(x, w, out, self._work, config, bias=bias, pdl=self._pdl)
        elif (rounded := self.rounding(w, len(x))) is not None:
            round_rows(x, rounded.codes, rounded.scales)
            self._eight_bits(rounded, w, bias, out)
        elif bias is None:
            torch.mm(x, self._dense(w).t(), out=out)
        else:
            torch.addmm(bias, x, self._dense(w).t(), out=out)

    def added(self, x: torch.Tensor, y: torch.Tensor, w: QuantMatrix | PackedParts, scale: float) -> None:
        """x += scale · y w', the sum rounded once."""
        if (config := self._many(len(x), w)) is not None:
            quantized_gemm(y, w, x, self._work, config, residual=x, scale=scale, pdl=self._pdl)
            return
        torch.addmm(x, y, self._dense(w).t(), alpha=scale, out=x)

    def _dense(self, w: QuantMatrix | PackedParts) -> torch.Tensor:
        if isinstance(w, QuantMatrix):
            return dequantize(w, self._scratch)
        rows, columns = w.shape
        found = self._scratch[: rows * columns].view(rows, columns)
        at = 0
        for part in w.parts:
            found[at : at + part.rows].copy_(part.dequantize())
            at += part.rows
        return found

    def _eight_bits(self, x: Rounded, w: QuantMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        codes, scales = x.codes, x.scales
        if codes.dtype == torch.int8:
            rescale(torch._int_mm(codes, w.codes.t()), out, scales, w.scales, bias, w.parts)
            return
        if len(x) < ROWWISE_ROWS:
            torch._scaled_mm(
                codes, w.codes.t(), scale_a=self._one, scale_b=self._one, out_dtype=out.dtype, use_fast_accum=True, out=out
            )  # fmt: skip
            rescale(out, out, scales, w.scales, bias, w.parts)
            return
        by_column = w.scales
        if w.scaling == BY_PART.value:
            by_column, begin = self._by_column[: len(w)], 0
            for i, end in enumerate([*(p for p in w.parts if p < len(w)), len(w)]):
                by_column[begin:end] = w.scales[i]
                begin = end
        torch._scaled_mm(
            codes, w.codes.t(), scale_a=scales[:, None], scale_b=by_column[None, :], out_dtype=out.dtype,
            use_fast_accum=True, out=out,
        )  # fmt: skip
        if bias is not None:
            out.add_(bias)
