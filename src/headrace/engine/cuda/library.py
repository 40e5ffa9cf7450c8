"""Plain products by algorithms of cuBLASLt that were measured to be faster than the one that the library itself takes.

For a product the library guesses which of its kernels is the best one. Under a card's power limit another is often faster, and
for few rows it cuts the inner dimension and adds up the parts in a kernel of its own, which whoever adds the result to the
residual stream can do on the way. So a table (`headrace.engine.kernels.table`) says, per card and version of the library,
which algorithm a product of so many rows takes and how many parts it leaves; for all others torch calls the library as ever.

Called through ctypes, for torch offers no choice of algorithms. Handles are opaque; the constants are those of `cublasLt.h`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import torch

from headrace.engine.kernels.table import LibraryTable

log = logging.getLogger("headrace.engine")

_TYPES = {torch.bfloat16: 14}  # cudaDataType_t
_FP32, _COMPUTE_FP32 = 0, 68
_TRANSPOSED_A, _MOST_WORKSPACE, _BATCH, _BATCH_STRIDE = 3, 1, 5, 6
WORKSPACE_BYTES = 8 << 20
"""What an algorithm may use besides; those for many rows count their tiles there."""
_KEPT = 512
"""Products whose descriptions are kept: prompts come in any number of rows."""


class _Result(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4),
    )  # fmt: skip


class LibraryError(RuntimeError):
    """A call into the library failed."""


def load() -> Any:
    """The library that torch itself has loaded; OSError where there is none."""
    library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '0').split('.')[0]}")
    library.cublasLtGetVersion.restype = c_size_t
    return library


class LibraryProduct:
    """out = x w' for fixed sizes: x [rows, inner] and w [columns, inner] contiguous, rows of out [rows, columns] `stride` apart.

    With `parts` out is [parts, rows, columns], each part the product over its share of the inner dimension.
    """

    def __init__(
        self, library: Any, handle: c_void_p, work: torch.Tensor, rows: int, columns: int, inner: int, parts: int,
        stride: int, kind: int,
    ) -> None:  # fmt: skip
        self._library, self._handle, self._work, self.parts = library, handle, work, parts
        self._sizes = (rows, columns, inner)
        self._stride = stride
        self._alpha, self._beta = c_float(1.0), c_float(0.0)
        self._algorithm = (c_uint64 * 8)()
        self._operation = c_void_p()
        self._call("MatmulDescCreate", byref(self._operation), _COMPUTE_FP32, _FP32)
        self._call("MatmulDescSetAttribute", self._operation, _TRANSPOSED_A, byref(c_int32(1)), c_size_t(4))
        part = inner // parts
        # The library's matrices are stored by columns, so its A is w, its B is x and its D is out, each transposed.
        self._w = self._layout(kind, part, columns, inner, part)
        self._x = self._layout(kind, part, rows, inner, part)
        self._out = self._layout(kind, columns, rows, stride, rows * stride)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, f"cublasLt{name}")(*arguments):
            raise LibraryError(f"cublasLt{name} returned {status} for a product of {self._sizes}")

    def _layout(self, kind: int, rows: int, columns: int, stride: int, between: int) -> c_void_p:
        made = c_void_p()
        self._call("MatrixLayoutCreate", byref(made), kind, c_uint64(rows), c_uint64(columns), c_int64(stride))
        if self.parts > 1:
            for what, value in ((_BATCH, c_int32(self.parts)), (_BATCH_STRIDE, c_int64(between))):
                self._call("MatrixLayoutSetAttribute", made, what, byref(value), c_size_t(ctypes.sizeof(value)))
        return made

    def proposals(self, most: int = 32) -> list[str]:
        """Algorithms that the library offers, the best by its own guess first."""
        preference, found, results = c_void_p(), c_int(0), (_Result * most)()
        self._call("MatmulPreferenceCreate", byref(preference))
        self._call(
            "MatmulPreferenceSetAttribute", preference, _MOST_WORKSPACE, byref(c_uint64(WORKSPACE_BYTES)), c_size_t(8)
        )
        self._call(
            "MatmulAlgoGetHeuristic", self._handle, self._operation, self._w, self._x, self._out, self._out, preference, most,
            results, byref(found),
        )  # fmt: skip
        self._call("MatmulPreferenceDestroy", preference)
        return [_text(r.algorithm) for r in results[: found.value] if r.state == 0]

    def take(self, algorithm: str) -> bool:
        """Run by this algorithm from now on; False if the library says that it cannot compute this product."""
        for i in range(8):
            self._algorithm[i] = int(algorithm[16 * i : 16 * i + 16], 16)
        result = _Result()
        status = self._library.cublasLtMatmulAlgoCheck(
            self._handle, self._operation, self._w, self._x, self._out, self._out, byref(self._algorithm), byref(result)
        )
        return status == 0 and result.state == 0 and result.workspace <= WORKSPACE_BYTES

    def run(
        self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, add: bool = False
    ) -> None:
        """out = scale · x w', or out += that, on the current stream."""
        rows, columns, inner = self._sizes
        assert x.shape == (rows, inner)
        assert w.shape == (columns, inner)
        assert out.numel() == self.parts * rows * columns
        assert out.stride(-2) == self._stride
        assert x.is_contiguous()
        assert w.is_contiguous()
        self._alpha.value, self._beta.value = scale, float(add)
        target = c_void_p(out.data_ptr())
        self._call(
            "Matmul", self._handle, self._operation, byref(self._alpha), c_void_p(w.data_ptr()), self._w,
            c_void_p(x.data_ptr()), self._x, byref(self._beta), target, self._out, target, self._out,
            byref(self._algorithm), c_void_p(self._work.data_ptr()), c_size_t(WORKSPACE_BYTES),
            c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )  # fmt: skip

    def close(self) -> None:
        for layout in (self._w, self._x, self._out):
            self._call("MatrixLayoutDestroy", layout)
        self._call("MatmulDescDestroy", self._operation)


class CutProduct:
    """A product as two, of the first columns and of the rest, each by an algorithm of its own."""

    parts = 1

    def __init__(self, first: LibraryProduct, rest: LibraryProduct, cut: int) -> None:
        self._first, self._rest, self._cut = first, rest, cut

    def run(
        self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, add: bool = False
    ) -> None:
        self._first.run(x, w[: self._cut], out[:, : self._cut], scale=scale, add=add)
        self._rest.run(x, w[self._cut :], out[:, self._cut :], scale=scale, add=add)

    def close(self) -> None:
        self._first.close()
        self._rest.close()


def _text(algorithm: Any) -> str:
    return "".join(f"{word:016x}" for word in algorithm)


class Library:
    """The products of one card for which `table` names an algorithm; `why_not` says why none is used, if so."""

    def __init__(self, table: LibraryTable, dtype: torch.dtype, device: torch.device) -> None:
        self._table = table
        self._kind = _TYPES.get(dtype)
        # Of numbers of rows that were asked for, those without an entry among them; the oldest is the first to go.
        self._made: dict[tuple[int, int, int], LibraryProduct | CutProduct | None] = {}
        self._handle = c_void_p()
        self.version = 0
        self.why_not = self._open(dtype, device)
        self._device = device
        self._work: torch.Tensor | None = None

    def _open(self, dtype: torch.dtype, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "there is no GPU"
        if self._kind is None:
            return f"none was measured in {str(dtype).removeprefix('torch.')}"
        try:
            self._library = load()
            self.version = self._library.cublasLtGetVersion()
            if self._library.cublasLtCreate(byref(self._handle)):
                return "cuBLASLt refused a handle"
        except (OSError, AttributeError) as error:
            return f"cuBLASLt cannot be called: {error}"
        if self._table.version is None:
            return "no table names any for this card (headrace tune)"
        if self._table.version != self.version:
            return f"the table was measured with cuBLASLt {self._table.version}, and this is {self.version}"
        return None

    @property
    def nbytes(self) -> int:
        return 0 if self._work is None else self._work.nbytes

    def note(self) -> str:
        """For the notes of the start."""
        if self.why_not is not None:
            return f"algorithms of the library's products: its own choice, since {self.why_not}"
        return f"algorithms of the library's products: by the table where it names one (cuBLASLt {self.version})"

    def in_parts(self, columns: int, inner: int) -> list[tuple[int, int]]:
        """(rows at most, parts) of the products that `find` gives in parts."""
        return [] if self.why_not is not None else self._table.in_parts(columns, inner)

    def find(self, x: torch.Tensor, w: torch.Tensor, *, parts: int = 1) -> LibraryProduct | CutProduct | None:
        """The product of x and w if an algorithm is named for it that works and leaves at most `parts` parts."""
        if self.why_not is not None:
            return None
        rows, (columns, inner) = len(x), w.shape
        key = (rows, columns, inner)
        if key not in self._made:
            entry = self._table.entry(rows, columns, inner)
            self._made[key] = None if entry is None else self.made(rows, columns, inner, entry)
            if entry is not None and self._made[key] is None:
                log.warning("cuBLASLt refuses the table's algorithm for %d x %d x %d: its own choice is taken", *key)
            if len(self._made) > _KEPT and (old := self._made.pop(next(iter(self._made)))) is not None:
                old.close()
        found = self._made[key]
        if found is None or found.parts > parts or not (x.is_contiguous() and w.is_contiguous()):
            return None
        return found

    def made(self, rows: int, columns: int, inner: int, entry: Mapping[str, Any]) -> LibraryProduct | CutProduct | None:
        """The product that an entry of the table describes; None if it cannot be computed so."""
        cut = entry.get("cut")
        product: LibraryProduct | CutProduct
        if cut is None:
            product = whole = self.product(rows, columns, inner, entry["parts"])
            fits = whole.take(entry["algorithm"])
        else:
            first = self.product(rows, cut, inner, stride=columns)
            rest = self.product(rows, columns - cut, inner, stride=columns)
            product, fits = CutProduct(first, rest, cut), first.take(entry["algorithm"]) and rest.take(entry["rest"])
        if fits:
            return product
        product.close()
        return None

    def product(self, rows: int, columns: int, inner: int, parts: int = 1, stride: int = 0) -> LibraryProduct:
        """A product without an algorithm yet (`LibraryProduct.take`)."""
        assert inner % parts == 0
        assert self._kind is not None
        if self._work is None:
            self._work = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        return LibraryProduct(
            self._library, self._handle, self._work, rows, columns, inner, parts, stride or columns, self._kind
        )
