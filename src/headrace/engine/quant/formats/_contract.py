"""What every weight format offers, and a quantized matrix in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import torch.nn.functional as F

from headrace.base.errors import CorruptCheckpoint, InvalidInput, UnsupportedModel
from headrace.engine.quant.arrays import QuantArrays
from headrace.spec.precision import Precision, precision

Tensors = Mapping[str, torch.Tensor]
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [out, in], or a stack of them [..., out, in], in the tensors of its format."""

    form: Format
    shape: tuple[int, ...]
    tensors: Tensors

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    def dequantize(self) -> torch.Tensor:
        return self.form.dequantize(self)


class Format(ABC):
    """A way to store a matrix. Stateless; one instance per name.

    `spec` says how many bytes a shape takes; the tensors of `layout` take exactly these.
    """

    name: str
    spec: Precision
    quantizes_activations = False

    def __init__(self, name: str, stored: str | None = None, scales: torch.dtype | None = None) -> None:
        """`scales`: float scales are rounded to this type beside the format's own, for readers that keep them in it."""
        self.name = name
        self.spec = precision(stored or name)
        self.scales = scales

    def with_scales(self, scales: torch.dtype) -> Format:
        """The same format, whose scales have an exact value in `scales` too."""
        return type(self)(self.name, self.spec.name, scales)

    def usable(self, scales: torch.Tensor, own: torch.dtype) -> torch.Tensor:
        """fp32 scales as type `own` holds them: rounded up, so that the largest value is never cut; 1 in place of 0."""
        for dtype in (self.scales, own):
            if dtype is not None and dtype != torch.float32:
                scales = _rounded_up(scales, dtype)
        return torch.where(scales > 0, scales, torch.ones_like(scales))

    @abstractmethod
    def layout(self, rows: int, columns: int) -> Layout:
        """Type and shape of each tensor of a matrix [rows, columns]."""

    @abstractmethod
    def encode(self, weight: torch.Tensor) -> Tensors:
        """The tensors of a finite fp32 matrix [rows, columns], each value rounded to the nearest that the format has."""

    @abstractmethod
    def decode(self, tensors: Tensors, rows: int, columns: int) -> torch.Tensor:
        """fp32 [rows, columns]."""

    def damage(self, tensors: Tensors, columns: int) -> str | None:
        """What makes these tensors unusable, in a few words, or None; shapes and types are right already."""
        for key in ("scales", "nested", "offset"):
            if key in tensors and tensors[key].is_floating_point() and not bool(tensors[key].isfinite().all()):
                return f"its {key} are not finite numbers"
        return None

    def quantize(self, weight: torch.Tensor, name: str = "weight") -> Packed:
        """A matrix [..., out, in] in this format. InvalidInput names the tensor if it holds NaN or infinity, or if it is too
        large for the format's scales."""
        weight = weight.detach().float()
        if not bool(weight.isfinite().all()):
            raise InvalidInput(f"tensor {name!r} holds NaN or infinity and cannot be quantized", field=name)
        rows = weight.reshape(-1, weight.shape[-1])
        tensors = self.encode(rows)
        if (reason := self.damage(tensors, rows.shape[1])) is not None:
            raise InvalidInput(f"tensor {name!r} cannot be stored as {self.name}: {reason}", field=name)
        return Packed(self, tuple(weight.shape), tensors)

    def dequantize(self, packed: Packed) -> torch.Tensor:
        """fp32 of the matrix's shape."""
        return self.decode(packed.tensors, packed.rows, packed.shape[-1]).view(packed.shape)

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """x [tokens, in] times the transposed matrix [out, in], in x's type."""
        return F.linear(x, self.dequantize(packed).to(x.dtype))

    def adopt(self, found: QuantArrays, name: str) -> Packed:
        """The matrix that a reader found, checked; CorruptCheckpoint names the tensor."""
        rows, columns = prod(found.shape[:-1]), found.shape[-1]
        tensors: dict[str, torch.Tensor] = {}
        for key, (dtype, shape) in self.layout(rows, columns).items():
            array = found.arrays.get(key)
            if array is None:
                raise CorruptCheckpoint(f"tensor {name!r} has no {key.replace('_', ' ')}", field=name)
            if array.size != prod(shape):
                raise CorruptCheckpoint(
                    f"tensor {name!r} [{rows}, {columns}] as {self.name} needs {prod(shape)} {key}, found {array.size}",
                    field=name,
                    remedy="check quantization_config's group size and zero points against the weights",
                )
            tensors[key] = _owned(array).view(dtype).view(shape)
        if (reason := self.damage(tensors, columns)) is not None:
            raise CorruptCheckpoint(f"tensor {name!r} is damaged: {reason}", field=name)
        return Packed(self, found.shape, tensors)

    def split(self, packed: Packed, sizes: Sequence[int], name: str) -> list[Packed]:
        """The matrix cut into runs of rows. UnsupportedModel for a format whose scales do not follow rows."""
        raise UnsupportedModel(
            f"tensor {name!r} holds several matrices fused, which {self.name} cannot cut", field=name
        )


class RowFormat(Format):
    """A format in which each tensor's leading dimension is the row, so that matrices can be cut and joined."""

    def split(self, packed: Packed, sizes: Sequence[int], name: str) -> list[Packed]:
        cut = {key: tensor.split(list(sizes)) for key, tensor in packed.tensors.items()}
        columns = packed.shape[-1]
        return [Packed(self, (size, columns), {k: v[i] for k, v in cut.items()}) for i, size in enumerate(sizes)]


def _rounded_up(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    narrow = values.to(dtype)
    above = torch.nextafter(narrow, torch.full_like(narrow, torch.inf))
    return torch.where(narrow.float() < values, above, narrow).float()


def _owned(array: np.ndarray) -> torch.Tensor:
    """A tensor with memory of its own: a mapped file's arrays must not be aliased."""
    return torch.from_numpy(np.array(array, order="C", copy=True))
