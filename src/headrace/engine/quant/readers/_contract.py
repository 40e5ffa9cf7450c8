"""What every reader of quantized checkpoints offers, and what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod

import numpy as np
import numpy.typing as npt

from headrace.base.errors import CorruptCheckpoint
from headrace.base.units import ceil_div
from headrace.engine.quant.arrays import Codes, QuantArrays, pack_pairs
from headrace.engine.weights.safetensors import SafetensorsSource
from headrace.spec.families._config import Config
from headrace.spec.precision import Precision, precision


class Reader(ABC):
    """Matrices of one checkpoint whose `quantization_config` is `config` and whose format is `form`.

    A matrix is known by its logical name (`….weight`). Errors are CorruptCheckpoint or UnsupportedModel naming a tensor.
    """

    def __init__(self, raw: SafetensorsSource, config: Config, form: str) -> None:
        self.raw = raw
        self.config = config
        self.form = form
        self.stored: Precision = precision(form)
        self._names = frozenset(raw.names())

    @abstractmethod
    def logical(self, name: str) -> str | None:
        """The matrix that tensor `name` is the main one of, or None if it is not one."""

    @abstractmethod
    def companions(self, logical: str) -> tuple[str, ...]:
        """Names of all tensors that may belong to the matrix, the main one included."""

    @abstractmethod
    def read(self, logical: str) -> QuantArrays: ...

    @abstractmethod
    def shape(self, logical: str) -> tuple[int, ...]:
        """Shape of the matrix [..., out, in]."""

    def has(self, name: str) -> bool:
        return name in self._names

    def codes(self, name: str, *dtypes: str) -> npt.NDArray[np.generic]:
        """Tensor `name`, which must be of one of `dtypes`."""
        if not self.has(name):
            raise CorruptCheckpoint(
                f"tensor {name!r} is missing", field=name, remedy="quantization_config promises it; check the download"
            )
        if self.raw.dtype(name) not in dtypes:
            raise CorruptCheckpoint(
                f"tensor {name!r} has type {self.raw.dtype(name)}, expected {' or '.join(dtypes)}", field=name
            )
        return self.raw.codes(name)

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """Tensor `name` in fp32; every value must be finite."""
        self.codes(name, "F32", "F16", "BF16")
        values = self.raw.read(name)
        if not np.isfinite(values).all():
            raise CorruptCheckpoint(f"tensor {name!r} holds NaN or infinity", field=name, remedy="download it again")
        return values

    def scales(self, name: str) -> tuple[npt.NDArray[np.floating], bool]:
        """Scales of integers in the format's type, fp16 for groups and fp32 otherwise, and whether one had to be rounded."""
        values = self.floats(name)
        if self.stored.scaling != "group":
            return values, False
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        if not np.isfinite(halves).all():
            raise CorruptCheckpoint(f"tensor {name!r} holds scales beyond fp16", field=name)
        return halves, bool((halves.astype(np.float32) != values).any())

    def two_dimensional(self, name: str, array: npt.NDArray[np.generic]) -> tuple[int, int]:
        if array.ndim != 2 or prod(array.shape) == 0:
            raise CorruptCheckpoint(f"tensor {name!r} has shape {list(array.shape)}, expected a matrix", field=name)
        return array.shape[0], array.shape[1]

    def integer_groups(
        self,
        logical: str,
        codes: Codes,
        scales: npt.NDArray[np.floating],
        zeros: Codes | None,
        zeros_name: str,
        group_of: npt.NDArray[np.integer] | None,
        group_name: str,
        *,
        rounded: bool,
    ) -> QuantArrays:
        """Codes [out, in], scales and zero points [out, groups] in the layout of `integer_groups`.

        Without zero points in the format, those that are stored must all be the middle.
        """
        rows, columns = codes.shape
        size = columns if self.stored.scaling == "row" else self.stored.group_size
        groups = ceil_div(columns, size)
        if scales.shape != (rows, groups):
            raise CorruptCheckpoint(
                f"tensor {logical!r} [{rows}, {columns}] in groups of {size} needs scales [{rows}, {groups}], "
                f"found {list(scales.shape)}",
                field=logical,
                remedy="group_size in quantization_config does not fit these weights",
            )
        bits, middle = int(self.stored.bits), 1 << int(self.stored.bits) - 1
        found: dict[str, npt.NDArray[np.generic]] = {}
        if self.stored.zero_bits:
            if zeros is None:
                raise CorruptCheckpoint(
                    f"tensor {zeros_name!r} is missing: {logical!r} has no zero points",
                    field=zeros_name,
                    remedy="quantization_config says that the weights are asymmetric",
                )
            if zeros.shape != scales.shape:
                raise CorruptCheckpoint(
                    f"tensor {zeros_name!r} holds zero points {list(zeros.shape)}, expected {list(scales.shape)}",
                    field=zeros_name,
                )
            flat = zeros.reshape(1, -1)
            found["zeros"] = pack_pairs(flat)[0] if bits == 4 else flat[0]
        elif zeros is not None and (zeros != middle).any():
            raise CorruptCheckpoint(
                f"tensor {zeros_name!r} holds zero points other than {middle}",
                field=zeros_name,
                remedy="quantization_config says that the weights are symmetric",
            )
        if group_of is not None and group_of.shape != (columns,):
            raise CorruptCheckpoint(
                f"tensor {group_name!r} has shape {list(group_of.shape)}, expected [{columns}]", field=group_name
            )
        if self.stored.column_bytes:
            order = _order(group_of, columns, size, group_name)
            codes = codes[:, order]
            found["order"] = order.astype(np.int32)
        elif group_of is not None and groups > 1 and (group_of != np.arange(columns) // size).any():
            raise CorruptCheckpoint(
                f"tensor {group_name!r} puts inputs into groups out of order",
                field=group_name,
                remedy="quantization_config says nothing of it (desc_act)",
            )
        found["codes"] = pack_pairs(codes) if bits == 4 else codes
        found["scales"] = scales
        return QuantArrays(self.form, (rows, columns), found, rounded)


def _order(group_of: npt.NDArray[np.integer] | None, columns: int, size: int, name: str) -> npt.NDArray[np.int64]:
    """The inputs in the order of their groups, each of which must be full but the last."""
    if group_of is None:
        raise CorruptCheckpoint(
            f"tensor {name!r} is missing",
            field=name,
            remedy="quantization_config says that inputs were reordered (desc_act)",
        )
    order = np.argsort(group_of, kind="stable")
    if (group_of[order] != np.arange(columns) // size).any():
        raise CorruptCheckpoint(f"tensor {name!r} does not put {size} inputs into each group", field=name)
    return order
