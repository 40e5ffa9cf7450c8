"""Feed-forward layers: gated and plain MLPs, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.engine.layers.activation import activation
from headrace.engine.layers.linear import Linear
from headrace.spec.model import Activation, MoE


class GatedMLP:
    """down(act(gate x) * up x); activation and gating happen inside the products."""

    def __init__(self, gate: Linear, up: Linear, down: Linear, name: Activation) -> None:
        activation(name)  # refuses an unknown one before anything is computed
        self._gate = gate
        self._up = up
        self._down = down
        self._name = name
        self.nbytes = gate.nbytes + up.nbytes + down.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._up.multiplied(x, self._gate.activated(x, self._name)))

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The result plus `residual`."""
        return self._down.added(self._up.multiplied(x, self._gate.activated(x, self._name)), residual)

    def replace_linears(self, change: Callable[[Linear], Any]) -> None:
        self._gate, self._up, self._down = change(self._gate), change(self._up), change(self._down)


class PlainMLP:
    """down(act(up x))."""

    def __init__(self, up: Linear, down: Linear, name: Activation) -> None:
        activation(name)
        self._up = up
        self._down = down
        self._name = name
        self.nbytes = up.nbytes + down.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._up.activated(x, self._name))

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._down.added(self._up.activated(x, self._name), residual)

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

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(x).add_(residual)

    def replace_linears(self, change: Callable[[Linear], Any]) -> None:
        self._router = change(self._router)
        for expert in self._experts:
            expert.replace_linears(change)
