"""Quantization-aware fine-tuning for small torch models: weights are rounded in the forward pass, gradients go straight through.

The gradient of a rounding is 0 almost everywhere; taking it for 1 (Bengio et al., arXiv:1308.3432) moves the unrounded weights
to where their rounded values do better. Afterwards `restore` leaves plain layers whose round to nearest is what was trained,
so the model is saved as any other and quantized by `headrace quantize --method rtn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from headrace.base.errors import HeadraceError, InvalidInput
from headrace.engine.quant.formats import Format
from headrace.engine.quant.policy import Policy


class RoundedLinear(nn.Module):
    """A linear layer that multiplies by its weight as `form` would store it; the parameters are those of `layer` itself."""

    def __init__(self, layer: nn.Linear, form: Format, name: str) -> None:
        super().__init__()
        self.layer = layer
        self.form = form
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, straight_through(self.layer.weight, self.form, self.name), self.layer.bias)


def straight_through(weight: torch.Tensor, form: Format, name: str = "weight") -> torch.Tensor:
    """The rounded weight, whose gradient is the weight's."""
    with torch.no_grad():
        lost = form.quantize(weight, name).dequantize().to(weight.dtype) - weight
    return weight + lost


def prepare(model: nn.Module, form: Format, policy: Policy | None = None) -> list[str]:
    """Put a `RoundedLinear` in the place of every linear layer that `policy` quantizes; their names.

    InvalidInput if there is none.
    """
    policy = policy or Policy()
    names = [
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and policy.keeps(name) is None
    ]
    if not names:
        raise InvalidInput("the policy leaves no linear layer of this model to quantize", field="policy")
    for name in names:
        _replace(model, name, RoundedLinear(model.get_submodule(name), form, name))
    return names


def restore(model: nn.Module) -> None:
    """Put the plain layers back, their weights as they were trained."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, RoundedLinear):
            _replace(model, name, layer.layer)


def fine_tune(
    model: nn.Module,
    batches: Iterable[torch.Tensor],
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    *,
    learning_rate: float = 1e-4,
    clip: float = 1.0,
) -> list[float]:
    """One step of AdamW per batch; the losses before each. HeadraceError if one is not a finite number."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    losses: list[float] = []
    for batch in batches:
        found = loss(model, batch)
        if not bool(found.isfinite()):
            raise HeadraceError(
                f"the loss of step {len(losses)} is not a finite number", remedy="lower the learning rate"
            )
        optimizer.zero_grad(set_to_none=True)
        found.backward()
        nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        losses.append(float(found.detach()))
    return losses


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)
