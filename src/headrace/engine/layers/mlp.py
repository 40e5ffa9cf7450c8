"""Feed-forward layers: gated and plain MLPs, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from headrace.base.errors import UnsupportedModel
from headrace.engine.layers.linear import Linear
from headrace.spec.model import Activation, MoE

Activate = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[str, Activate] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
}


def activation(name: Activation) -> Activate:
    """The function called `name`; UnsupportedModel for one that no supported model uses."""
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not supported", field="hidden_act")
    return _ACTIVATIONS[name]


class GatedMLP:
    """down(act(gate x) * up x); gate and up are one product."""

    def __init__(self, gate_up: Linear, down: Linear, name: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activate = activation(name)
        self._width = gate_up.out_features // 2
        self.nbytes = gate_up.nbytes + down.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        both = self._gate_up(x)
        return self._down(self._activate(both[:, : self._width]).mul_(both[:, self._width :]))

    def replace_linears(self, change: Callable[[Linear], Any]) -> None:
        self._gate_up, self._down = change(self._gate_up), change(self._down)


class PlainMLP:
    """down(act(up x))."""

    def __init__(self, up: Linear, down: Linear, name: Activation) -> None:
        self._up = up
        self._down = down
        self._activate = activation(name)
        self.nbytes = up.nbytes + down.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._activate(self._up(x)))

    def replace_linears(self, change: Callable[[Linear], Any]) -> None:
        self._up, self._down = change(self._up), change(self._down)


class SparseMLP:
    """Each token goes through its `top_k` experts, weighted by the router; only experts that a batch touches are run."""

    def __init__(self, router: Linear, experts: Sequence[GatedMLP], moe: MoE) -> None:
        self._router = router
        self._experts = experts
        self._top_k = moe.top_k
        # A softmax over all experts renormalized over the chosen equals a softmax over the chosen logits.
        self._over_chosen = moe.normalize_top_k or moe.scoring == "softmax_after_top_k"
        self._scale = moe.routed_scale
        self.nbytes = router.nbytes + sum(e.nbytes for e in experts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = self._router(x).float()
        if self._over_chosen:
            values, chosen = logits.topk(self._top_k, dim=-1)
            shares = values.softmax(-1)
        else:
            shares, chosen = logits.softmax(-1).topk(self._top_k, dim=-1)
        shares = (shares * self._scale).to(x.dtype)
        # Pairs (token, choice) sorted by expert: each expert gets one contiguous batch.
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()
        tokens = order // self._top_k
        inputs, weights = x.index_select(0, tokens), shares.flatten().index_select(0, order)
        out = torch.zeros_like(x)
        start = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                part = slice(start, start + count)
                y = expert(inputs[part]).mul_(weights[part, None])
                out.index_add_(0, tokens[part], y)
                start += count
        return out

    def replace_linears(self, change: Callable[[Linear], Any]) -> None:
        self._router = change(self._router)
        for expert in self._experts:
            expert.replace_linears(change)
