"""RMS normalization."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. An offset of 1 (Gemma) is already in `weight`.

    In fp32 it is x / hypot(|x|, sqrt(n eps)) * (sqrt(n) weight): half as many operators as torch composes it of, which
    counts where a step has few rows.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self._shape = (size,)
        self._eps = eps
        self._fp32 = weight.dtype == torch.float32
        self._weight = weight * math.sqrt(size) if self._fp32 else weight
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)
        self.nbytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._fp32:
            return F.rms_norm(x, self._shape, self._weight, self._eps)
        return x.div(self._length(x)).mul_(self._weight)

    def apply_(self, x: torch.Tensor) -> None:
        """Normalize `x` in place."""
        if not self._fp32:
            x.copy_(self(x))
        else:
            x.div_(self._length(x)).mul_(self._weight)

    def _length(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)
