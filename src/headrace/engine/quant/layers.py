"""Linear layers over quantized matrices; they stand where `headrace.engine.layers.linear.Linear` does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.engine.layers.activation import activation
from headrace.engine.layers.linear import Linear
from headrace.engine.quant.formats import Packed
from headrace.spec.model import Activation


class _Products:
    """What a decoder asks of a linear layer beside the product; the reference has nothing to fuse."""

    packed = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def added(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x).add_(other)

    def multiplied(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x).mul_(other)

    def activated(self, x: torch.Tensor, name: Activation) -> torch.Tensor:
        return activation(name)(self(x))


class QuantLinear(_Products):
    """y = x W^T + b with W [out, in] in its format; x [tokens, in]."""

    def __init__(self, matrix: Packed, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = matrix.shape
        self.matrix = matrix
        self._bias = bias
        self.nbytes = matrix.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.matrix.form.linear(x, self.matrix)
        return y if self._bias is None else y.add_(self._bias)


class SideBySide(_Products):
    """Several matrices of the same input whose outputs follow each other; `orders[i]` are the outputs of part i as wanted.

    Scales may be shared by rows of one matrix, so quantized matrices are reordered and joined only in what they give.
    """

    def __init__(
        self,
        parts: Sequence[Linear | QuantLinear],
        orders: Sequence[torch.Tensor | None],
        bias: torch.Tensor | None = None,
    ) -> None:
        self._parts = parts
        self._orders = orders
        self._bias = bias
        self.out_features = sum(p.out_features for p in parts)
        self.in_features = parts[0].in_features
        # The orders are a property of the rotation, the same for all layers, and no weights.
        self.nbytes = sum(p.nbytes for p in parts) + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found = [
            part(x) if order is None else part(x).index_select(1, order)
            for part, order in zip(self._parts, self._orders, strict=True)
        ]
        y = torch.cat(found, 1)
        return y if self._bias is None else y.add_(self._bias)
