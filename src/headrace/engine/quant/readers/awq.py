"""AutoAWQ checkpoints: `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` fp16 [groups, out].

A word holds eight neighbouring outputs, in the order that its GPU kernel unpacks them fastest: lowest bits first they are
0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

import numpy as np

from headrace.base.errors import CorruptCheckpoint, UnsupportedModel
from headrace.engine.quant.arrays import Codes, QuantArrays, unpack_words
from headrace.engine.quant.readers._contract import Reader

_OUTPUT_OF_POSITION = np.array([0, 2, 4, 6, 1, 3, 5, 7])


class AWQReader(Reader):
    def logical(self, name: str) -> str | None:
        return name.removesuffix("qweight") + "weight" if name.endswith(".qweight") else None

    def companions(self, logical: str) -> tuple[str, ...]:
        module = logical.removesuffix("weight")
        return tuple(module + part for part in ("qweight", "qzeros", "scales"))

    def shape(self, logical: str) -> tuple[int, ...]:
        name = self.companions(logical)[0]
        inputs, words = self.two_dimensional(name, self.codes(name, "I32"))
        return words * 8, inputs

    def read(self, logical: str) -> QuantArrays:
        version = str(self.config.get("version") or "gemm").lower()
        if version != "gemm" or self.stored.bits != 4:
            raise UnsupportedModel(
                f"AWQ version {version!r} with {self.stored.bits} bits is not supported",
                field="quantization_config.version",
                remedy="use a checkpoint of version gemm with 4 bits",
            )
        weight_name, zeros_name, scales_name = self.companions(logical)
        words = self.codes(weight_name, "I32")
        self.two_dimensional(weight_name, words)
        codes = _outputs_in_order(words).T
        scales, rounded = self.scales(scales_name)
        self.two_dimensional(scales_name, scales)
        zeros = None
        if self.has(zeros_name):
            stored = self.codes(zeros_name, "I32")
            if stored.shape != (scales.shape[0], words.shape[1]):
                raise CorruptCheckpoint(
                    f"tensor {zeros_name!r} has shape {list(stored.shape)}, "
                    f"expected {[scales.shape[0], words.shape[1]]}",
                    field=zeros_name,
                )
            zeros = _outputs_in_order(stored).T
        return self.integer_groups(logical, codes, scales.T, zeros, zeros_name, None, "", rounded=rounded)


def _outputs_in_order(words: np.ndarray) -> Codes:
    codes = unpack_words(words, 4).reshape(*words.shape, 8)
    out = np.empty_like(codes)
    out[..., _OUTPUT_OF_POSITION] = codes
    return out.reshape(words.shape[0], -1)


READER = AWQReader
