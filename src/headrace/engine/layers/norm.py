"""RMS normalization."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. An offset of 1 (Gemma) is already in `weight`."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._shape = tuple(weight.shape)
        self._eps = eps
        self.nbytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self._weight, self._eps)
