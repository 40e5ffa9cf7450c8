"""Tensors of a quantized safetensors checkpoint under the names that the model knows them by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from headrace.base.errors import CorruptCheckpoint, InvalidInput, UnsupportedModel
from headrace.engine.quant.arrays import QuantArrays
from headrace.engine.quant.blocks import as_blocks
from headrace.engine.quant.policy import Policy, part_of
from headrace.engine.quant.readers import READERS
from headrace.engine.weights.safetensors import SafetensorsSource
from headrace.engine.weights.source import Floats, Rows, Stored
from headrace.spec.families._config import Config
from headrace.spec.packing import BLOCK_KINDS
from headrace.spec.quantization import MATRIX_PARTS, ignored_modules

_OF_THE_CACHE = re.compile(r"\.(q_scale|k_scale|v_scale|kv_scale|[kqv]_proj\.output_scale)$")
"""Scales for an FP8 KV cache of other engines. Values in ours are not scaled, so nothing takes them."""


class QuantizedSource:
    """A `TensorSource` in which the several tensors of one quantized matrix are one.

    `policy` is what the checkpoint says it leaves alone. CorruptCheckpoint names a tensor that contradicts
    `quantization_config`: quantized although it is listed as left alone, plain although it is not, or none at all.
    """

    def __init__(self, raw: SafetensorsSource, quantization: Mapping[str, Any], stored: str) -> None:
        """`stored`: the precision that the configuration names (`headrace.spec.quantization.checkpoint_format`)."""
        config = Config(quantization)
        self.method = method_of(quantization)
        if (reason := no_reader(quantization)) is not None:
            raise UnsupportedModel(reason, field="quantization_config.quant_method")
        self.form = stored
        self.policy = Policy(frozenset(), tuple(ignored_modules(quantization)))
        self._raw = raw
        self._reader = READERS.get(self.method)(raw, config, self.form)
        self._matrices: dict[str, None] = {}
        hidden: set[str] = set()
        for name in raw.names():
            if (logical := self._reader.logical(name)) is not None:
                self._matrices[logical] = None
                hidden.update(self._reader.companions(logical))
        self._plain = [name for name in raw.names() if name not in hidden and not _OF_THE_CACHE.search(name)]
        self._refuse_contradictions(everything=self._targets_everything(config))

    @property
    def activations(self) -> str:
        """`int8` if the checkpoint asks for activations rounded to INT8 per token, else empty."""
        asked = [g.table("input_activations") or {} for g in _groups(self._reader.config)]
        found = any(a.get("num_bits") == 8 and a.get("type", "int") == "int" and a.get("dynamic") for a in asked)
        return "int8" if found and self.form == "int8" else ""

    def is_packed(self, name: str) -> bool:
        return name in self._matrices

    def packed(self, name: str) -> QuantArrays:
        return self._reader.read(name)

    def names(self) -> Iterable[str]:
        return [*self._plain, *self._matrices]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(name) if name in self._matrices else self._raw.shape(name)

    def read(self, name: str) -> Floats:
        """The tensor as fp32; a quantized one is dequantized by its format, which takes torch."""
        if name not in self._matrices:
            return self._raw.read(name)
        from headrace.engine.quant.formats import form

        found = self.packed(name)
        values: Floats = form(found.form).adopt(found, name).dequantize().numpy()
        return values

    def rows(self, name: str) -> Rows | None:
        return None if name in self._matrices else self._raw.rows(name)

    def stored(self, name: str) -> Stored:
        if name not in self._matrices:
            return self._raw.stored(name)
        if self.form in BLOCK_KINDS:
            return as_blocks(self.packed(name))
        return Stored.of_floats(np.ascontiguousarray(self.read(name)))

    def _targets_everything(self, config: Config) -> bool:
        """Whether every linear layer is meant that is not named as left alone."""
        return all(g.get("targets") in (None, ["Linear"]) for g in _groups(config)) and not config.get("dynamic")

    def _refuse_contradictions(self, *, everything: bool) -> None:
        if not self._matrices:
            name = next(iter(self._plain), "model")
            raise CorruptCheckpoint(
                f"quantization_config says {self.method}, but no tensor is stored so ({name!r} is not)",
                field=name,
                remedy="config.json and weights do not belong together",
            )
        for name in self._matrices:
            if (pattern := self.policy.named(_module(name))) is not None:
                raise CorruptCheckpoint(
                    f"tensor {name!r} is quantized, but quantization_config leaves {pattern!r} alone",
                    field=name,
                    remedy="correct the list of ignored modules in config.json",
                )
        if not everything:
            return
        for name in self._plain:
            module = _module(name)
            matrix = name.endswith(".weight") and len(self._raw.shape(name)) == 2
            if matrix and part_of(module) in MATRIX_PARTS and self.policy.named(module) is None:
                raise CorruptCheckpoint(
                    f"tensor {name!r} is not quantized, but quantization_config ({self.method}) does not leave it alone",
                    field=name,
                    remedy="list it among the ignored modules in config.json, or download the weights again",
                )


def method_of(quantization: Mapping[str, Any]) -> str:
    """`quant_method`, spelled as readers are named."""
    method = quantization.get("quant_method")
    if not isinstance(method, str) or not method:
        raise InvalidInput("quantization_config names no quant_method", field="quantization_config.quant_method")
    return method.lower().replace("_", "-")


def no_reader(quantization: Mapping[str, Any]) -> str | None:
    """Why a checkpoint of this configuration is not read, in one line, or None."""
    method = method_of(quantization)
    known = READERS.names()
    return None if method in known else f"quantized by {method}, which has no reader (known: {', '.join(known)})"


def _groups(config: Config) -> list[Config]:
    groups = Config(config.table("config_groups") or {})
    return [groups.nested(name) for name in groups.raw]


def _module(name: str) -> str:
    return name.removesuffix(".weight")
