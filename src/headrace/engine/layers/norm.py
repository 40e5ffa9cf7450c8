"""RMS normalization."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from headrace.engine.layers.direct import native_call

_NATIVE_MOST = 1 << 17
"""Numbers that one native call, which runs in the caller's thread, normalizes at most."""


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. An offset of 1 (Gemma) is already in `weight`.

    In fp32 on the CPU it is one call of the native extension where that is installed (`native`) and rows are few, or else
    x / (hypot(|x|, sqrt(n eps)) / sqrt(n)) * weight, whose operators over all of x are half of those torch composes it of.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self._size = size
        self._eps = eps
        self._fp32 = weight.dtype == torch.float32
        self._weight = weight.contiguous()
        self._root = math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)
        self._native = native_call("rms_norm") if self._fp32 and weight.device.type == "cpu" else None
        self.native = self._native is not None
        self.nbytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._fp32:
            return F.rms_norm(x, (self._size,), self._weight, self._eps)
        if self._native is not None and (count := x.numel()) <= _NATIVE_MOST and x.is_contiguous():
            y = torch.empty_like(x)
            rows = count // self._size
            self._native(x.data_ptr(), self._weight.data_ptr(), y.data_ptr(), rows, self._size, self._eps)
            return y
        return x.div(self._length(x)).mul_(self._weight)

    def apply_(self, x: torch.Tensor) -> None:
        """Normalize `x` in place."""
        if not self._fp32:
            x.copy_(self(x))
        else:
            x.div_(self._length(x)).mul_(self._weight)

    def _length(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(x, 2, -1, True).hypot_(self._floor).div_(self._root)
