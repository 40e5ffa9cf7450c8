"""MXFP4 checkpoints as of gpt-oss: `X_blocks` uint8 [..., out, in / 32, 16] and `X_scales` uint8 [..., out, in / 32].

A byte holds two neighbouring inputs, the first in its low half; leading dimensions are experts.
"""

from __future__ import annotations

from headrace.base.errors import CorruptCheckpoint
from headrace.engine.quant.arrays import QuantArrays
from headrace.engine.quant.readers._contract import Reader


class MXFP4Reader(Reader):
    def logical(self, name: str) -> str | None:
        return name.removesuffix("_blocks") if name.endswith("_blocks") else None

    def companions(self, logical: str) -> tuple[str, ...]:
        return f"{logical}_blocks", f"{logical}_scales"

    def shape(self, logical: str) -> tuple[int, ...]:
        name, _ = self.companions(logical)
        blocks = self.codes(name, "U8")
        if blocks.ndim < 3 or blocks.shape[-1] != 16:
            raise CorruptCheckpoint(
                f"tensor {name!r} has shape {list(blocks.shape)}, expected [..., out, groups, 16]", field=name
            )
        return *blocks.shape[:-2], blocks.shape[-2] * 32

    def read(self, logical: str) -> QuantArrays:
        blocks_name, scales_name = self.companions(logical)
        shape = self.shape(logical)
        blocks, scales = self.codes(blocks_name, "U8"), self.codes(scales_name, "U8")
        if scales.shape != blocks.shape[:-1]:
            raise CorruptCheckpoint(
                f"tensor {scales_name!r} has shape {list(scales.shape)}, expected {list(blocks.shape[:-1])}",
                field=scales_name,
            )
        return QuantArrays(self.form, shape, {"codes": blocks, "scales": scales})


READER = MXFP4Reader
