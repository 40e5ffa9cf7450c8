"""bitsandbytes checkpoints: NF4 with `absmax` (and `nested_absmax` for double quantization) beside the codes, or INT8 with `SCB`.

4-bit codes are of the flattened matrix, high half first; its shape and the offset of the nested scales are in a JSON text
stored as bytes, `quant_state.bitsandbytes__nf4`.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from headrace.base.errors import CorruptCheckpoint, UnsupportedModel
from headrace.engine.quant.arrays import QuantArrays
from headrace.engine.quant.readers._contract import Reader
from headrace.engine.quant.tables import DYNAMIC, NF4

_STATE = "quant_state.bitsandbytes__nf4"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", _STATE)


class BitsAndBytesReader(Reader):
    def logical(self, name: str) -> str | None:
        return name if name.endswith(".weight") and self.raw.dtype(name) in ("U8", "I8") else None

    def companions(self, logical: str) -> tuple[str, ...]:
        module = logical.removesuffix("weight")
        return (logical, f"{module}SCB", f"{logical}_format", *(f"{logical}.{part}" for part in _PARTS))

    def shape(self, logical: str) -> tuple[int, ...]:
        return tuple(self.raw.shape(logical)) if self.form == "int8" else self._shape(logical, self._state(logical))

    def read(self, logical: str) -> QuantArrays:
        return self._int8(logical) if self.form == "int8" else self._nf4(logical)

    def _int8(self, logical: str) -> QuantArrays:
        codes = self.codes(logical, "I8")
        self.two_dimensional(logical, codes)
        largest = self.floats(logical.removesuffix("weight") + "SCB")
        return QuantArrays(
            self.form, codes.shape, {"codes": codes, "scales": (largest / np.float32(127)).astype(np.float32)}
        )

    def _nf4(self, logical: str) -> QuantArrays:
        state = self._state(logical)
        if state.get("blocksize") != self.stored.group_size:
            raise UnsupportedModel(
                f"tensor {logical!r} has blocks of {state.get('blocksize')} elements, only 64 is supported",
                field=logical,
            )
        self._same_table(f"{logical}.quant_map", "nf4")
        found = {"codes": self.codes(logical, "U8").reshape(-1)}
        if self.stored.scale_group:
            if state.get("nested_blocksize") != self.stored.scale_group:
                raise CorruptCheckpoint(
                    f"tensor {logical!r} has nested blocks of {state.get('nested_blocksize')}, expected "
                    f"{self.stored.scale_group}",
                    field=logical,
                    remedy="quantization_config says bnb_4bit_use_double_quant",
                )
            self._same_table(f"{logical}.nested_quant_map", "dynamic")
            offset = state.get("nested_offset")
            if not isinstance(offset, float) or not np.isfinite(offset):
                raise CorruptCheckpoint(
                    f"tensor {logical}.{_STATE} has no nested_offset that is a number", field=f"{logical}.{_STATE}"
                )
            found["scales"] = self.codes(f"{logical}.absmax", "U8")
            found["nested"] = self.floats(f"{logical}.nested_absmax")
            found["offset"] = np.array([offset], np.float32)
        else:
            found["scales"] = self.floats(f"{logical}.absmax")
        return QuantArrays(self.form, self._shape(logical, state), found)

    def _state(self, logical: str) -> dict[str, Any]:
        name = f"{logical}.{_STATE}"
        try:
            state = json.loads(self.codes(name, "U8").tobytes())
        except ValueError:
            raise CorruptCheckpoint(f"tensor {name!r} does not hold JSON", field=name) from None
        if not isinstance(state, dict) or state.get("quant_type") != "nf4":
            raise CorruptCheckpoint(f"tensor {name!r} does not describe NF4", field=name)
        return state

    def _shape(self, logical: str, state: dict[str, Any]) -> tuple[int, ...]:
        sizes = state.get("shape")
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
            raise CorruptCheckpoint(
                f"tensor {logical}.{_STATE} does not hold the shape of a matrix", field=f"{logical}.{_STATE}"
            )
        return tuple(sizes)

    def _same_table(self, name: str, kind: str) -> None:
        """The table of values is a constant of the format, so it is checked and not kept."""
        if self.has(name) and not np.array_equal(self.floats(name), NF4 if kind == "nf4" else DYNAMIC):
            raise CorruptCheckpoint(f"tensor {name!r} is not the table of {kind}", field=name)


READER = BitsAndBytesReader
