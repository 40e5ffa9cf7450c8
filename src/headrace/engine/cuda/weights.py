"""A decoder's weights on the device, fused as the kernels want them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch

from headrace.engine.cuda.upload import Uploader
from headrace.engine.weights.checkpoint import Checkpoint
from headrace.engine.weights.names import Names
from headrace.spec.model import Attention, Layer, ModelSpec, Rope


@dataclass(slots=True)
class LayerWeights:
    """One layer. `qkv` stacks queries, keys and values; `up` stacks gate and up where the MLP is gated."""

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_attn_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None


@dataclass(slots=True)
class DecoderWeights:
    """`head` is the embedding's table where they are tied."""

    embedding: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: torch.Tensor

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.embedding
        yield self.final_norm
        if self.head is not self.embedding:
            yield self.head
        for layer in self.layers:
            yield from (t for f in fields(layer) if (t := getattr(layer, f.name)) is not None)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())


def load_weights(
    spec: ModelSpec,
    names: Names,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None,
) -> tuple[DecoderWeights, Uploader]:
    """Allocate every weight and start filling it; the weights hold their values after `Uploader.finish`."""
    uploader = Uploader(checkpoint, device, seed)
    load = _Loader(spec, names, dtype, device, uploader)
    shape = (spec.vocab_size, spec.hidden_size)
    embedding = load.matrix(f"{names.embedding}.weight", shape)
    head = embedding
    if spec.tied_embeddings:
        checkpoint.leave(f"{names.head}.weight")  # some files repeat a tied head
    else:
        head = load.matrix(f"{names.head}.weight", shape)
    layers = [load.layer(i, layer) for i, layer in enumerate(spec.layers)]
    return DecoderWeights(embedding, layers, load.norm(names.final_norm), head), uploader


class _Loader:
    def __init__(
        self, spec: ModelSpec, names: Names, dtype: torch.dtype, device: torch.device, uploader: Uploader
    ) -> None:
        self._spec = spec
        self._names = names
        self._dtype = dtype
        self._device = device
        self._up = uploader

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def matrix(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        target = self._empty(*shape)
        self._up.fill(target, name, shape)
        return target

    def norm(self, pattern: str | None, i: int = 0, order: np.ndarray | None = None) -> torch.Tensor:
        """A norm's weights; 1 + w needs fp32, since w is small beside 1."""
        width = self._spec.hidden_size if order is None else len(order)
        offset = self._spec.norm_offset
        target = self._empty(width, dtype=torch.float32 if offset else None)
        self._up.fill(target, f"{pattern.format(i=i)}.weight", (width,), order=order, plus=1.0 if offset else 0.0)
        return target

    def layer(self, i: int, layer: Layer) -> LayerWeights:
        n, a, mlp, hidden = self._names, layer.mixer, layer.mlp, self._spec.hidden_size
        order = half_order(a.head_dim, a.rope)
        four = layer.num_norms == 4
        head_norms = a.qk_norm == "head"
        width = mlp.intermediate
        if not mlp.gated:
            up, up_bias = self._linear(n.up, i, width, hidden, mlp.bias)
        elif n.gate_up is not None:
            up, up_bias = self._linear(n.gate_up, i, 2 * width, hidden, mlp.bias)
        else:
            up, up_bias = self._stacked(i, [(n.gate, width, None), (n.up, width, None)], hidden, mlp.bias)
        qkv, qkv_bias = self._qkv(i, a, order)
        out, out_bias = self._linear(n.o, i, hidden, a.num_heads * a.head_dim, a.out_bias)
        down, down_bias = self._linear(n.down, i, hidden, width, mlp.bias)
        return LayerWeights(
            attn_norm=self.norm(n.attn_norm, i),
            qkv=qkv,
            qkv_bias=qkv_bias,
            q_norm=self.norm(n.q_norm, i, order) if head_norms else None,
            k_norm=self.norm(n.k_norm, i, order) if head_norms else None,
            out=out,
            out_bias=out_bias,
            post_attn_norm=self.norm(n.post_attn_norm, i) if four else None,
            mlp_norm=self.norm(n.mlp_norm, i),
            up=up,
            up_bias=up_bias,
            down=down,
            down_bias=down_bias,
            post_mlp_norm=self.norm(n.post_mlp_norm, i) if four else None,
        )

    def _linear(self, pattern: str, i: int, out: int, into: int, bias: bool):
        name = pattern.format(i=i)
        return (
            self.matrix(f"{name}.weight", (out, into)),
            self.matrix(f"{name}.bias", (out,)) if bias else None,
        )

    def _stacked(self, i: int, parts: list[tuple[str, int, np.ndarray | None]], into: int, bias: bool):
        total = sum(rows for _, rows, _ in parts)
        weight = self._empty(total, into)
        biases = self._empty(total) if bias else None
        at = 0
        for pattern, rows, order in parts:
            name = pattern.format(i=i)
            self._up.fill(weight[at : at + rows], f"{name}.weight", (rows, into), order=order)
            if biases is not None:
                self._up.fill(biases[at : at + rows], f"{name}.bias", (rows,), order=order)
            at += rows
        return weight, biases

    def _qkv(self, i: int, a: Attention, order: np.ndarray):
        n, hidden, dim = self._names, self._spec.hidden_size, a.head_dim
        q_rows, kv_rows = a.num_heads * dim, a.num_kv_heads * dim
        q_order, k_order = _of_heads(a.num_heads, order), _of_heads(a.num_kv_heads, order)
        if n.qkv is None:
            return self._stacked(
                i, [(n.q, q_rows, q_order), (n.k, kv_rows, k_order), (n.v, kv_rows, None)], hidden, a.qkv_bias
            )
        name, total = n.qkv.format(i=i), q_rows + 2 * kv_rows
        weight = self._empty(total, hidden)
        bias = self._empty(total) if a.qkv_bias else None
        at = 0
        for rows, rows_order in ((q_rows, q_order), (kv_rows, k_order), (kv_rows, None)):
            part = slice(at, at + rows)
            self._up.fill(weight[part], f"{name}.weight", (total, hidden), rows=part, order=rows_order)
            if bias is not None:
                self._up.fill(bias[part], f"{name}.bias", (total,), rows=part, order=rows_order)
            at += rows
        return weight, bias


def half_order(head_dim: int, rope: Rope | None) -> np.ndarray:
    """Where each dimension of a head comes from so that rotary pairs are (i, i + dim / 2), as the kernels rotate them."""
    order = np.arange(head_dim)
    if rope is not None and rope.interleaved:
        half = rope.dim // 2
        order[:half] = np.arange(0, rope.dim, 2)
        order[half : rope.dim] = np.arange(1, rope.dim, 2)
    return order


def _of_heads(heads: int, order: np.ndarray) -> np.ndarray | None:
    """The same for the rows of all heads; None where nothing moves."""
    if (order == np.arange(len(order))).all():
        return None
    return (np.arange(heads)[:, None] * len(order) + order[None, :]).reshape(-1)
