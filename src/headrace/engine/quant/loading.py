"""From a checkpoint to quantized linear layers: matrices are taken as stored, or quantized as they are loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from headrace.base.errors import InvalidInput
from headrace.engine.layers.linear import Linear, Tensorize, tensorizer
from headrace.engine.quant.formats import Format, Packed, form, names
from headrace.engine.quant.layers import QuantLinear, SideBySide
from headrace.engine.quant.policy import Policy, kept_parts
from headrace.engine.weights.checkpoint import Checkpoint
from headrace.engine.weights.dummy import DummySource
from headrace.engine.weights.quantized import QuantizedSource
from headrace.engine.weights.source import Floats, TensorSource
from headrace.spec.accounting import weight_bytes
from headrace.spec.model import ModelSpec
from headrace.spec.precision import precision

_IN_FP32 = tensorizer(torch.float32, torch.device("cpu"))


def wanted_format(
    weights: str, source: TensorSource, spec: ModelSpec, plain: tuple[str, ...], backend: str = "torch"
) -> Format | None:
    """The format of the matrices that option `weights` asks for, None for a type of `plain`.

    `auto` is what the checkpoint holds (of dummy weights: would hold). A checkpoint that is quantized cannot be quantized
    again, only be served as it is or dequantized; InvalidInput says so.
    """
    held = source.form if isinstance(source, QuantizedSource) else None
    if weights == "auto":
        if held is None:
            return form(spec.checkpoint_precision) if _dummy_form(source, spec) else None
        return form("w8a8") if source.activations == "int8" else form(held)
    if weights in plain:
        return None
    try:
        found = form(weights)
    except InvalidInput:
        raise InvalidInput(
            f"the {backend} backend cannot use weights {weights!r}",
            field="weights",
            remedy="choose one of: " + ", ".join(("auto", *plain, *names())),
        ) from None
    if held is not None and found.spec.name != held:
        raise InvalidInput(
            f"the checkpoint is quantized as {held} and would only lose as {found.name}",
            field="weights",
            remedy=f"use auto, or one of {', '.join(plain)} to dequantize it",
        )
    return found


def policy_of(source: TensorSource) -> Policy:
    """What stays plain: of a quantized checkpoint whatever is, of another the default parts."""
    return Policy(modules=("re:.*",)) if isinstance(source, QuantizedSource) else Policy()


def loading_notes(loader: QuantLoader, source: TensorSource, computed: str) -> list[str]:
    """What a user should know of how the weights are held and multiplied."""
    found = loader.form
    origin = f"as the {source.method} checkpoint holds them" if isinstance(source, QuantizedSource) else "when loaded"
    activations = "INT8 per token" if found.quantizes_activations else computed
    how = "by products of integers" if found.quantizes_activations else "dequantized in every product"
    notes = [f"matrices quantized to {found.name} {origin}, {how}; activations {activations}, the rest {computed}"]
    if loader.rounded:
        notes.append(f"scales of {len(loader.rounded)} tensors, {loader.rounded[0]} the first, were rounded to fp16")
    return notes


def _dummy_form(source: TensorSource, spec: ModelSpec) -> bool:
    return isinstance(source, DummySource) and spec.checkpoint_precision in names()


class QuantLoader:
    """Makes the linear layers of one model. Thread-safe as far as the checkpoint is.

    `bytes_predicted` is what `headrace.spec` says that all weights take, given which matrices turned out to be quantized.
    """

    def __init__(self, checkpoint: Checkpoint, wanted: Format, policy: Policy, tensorize: Tensorize) -> None:
        self._checkpoint = checkpoint
        self.form = wanted
        self._policy = policy
        self._tensor = tensorize
        self._quantized: dict[str, tuple[int, ...]] = {}
        self._plain: dict[str, tuple[int, ...]] = {}
        self.rounded: list[str] = []
        """Tensors whose scales had to be rounded to the format's type."""

    def linear(self, module: str, out: int, into: int, bias: torch.Tensor | None = None) -> Linear | QuantLinear:
        """The layer of `module` (its tensor's name without `.weight`)."""
        return self._layer(self._matrix(module, out, into), bias)

    def linear_of(self, values: Floats, module: str, part: int) -> Linear | QuantLinear:
        """The layer of matrix `part` of a tensor that stacks several."""
        module = f"{module}[{part}]"
        return self._layer(self._made(values, module), None)

    def cut(
        self, module: str, widths: Sequence[int], into: int, biases: Sequence[torch.Tensor | None]
    ) -> list[Linear | QuantLinear]:
        """The layers whose matrices one tensor holds, one after the other."""
        parts = self._cut(module, widths, into)
        return [self._layer(matrix, bias) for matrix, bias in zip(parts, biases, strict=True)]

    def side_by_side(
        self,
        modules: Sequence[str] | str,
        widths: Sequence[int],
        into: int,
        orders: Sequence[np.ndarray | None],
        bias: torch.Tensor | None,
    ) -> SideBySide:
        """One layer of several matrices (in tensors of their own, or in one called `modules`); `orders`: their outputs."""
        if isinstance(modules, str):
            found = self._cut(modules, widths, into)
        else:
            found = [self._matrix(m, width, into) for m, width in zip(modules, widths, strict=True)]
        return SideBySide([self._layer(m, None) for m in found], [_index(order) for order in orders], bias)

    def bytes_predicted(self, spec: ModelSpec, plain: str) -> int:
        """Bytes of all weights of `spec` by `headrace.spec`, unquantized ones in precision `plain`."""
        return bytes_predicted(spec, self.form, plain, self._plain, self._quantized)

    def _layer(self, matrix: Packed | torch.Tensor, bias: torch.Tensor | None) -> Linear | QuantLinear:
        return QuantLinear(matrix, bias) if isinstance(matrix, Packed) else Linear(matrix, bias)

    def _matrix(self, module: str, out: int, into: int) -> Packed | torch.Tensor:
        name, shape = f"{module}.weight", (out, into)
        if (packed := self._stored(module, name, shape)) is not None:
            self._quantized[module] = shape
            return packed
        return self._made(self._checkpoint.take(name, shape), module)

    def _stored(self, module: str, name: str, shape: tuple[int, ...]) -> Packed | None:
        found = self._checkpoint.packed(name, shape)
        if found is None:
            return None
        if found.rounded:
            self.rounded.append(name)
        return self.form.adopt(found, name)

    def _made(self, values: Floats, module: str) -> Packed | torch.Tensor:
        if self._policy.keeps(module) is not None:
            self._plain[module] = values.shape
            return self._tensor(values)
        self._quantized[module] = values.shape
        return self.form.quantize(_IN_FP32(values), f"{module}.weight")

    def _cut(self, module: str, widths: Sequence[int], into: int) -> list[Packed | torch.Tensor]:
        name, shape = f"{module}.weight", (sum(widths), into)
        if (packed := self._stored(module, name, shape)) is not None:
            parts: list[Packed | torch.Tensor] = list(packed.form.split(packed, widths, name))
            for i, width in enumerate(widths):
                self._quantized[f"{module}[{i}]"] = (width, into)
            return parts
        values = self._checkpoint.take(name, shape)
        pieces = np.split(values, np.cumsum(widths)[:-1])
        return [self._made(piece, f"{module}[{i}]") for i, piece in enumerate(pieces)]


def bytes_predicted(
    spec: ModelSpec, form: Format, plain: str, kept: Collection[str], quantized: Mapping[str, tuple[int, ...]]
) -> int:
    """Bytes of all weights of `spec`: modules `quantized` (with their shapes) in `form`, all else in precision `plain`."""
    parts = kept_parts(kept, quantized)
    if parts is not None:
        return weight_bytes(spec, form.spec.name, unquantized_precision=plain, unquantized_parts=parts).total
    # A part of one layer holds matrices of both kinds, so they are counted one by one.
    saved = sum(precision(plain).nbytes(shape) - form.spec.nbytes(shape) for shape in quantized.values())
    return weight_bytes(spec, plain).total - saved


def _index(order: np.ndarray | None) -> torch.Tensor | None:
    if order is None or np.array_equal(order, np.arange(len(order))):
        return None
    return torch.from_numpy(order)
