"""RMS normalization."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

_length = torch.linalg.vector_norm


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. An offset of 1 (Gemma) is already in `weight`.

    In fp32 it is x / hypot(|x|, sqrt(n eps)) * (sqrt(n) weight): half as many operators as torch composes it of, which
    counts where a step has few rows. `folded`: that last factor is in the columns of the matrices that follow
    (`folded_into`), and only the quotient is computed here; fp32 alone.
    """

    def __init__(self, weight: torch.Tensor, eps: float, *, folded: bool = False) -> None:
        size = weight.shape[-1]
        self._shape = (size,)
        self._eps = eps
        self._fp32 = weight.dtype == torch.float32
        self._weight = weight * math.sqrt(size) if self._fp32 else weight
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)
        self.folded = folded
        self.nbytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._fp32:
            return F.rms_norm(x, self._shape, self._weight, self._eps)
        y = x.div(_length(x, 2, -1, True).hypot_(self._floor))
        return y if self.folded else y.mul_(self._weight)

    def apply_(self, x: torch.Tensor) -> None:
        """Normalize `x` in place."""
        if not self._fp32:
            x.copy_(self(x))
        else:
            x.div_(_length(x, 2, -1, True).hypot_(self._floor)).mul_(self._weight)

    def folded_into(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` [out, n] for input that was not multiplied by this norm's weight; changed in place."""
        return weight.mul_(self._weight) if self.folded else weight
