"""Linear layers and embedding tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from headrace.engine.layers.activation import activation
from headrace.engine.weights.source import Floats, Rows
from headrace.spec.model import Activation

_PACK_HINT = 32
"""Batch that oneDNN picks its weight layout for; measured as good at 1 and at 1,024 as one chosen for these."""

_PRODUCT = torch.ops.mkldnn._linear_pointwise.default
_PRODUCT_WITH = torch.ops.mkldnn._linear_pointwise.binary
_FUSED: dict[str, tuple[str, str]] = {
    "silu": ("swish", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}


class Linear:
    """y = x W^T + b with W [out, in]; x [tokens, in] contiguous.

    On the CPU the weight is repacked once into oneDNN's blocked layout and the original is dropped. Where blocks would pad
    it (small or odd sizes) it stays as it is, so that `nbytes` is always out x in x element size.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self.packed = False
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_HINT)
            if torch.ops.mkldnn._nbytes(packed) == weight.nbytes:
                self._weight = packed
                self.packed = True
                return
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return _PRODUCT(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)

    def added(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The product plus `other` [tokens, out]: a residual connection in the same pass."""
        if self.packed:
            return _PRODUCT_WITH(x, other, self._weight, self._bias, "add")
        return self(x).add_(other)

    def multiplied(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The product times `other` [tokens, out]: a gate in the same pass."""
        if self.packed:
            return _PRODUCT_WITH(x, other, self._weight, self._bias, "mul")
        return self(x).mul_(other)

    def activated(self, x: torch.Tensor, name: Activation) -> torch.Tensor:
        """The activation `name` of the product, in the same pass where oneDNN knows it."""
        if self.packed and name in _FUSED:
            attribute, algorithm = _FUSED[name]
            return _PRODUCT(x, self._weight, self._bias, attribute, [], algorithm)
        return activation(name)(self(x))


class TableEmbedding:
    """Token embeddings from a table in memory; ids come as a numpy array."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.nbytes = table.nbytes

    def __call__(self, ids: np.ndarray) -> torch.Tensor:
        return self.table.index_select(0, torch.from_numpy(ids).to(self.table.device))


class MappedEmbedding:
    """Token embeddings read row by row from the mapped checkpoint: the values of a tied head that is kept only packed."""

    nbytes = 0

    def __init__(self, rows: Rows, dtype: torch.dtype) -> None:
        self._rows = rows
        self._dtype = dtype

    def __call__(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self._rows.read(ids)).to(self._dtype)


class PlainHead:
    """A tied output head that shares the embedding's table."""

    nbytes = 0

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._table)


Tensorize = Callable[[Floats], torch.Tensor]


def tensorizer(dtype: torch.dtype, device: torch.device) -> Tensorize:
    """A function from fp32 arrays to tensors that own their memory."""

    def make(array: Floats) -> torch.Tensor:
        # A mapped file's arrays are read-only and must not be aliased.
        writable = array if array.flags.writeable else array.copy()
        return torch.from_numpy(writable).to(device=device, dtype=dtype)

    return make


def stacked(parts: Sequence[Floats]) -> Floats:
    """Rows of several matrices (or vectors) one after the other: the weight of a fused projection."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
