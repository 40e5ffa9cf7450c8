"""The formula, one sequence at a time, in fp32: what every other backend is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.engine.attention._contract import AttentionKind, Layer, Spans


class ReadableLayer(Layer, Protocol):
    """A layer's cache in which every token can be read by itself."""

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """What token slots hold, fp32 [tokens, 2 * kv_heads, head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class _Prepared:
    spans: Spans
    kind: AttentionKind


class Naive:
    name = "naive"

    def unsupported(self, kind: AttentionKind, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def prepare(
        self,
        spans: Spans,
        kind: AttentionKind,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> _Prepared:
        return _Prepared(spans, kind)

    def advance(self, prepared: _Prepared, spans: Spans) -> bool:
        return False

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: ReadableLayer, prepared: _Prepared
    ) -> torch.Tensor:
        spans, kind = prepared.spans, prepared.kind
        out = torch.empty_like(q)
        for i, (start, length, first) in enumerate(
            zip(spans.starts.tolist(), spans.lengths.tolist(), spans.first_rows.tolist(), strict=True)
        ):
            rows = slice(first, first + length)
            out[rows] = _sequence(q[rows], cache, spans.tables[i].tolist(), start, spans.block_tokens, kind)
        return out.flatten(1)


def _sequence(
    q: torch.Tensor, cache: ReadableLayer, table: list[int], start: int, block_tokens: int, kind: AttentionKind
) -> torch.Tensor:
    end = start + len(q)
    oldest = 0 if kind.window is None else max(0, start - kind.window + 1)
    slots = torch.tensor([table[p // block_tokens] * block_tokens + p % block_tokens for p in range(oldest, end)])
    kv = cache.read(slots.to(q.device)).transpose(0, 1)  # [2 * kv_heads, keys, head_dim]
    group = kind.num_heads // kind.num_kv_heads
    keys = kv[: kind.num_kv_heads].repeat_interleave(group, 0)
    values = kv[kind.num_kv_heads :].repeat_interleave(group, 0)
    scores = torch.einsum("qhd,hkd->hqk", q.float(), keys) * kind.scale
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    query_at = torch.arange(start, end, device=q.device)[:, None]
    key_at = torch.arange(oldest, end, device=q.device)[None, :]
    hidden = key_at > query_at
    if kind.window is not None:
        hidden = hidden | (key_at <= query_at - kind.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if kind.sinks is not None:
        sinks = kind.sinks.float()[:, None, None].expand(-1, len(q), 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    return torch.einsum("hqk,hkd->qhd", shares, values).to(q.dtype)


BACKEND = Naive()
