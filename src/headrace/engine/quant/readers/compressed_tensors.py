"""compressed-tensors checkpoints: `pack-quantized` integers, `int-quantized` INT8 and `float-quantized` FP8.

Packed: `weight_packed` int32 [out, in · bits / 32], lowest bits first, codes raised by half their range; `weight_scale`
[out, groups]; `weight_zero_point`, packed along the outputs; `weight_shape`; `weight_g_idx` under act order. Otherwise
`weight` is int8 or FP8 beside its `weight_scale`.
"""

from __future__ import annotations

import numpy as np

from headrace.base.errors import CorruptCheckpoint, UnsupportedModel
from headrace.base.units import ceil_div
from headrace.engine.quant.arrays import QuantArrays, unpack_words
from headrace.engine.quant.readers._contract import Reader

_PARTS = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
)


class CompressedTensorsReader(Reader):
    def logical(self, name: str) -> str | None:
        if name.endswith(".weight_packed"):
            logical = name.removesuffix("_packed")
            if self.has(logical):
                raise CorruptCheckpoint(
                    f"tensor {logical!r} is there twice, packed as {name!r} and plain",
                    field=logical,
                    remedy="files of two checkpoints are mixed; keep those of one",
                )
            return logical
        if name.endswith(".weight") and self.raw.dtype(name) in ("I8", "F8_E4M3"):
            return name
        return None

    def companions(self, logical: str) -> tuple[str, ...]:
        module = logical.removesuffix("weight")
        return tuple(module + part for part in _PARTS)

    def shape(self, logical: str) -> tuple[int, ...]:
        if self.has(logical):
            return tuple(self.raw.shape(logical))
        name = f"{logical}_shape"
        sizes = self.codes(name, "I64", "I32")
        if sizes.shape != (2,) or (sizes < 1).any():
            raise CorruptCheckpoint(f"tensor {name!r} does not hold the two sizes of a matrix", field=name)
        return int(sizes[0]), int(sizes[1])

    def read(self, logical: str) -> QuantArrays:
        zeros_name = f"{logical}_zero_point"
        if self.has(f"{logical}_packed"):
            return self._packed(logical, zeros_name)
        if self.stored.kind == "float":
            return self._float(logical)
        return self._plain_integers(logical, zeros_name)

    def _packed(self, logical: str, zeros_name: str) -> QuantArrays:
        bits = int(self.stored.bits)
        if self.stored.kind != "int" or bits not in (4, 8):
            raise CorruptCheckpoint(
                f"tensor {logical}_packed holds packed integers, quantization_config says {self.form}",
                field=f"{logical}_packed",
            )
        rows, columns = self.shape(logical)
        words = self.codes(f"{logical}_packed", "I32")
        expected = (rows, ceil_div(columns * bits, 32))
        if words.shape != expected:
            raise CorruptCheckpoint(
                f"tensor {logical}_packed has shape {list(words.shape)}, {rows} x {columns} codes of {bits} bits "
                f"need {list(expected)}",
                field=f"{logical}_packed",
            )
        codes = unpack_words(np.ascontiguousarray(words), bits)[:, :columns]
        scales, rounded = self.scales(f"{logical}_scale")
        if self.form == "int8":
            self._no_zeros(zeros_name)
            signed = (codes.astype(np.int16) - 128).astype(np.int8)
            return QuantArrays(self.form, (rows, columns), {"codes": signed, "scales": scales.reshape(-1)})
        zeros = None
        if self.has(zeros_name):
            stored = self.codes(zeros_name, "I32", "I8")
            self.two_dimensional(zeros_name, stored)
            if stored.dtype == np.int8:
                zeros = (stored.astype(np.int16) + (1 << bits - 1)).astype(np.uint8)
            else:
                zeros = unpack_words(np.ascontiguousarray(stored.T), bits)[:, :rows].T
        group_name = f"{logical}_g_idx"
        group_of = self.codes(group_name, "I32", "I64") if self.has(group_name) else None
        if group_of is not None and (group_of == -1).all():
            group_of = None  # how the library writes that there is no order
        return self.integer_groups(logical, codes, scales, zeros, zeros_name, group_of, group_name, rounded=rounded)

    def _plain_integers(self, logical: str, zeros_name: str) -> QuantArrays:
        codes = self.codes(logical, "I8")
        rows, columns = self.two_dimensional(logical, codes)
        if self.form != "int8":
            if self.stored.bits != 8 or self.stored.scaling != "group":
                raise CorruptCheckpoint(
                    f"tensor {logical!r} holds INT8, quantization_config says {self.form}", field=logical
                )
            scales, rounded = self.scales(f"{logical}_scale")
            zeros = None
            if self.has(zeros_name):
                zeros = (self.codes(zeros_name, "I8").astype(np.int16) + 128).astype(np.uint8)
            raised = (codes.astype(np.int16) + 128).astype(np.uint8)
            return self.integer_groups(logical, raised, scales, zeros, zeros_name, None, "", rounded=rounded)
        self._no_zeros(zeros_name)
        scales = self.floats(f"{logical}_scale").reshape(-1)
        if len(scales) == 1:  # one for the whole tensor is one for each row
            scales = np.repeat(scales, rows)
        return QuantArrays(self.form, (rows, columns), {"codes": codes, "scales": scales})

    def _float(self, logical: str) -> QuantArrays:
        codes = self.codes(logical, "F8_E4M3")
        self.two_dimensional(logical, codes)
        return QuantArrays(
            self.form, codes.shape, {"codes": codes, "scales": self.floats(f"{logical}_scale").reshape(-1)}
        )

    def _no_zeros(self, name: str) -> None:
        if self.has(name) and (self.raw.codes(name) != 0).any():
            raise UnsupportedModel(
                f"tensor {name!r}: INT8 with a zero point per output is not supported",
                field=name,
                remedy="use symmetric weights",
            )


READER = CompressedTensorsReader
