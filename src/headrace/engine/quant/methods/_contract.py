"""What a method is given of a layer, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from headrace.engine.quant.formats import Format, Packed
from headrace.engine.weights.names import Names


@dataclass(slots=True)
class Inputs:
    """What was seen at a matrix's input: `gram` [in, in] is the sum of x xᵀ over `count` rows, `magnitude` [in] of |x|."""

    gram: torch.Tensor
    magnitude: torch.Tensor
    count: int = 0

    @classmethod
    def empty(cls, width: int) -> Inputs:
        return cls(torch.zeros(width, width), torch.zeros(width))

    def add(self, x: torch.Tensor) -> None:
        self.gram.addmm_(x.t(), x)
        self.magnitude.add_(x.abs().sum(0))
        self.count += len(x)

    def divide(self, scales: torch.Tensor) -> None:
        """From now on the inputs are what they were, divided by `scales` [in]."""
        self.gram.div_(scales[:, None]).div_(scales)
        self.magnitude.div_(scales)

    def loss(self, difference: torch.Tensor) -> float:
        """Sum over the rows seen of |difference · x|², for a difference of two matrices [out, in]."""
        return float(((difference @ self.gram) * difference).sum())


@dataclass(slots=True)
class LayerWork:
    """One layer: its tensors in fp32 by name, which a method may change where the function stays the same, the names of the
    matrices to be quantized, and what was seen at their inputs (nothing without calibration)."""

    index: int
    names: Names
    tensors: dict[str, torch.Tensor]
    matrices: tuple[str, ...]
    inputs: dict[str, Inputs] = field(default_factory=dict)
    norm_offset: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """`act_order`: GPTQ takes the inputs with the largest activations first. `damping`: share of the mean of the Hessian's
    diagonal that is added to it. `grid`: how many exponents AWQ tries."""

    act_order: bool = True
    damping: float = 0.01
    grid: int = 20


class Method(Protocol):
    calibrated: bool

    def refuse(self, form: Format, *, sparse: bool) -> str | None:
        """Why it cannot make this format (of a mixture of experts: `sparse`), in one line, or None."""
        ...

    def quantize(self, work: LayerWork, form: Format, settings: Settings) -> dict[str, Packed]:
        """Every matrix of the layer by name; `work.tensors` are what the matrices were rounded from."""
        ...
