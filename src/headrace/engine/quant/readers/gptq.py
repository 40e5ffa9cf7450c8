"""GPTQ checkpoints: `qweight` int32 [in · bits / 32, out], `qzeros` int32 [groups, out · bits / 32], `scales` [groups, out].

Words hold neighbouring inputs (of `qzeros`: outputs), lowest bits first. The first version of the format stores a zero point
less one; `checkpoint_format` `gptq_v2` stores it as it is. With `desc_act`, `g_idx` [in] is the group of each input.
"""

from __future__ import annotations

import numpy as np

from headrace.base.errors import CorruptCheckpoint, UnsupportedModel
from headrace.base.units import ceil_div
from headrace.engine.quant.arrays import QuantArrays, unpack_words
from headrace.engine.quant.readers._contract import Reader


class GPTQReader(Reader):
    def logical(self, name: str) -> str | None:
        return name.removesuffix("qweight") + "weight" if name.endswith(".qweight") else None

    def companions(self, logical: str) -> tuple[str, ...]:
        module = logical.removesuffix("weight")
        return tuple(module + part for part in ("qweight", "qzeros", "scales", "g_idx"))

    def shape(self, logical: str) -> tuple[int, ...]:
        name = self.companions(logical)[0]
        words, outputs = self.two_dimensional(name, self.codes(name, "I32"))
        return outputs, words * 32 // int(self.stored.bits)

    def read(self, logical: str) -> QuantArrays:
        if self.config.get("dynamic"):
            raise UnsupportedModel(
                "GPTQ checkpoints with other settings per module are not supported", field="quantization_config.dynamic"
            )
        bits = int(self.stored.bits)
        weight_name, zeros_name, scales_name, group_name = self.companions(logical)
        words = self.codes(weight_name, "I32")
        _, outputs = self.two_dimensional(weight_name, words)
        codes = unpack_words(np.ascontiguousarray(words.T), bits)
        scales, rounded = self.scales(scales_name)
        self.two_dimensional(scales_name, scales)
        zeros = None
        if self.has(zeros_name):
            stored = self.codes(zeros_name, "I32")
            expected = (scales.shape[0], ceil_div(outputs * bits, 32))
            if stored.shape != expected:
                raise CorruptCheckpoint(
                    f"tensor {zeros_name!r} has shape {list(stored.shape)}, expected {list(expected)}",
                    field=zeros_name,
                )
            zeros = unpack_words(stored, bits)[:, :outputs].T
            if self._less_one():
                zeros = zeros + np.uint8(1) & np.uint8((1 << bits) - 1)
        group_of = self.codes(group_name, "I32", "I64") if self.has(group_name) else None
        return self.integer_groups(logical, codes, scales.T, zeros, zeros_name, group_of, group_name, rounded=rounded)

    def _less_one(self) -> bool:
        version = self.config.text("checkpoint_format", default="gptq")
        if version not in ("gptq", "gptq_v2"):
            raise UnsupportedModel(
                f"checkpoint_format {version!r} is not supported", field="quantization_config.checkpoint_format"
            )
        return version == "gptq"


READER = GPTQReader
