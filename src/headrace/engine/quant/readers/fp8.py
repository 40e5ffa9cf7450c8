"""FP8 E4M3 checkpoints: `weight` beside `weight_scale_inv` (a tile of 128 x 128 each, as in DeepSeek-V3) or `weight_scale`.

`weight_scale_inv` is what a code is multiplied by, as `weight_scale` is; the name tells of the factor that made the codes.
"""

from __future__ import annotations

from headrace.base.errors import CorruptCheckpoint
from headrace.base.units import ceil_div
from headrace.engine.quant.arrays import QuantArrays
from headrace.engine.quant.readers._contract import Reader

_PARTS = ("weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale", "input_scale_ub")


class FP8Reader(Reader):
    def logical(self, name: str) -> str | None:
        return name if name.endswith(".weight") and self.raw.dtype(name) == "F8_E4M3" else None

    def companions(self, logical: str) -> tuple[str, ...]:
        module = logical.removesuffix("weight")
        return tuple(module + part for part in _PARTS)

    def shape(self, logical: str) -> tuple[int, ...]:
        return tuple(self.raw.shape(logical))

    def read(self, logical: str) -> QuantArrays:
        codes = self.codes(logical, "F8_E4M3")
        self.two_dimensional(logical, codes)
        stored = [name for ending in ("_scale_inv", "_scale") if self.has(name := logical + ending)]
        if len(stored) != 1:
            raise CorruptCheckpoint(
                f"tensor {logical!r} needs one of weight_scale_inv and weight_scale, found {len(stored)}",
                field=f"{logical}_scale_inv",
            )
        scales = self.floats(stored[0])
        if self.stored.scaling == "tile":
            rows, columns = (ceil_div(n, self.stored.group_size) for n in codes.shape)
            if scales.shape != (rows, columns):
                raise CorruptCheckpoint(
                    f"tensor {stored[0]!r} has shape {list(scales.shape)}, expected {[rows, columns]}", field=stored[0]
                )
        return QuantArrays(self.form, codes.shape, {"codes": codes, "scales": scales.reshape(-1)})


READER = FP8Reader
