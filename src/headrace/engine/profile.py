"""Where a step's time goes: matrix products, attention, and the rest, which is the host's overhead.

Only under the `profile` option, since it wraps every linear layer of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.engine.attention._contract import AttentionBackend, AttentionKind, Layer, Spans
from headrace.engine.layers.decoder import Decoder
from headrace.spec.model import Activation


@dataclass(slots=True)
class StepProfile:
    """Seconds inside linear layers (the output head among them) and inside attention, summed over all steps so far.

    Operators on the CPU run to their end before they return, so wall time around a call is the time inside it.
    """

    gemm_s: float = 0.0
    attention_s: float = 0.0


class _Timed:
    """A layer that adds the time of its calls to `profile.gemm_s`; all else is the layer's own."""

    def __init__(self, layer: Any, profile: StepProfile) -> None:
        self._layer = layer
        self._profile = profile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._timed(self._layer, x)

    def added(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self._timed(self._layer.added, x, other)

    def multiplied(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self._timed(self._layer.multiplied, x, other)

    def activated(self, x: torch.Tensor, name: Activation) -> torch.Tensor:
        return self._timed(self._layer.activated, x, name)

    def _timed(self, product: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        begin = time.perf_counter()
        y = product(*arguments)
        self._profile.gemm_s += time.perf_counter() - begin
        return y


class _TimedAttention:
    def __init__(self, backend: AttentionBackend, profile: StepProfile) -> None:
        self._backend = backend
        self._profile = profile
        self.name = backend.name

    def unsupported(self, kind: AttentionKind, device: torch.device, dtype: torch.dtype) -> str | None:
        return self._backend.unsupported(kind, device, dtype)

    def prepare(
        self,
        spans: Spans,
        kind: AttentionKind,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> Any:
        return self._backend.prepare(spans, kind, device, dtype, kv_dtype)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Layer, prepared: Any) -> torch.Tensor:
        begin = time.perf_counter()
        out = self._backend.attend(q, k, v, cache, prepared)
        self._profile.attention_s += time.perf_counter() - begin
        return out


def profiled(decoder: Decoder, attention: AttentionBackend, profile: StepProfile) -> AttentionBackend:
    """Wrap every linear layer of `decoder` in place; returns the attention backend, wrapped."""
    decoder.replace_linears(lambda layer: _Timed(layer, profile))
    return _TimedAttention(attention, profile)
