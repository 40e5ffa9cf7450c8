"""Where a step's time goes: matrix products, attention, and the rest, which is the host's overhead.

Only under the `profile` option, since it wraps every linear layer of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
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

    # Each method reads the clock itself: a frame more per product would be overhead that only the measurement has.

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        begin = perf_counter()
        y = self._layer(x)
        self._profile.gemm_s += perf_counter() - begin
        return y

    def added(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        begin = perf_counter()
        y = self._layer.added(x, other)
        self._profile.gemm_s += perf_counter() - begin
        return y

    def multiplied(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        begin = perf_counter()
        y = self._layer.multiplied(x, other)
        self._profile.gemm_s += perf_counter() - begin
        return y

    def activated(self, x: torch.Tensor, name: Activation) -> torch.Tensor:
        begin = perf_counter()
        y = self._layer.activated(x, name)
        self._profile.gemm_s += perf_counter() - begin
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

    def advance(self, prepared: Any, spans: Spans) -> bool:
        return self._backend.advance(prepared, spans)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Layer, prepared: Any) -> torch.Tensor:
        begin = perf_counter()
        out = self._backend.attend(q, k, v, cache, prepared)
        self._profile.attention_s += perf_counter() - begin
        return out


def profiled(decoder: Decoder, attention: AttentionBackend, profile: StepProfile) -> AttentionBackend:
    """Wrap every linear layer of `decoder` in place; returns the attention backend, wrapped."""
    decoder.replace_linears(lambda layer: _Timed(layer, profile))
    return _TimedAttention(attention, profile)
