"""The decoder that all supported architectures are instances of, built from a `ModelSpec` and a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.base.errors import UnsupportedModel
from headrace.engine.attention._contract import AttentionKind
from headrace.engine.layers.context import StepContext
from headrace.engine.layers.linear import (
    Linear,
    MappedEmbedding,
    PlainHead,
    TableEmbedding,
    Tensorize,
    stacked,
    tensorizer,
)
from headrace.engine.layers.mlp import GatedMLP, PlainMLP, SparseMLP
from headrace.engine.layers.norm import RMSNorm
from headrace.engine.layers.rope import neighbour_order
from headrace.engine.models._support import unsupported
from headrace.engine.weights.checkpoint import Checkpoint
from headrace.engine.weights.names import Names
from headrace.engine.weights.source import Floats
from headrace.spec.model import Attention, DenseMLP, Layer, ModelSpec, MoE, Rope

if TYPE_CHECKING:
    from headrace.engine.quant.loading import QuantLoader


class AttentionBlock:
    """Projections, head norms, rotation, attention, output projection of one layer; x [tokens, hidden] both ways.

    `rope` is the index of the layer's rope among `Decoder.ropes`, None without one.
    """

    def __init__(
        self,
        index: int,
        kind: AttentionKind,
        rope: int | None,
        qkv: Linear,
        out: Linear,
        norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> None:
        self.index = index
        self.kind = kind
        self.rope = rope
        self._qkv = qkv
        self._out = out
        self._norms = norms
        self.nbytes = qkv.nbytes + out.nbytes + sum(n.nbytes for n in norms or ())

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        return self._out(self._attended(x, step))

    def added(self, x: torch.Tensor, step: StepContext, residual: torch.Tensor) -> torch.Tensor:
        """The result plus `residual`."""
        return self._out.added(self._attended(x, step), residual)

    def _attended(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        projected = self._qkv(x)
        if self._norms is not None:
            kind = self.kind
            heads = projected.view(-1, kind.num_heads + 2 * kind.num_kv_heads, kind.head_dim)
            self._norms[0].apply_(heads[:, : kind.num_heads])
            self._norms[1].apply_(heads[:, kind.num_heads : kind.num_heads + kind.num_kv_heads])
        return step.attend(self.index, projected)

    def replace_linears(self, change: Callable[[Linear], Any]) -> None:
        self._qkv, self._out = change(self._qkv), change(self._out)


class Block:
    """One decoder layer: pre-norms, and post-norms where the architecture has four."""

    def __init__(
        self,
        attention: AttentionBlock,
        mlp: GatedMLP | PlainMLP | SparseMLP,
        attn_norm: RMSNorm,
        mlp_norm: RMSNorm,
        post_norms: tuple[RMSNorm, RMSNorm] | None,
        residual_scale: float,
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self._attn_norm = attn_norm
        self._mlp_norm = mlp_norm
        self._post = post_norms
        self._scale = residual_scale
        self.nbytes = sum(p.nbytes for p in (attention, mlp, attn_norm, mlp_norm, *(post_norms or ())))

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """x [tokens, hidden] → the next layer's input; x may be overwritten."""
        if self._post is None and self._scale == 1.0:
            x = self.attention.added(self._attn_norm(x), step, x)
            return self.mlp.added(self._mlp_norm(x), x)
        y = self.attention(self._attn_norm(x), step)
        x.add_(y if self._post is None else self._post[0](y), alpha=self._scale)
        y = self.mlp(self._mlp_norm(x))
        return x.add_(y if self._post is None else self._post[1](y), alpha=self._scale)


@dataclass(slots=True)
class Decoder:
    """Embedding, blocks, final norm and output head. `ropes` are the distinct ropes of the blocks."""

    spec: ModelSpec
    ropes: tuple[Rope, ...]
    embedding: TableEmbedding | MappedEmbedding
    blocks: list[Block]
    final_norm: RMSNorm
    head: Linear | PlainHead

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory."""
        return sum(p.nbytes for p in (self.embedding, *self.blocks, self.final_norm, self.head))

    @property
    def kinds(self) -> list[AttentionKind]:
        return [b.attention.kind for b in self.blocks]

    def linears(self) -> Iterator[Linear | PlainHead]:
        """Every matrix that tokens are multiplied by."""
        found: list[Linear | PlainHead] = []
        self.replace_linears(lambda layer: found.append(layer) or layer)
        return iter(found)

    def replace_linears(self, change: Callable[[Linear | PlainHead], Any]) -> None:
        """Put `change(layer)` in the place of every linear layer."""
        self.head = change(self.head)
        for block in self.blocks:
            block.attention.replace_linears(change)
            block.mlp.replace_linears(change)

    def hidden(self, step: StepContext) -> torch.Tensor:
        """Last hidden states [tokens, hidden] before the final norm."""
        x = self.embedding(step.token_ids)
        if self.spec.embedding_scale != 1.0:
            # The scale is rounded to the weights' precision first, as the architectures that have one do.
            x *= torch.tensor(self.spec.embedding_scale, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, step)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [rows, vocab] of hidden states [rows, hidden]."""
        logits = self.head(self.final_norm(hidden)).float()
        if self.spec.logit_scale != 1.0:
            logits *= self.spec.logit_scale
        if (cap := self.spec.logit_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


def build_decoder(
    spec: ModelSpec,
    names: Names,
    checkpoint: Checkpoint,
    tensorize: Tensorize,
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
    quantized: QuantLoader | None = None,
) -> Decoder:
    """Load every weight of `spec` and check that the checkpoint holds nothing else.

    `quantized` makes the linear layers where they are not plain.
    """
    if (reason := unsupported(spec)) is not None:
        raise UnsupportedModel(f"the torch executor cannot run this model: {reason}", field="model_type")
    ropes = tuple(dict.fromkeys(layer.mixer.rope for layer in spec.layers if layer.mixer.rope is not None))
    loader = _Loader(spec, names, checkpoint, tensorize, quantized)

    def one_block(i: int) -> Block:
        with torch.inference_mode():
            return loader.block(i, spec.layers[i], ropes)

    # Dequantizing and packing one layer is serial, so layers are loaded side by side, each thread on one core; the ends
    # go first, since a large vocabulary makes them the longest piece of work.
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        ends = pool.submit(loader.ends, device, dtype)
        blocks = list(pool.map(one_block, range(len(spec.layers))))
        final_norm = loader.norm(names.final_norm)
        embedding, head = ends.result()
    checkpoint.finish()
    return Decoder(spec, ropes, embedding, blocks, final_norm, head)


def layer_block(spec: ModelSpec, names: Names, checkpoint: Checkpoint, index: int, ropes: tuple[Rope, ...]) -> Block:
    """One layer alone, in fp32 on the CPU; `ropes` as in `Decoder`."""
    loader = _Loader(spec, names, checkpoint, tensorizer(torch.float32, torch.device("cpu")), None)
    return loader.block(index, spec.layers[index], ropes)


class _Loader:
    def __init__(
        self,
        spec: ModelSpec,
        names: Names,
        checkpoint: Checkpoint,
        tensorize: Tensorize,
        quantized: QuantLoader | None,
    ) -> None:
        self._spec = spec
        self._names = names
        self._take = checkpoint.take
        self._checkpoint = checkpoint
        self._tensor = tensorize
        self._quantized = quantized

    def block(self, i: int, layer: Layer, ropes: tuple[Rope, ...]) -> Block:
        n = self._names
        post = None
        if layer.num_norms == 4:
            post = (self.norm(_at(n.post_attn_norm, i)), self.norm(_at(n.post_mlp_norm, i)))
        mlp = self._sparse(i, layer.mlp) if isinstance(layer.mlp, MoE) else self._dense(i, layer.mlp)
        return Block(
            self._attention(i, layer.mixer, ropes),
            mlp,
            self.norm(_at(n.attn_norm, i)),
            self.norm(_at(n.mlp_norm, i)),
            post,
            self._spec.residual_scale,
        )

    def norm(self, name: str, order: np.ndarray | None = None) -> RMSNorm:
        weight = self._take(f"{name}.weight", (self._spec.hidden_size if order is None else len(order),))
        if self._spec.norm_offset:
            weight = weight + 1
        return RMSNorm(self._tensor(weight if order is None else weight[order]), self._spec.norm_eps)

    def ends(
        self, device: torch.device, dtype: torch.dtype
    ) -> tuple[TableEmbedding | MappedEmbedding, Linear | PlainHead]:
        spec, names = self._spec, self._names
        shape = (spec.vocab_size, spec.hidden_size)
        table = self._tensor(self._take(f"{names.embedding}.weight", shape))
        if not spec.tied_embeddings:
            return TableEmbedding(table), self._linear(names.head, *shape)
        self._checkpoint.leave(f"{names.head}.weight")  # some files repeat a tied head
        rows = self._checkpoint.rows(f"{names.embedding}.weight", shape) if device.type == "cpu" else None
        if rows is not None:
            head = Linear(table)
            if head.packed:
                return MappedEmbedding(rows, dtype), head
        return TableEmbedding(table), PlainHead(table)

    def _attention(self, i: int, a: Attention, ropes: tuple[Rope, ...]) -> AttentionBlock:
        n, dim, hidden = self._names, a.head_dim, self._spec.hidden_size
        order = neighbour_order(dim, a.rope)
        qk_rows = _head_rows(a.num_heads, order), _head_rows(a.num_kv_heads, order)
        widths = (a.num_heads * dim, a.num_kv_heads * dim, a.num_kv_heads * dim)
        pieces = [n.q, n.k, n.v]

        def fused(ending: str, tail: tuple[int, ...]) -> Floats:
            if n.qkv is not None:
                whole = self._take(f"{_at(n.qkv, i)}.{ending}", (sum(widths), *tail))
                q, k, v = np.split(whole, np.cumsum(widths)[:-1])
            else:
                q, k, v = (
                    self._take(f"{_at(name, i)}.{ending}", (width, *tail))
                    for name, width in zip(pieces, widths, strict=True)
                )
            return stacked([q[qk_rows[0]], k[qk_rows[1]], v])

        bias = self._tensor(fused("bias", ())) if a.qkv_bias else None
        norms = None
        if a.qk_norm == "head":
            norms = (self.norm(_at(n.q_norm, i), order), self.norm(_at(n.k_norm, i), order))
        kind = AttentionKind(
            a.num_heads,
            a.num_kv_heads,
            dim,
            dim**-0.5 if a.scale is None else a.scale,
            a.window,
            a.softcap,
        )
        rope = None if a.rope is None else ropes.index(a.rope)
        if self._quantized is None:
            qkv = Linear(self._tensor(fused("weight", (hidden,))), bias)
        else:
            modules = [_at(name, i) for name in pieces] if n.qkv is None else _at(n.qkv, i)
            qkv = self._quantized.side_by_side(modules, widths, hidden, (*qk_rows, None), bias)
        return AttentionBlock(
            i,
            kind,
            rope,
            qkv,
            self._linear(_at(n.o, i), hidden, widths[0], bias=a.out_bias),
            norms,
        )

    def _linear(self, name: str, out: int, into: int, *, bias: bool = False) -> Linear:
        added = self._tensor(self._take(f"{name}.bias", (out,))) if bias else None
        if self._quantized is not None:
            return self._quantized.linear(name, out, into, added)
        return Linear(self._tensor(self._take(f"{name}.weight", (out, into))), added)

    def _dense(self, i: int, mlp: DenseMLP) -> GatedMLP | PlainMLP:
        n, hidden = self._names, self._spec.hidden_size
        down = self._linear(_at(n.down, i), hidden, mlp.intermediate, bias=mlp.bias)
        if not mlp.gated:
            return PlainMLP(self._linear(_at(n.up, i), mlp.intermediate, hidden, bias=mlp.bias), down, mlp.activation)
        if n.gate_up is None:
            gate = self._linear(_at(n.gate, i), mlp.intermediate, hidden, bias=mlp.bias)
            up = self._linear(_at(n.up, i), mlp.intermediate, hidden, bias=mlp.bias)
            return GatedMLP(gate, up, down, mlp.activation)
        biases = [None, None]
        if mlp.bias:
            whole = self._take(f"{_at(n.gate_up, i)}.bias", (2 * mlp.intermediate,))
            biases = [self._tensor(part) for part in np.split(whole, 2)]
        if self._quantized is not None:
            widths = (mlp.intermediate, mlp.intermediate)
            return GatedMLP(*self._quantized.cut(_at(n.gate_up, i), widths, hidden, biases), down, mlp.activation)
        both = self._take(f"{_at(n.gate_up, i)}.weight", (2 * mlp.intermediate, hidden))
        gate, up = (Linear(self._tensor(w), b) for w, b in zip(np.split(both, 2), biases, strict=True))
        return GatedMLP(gate, up, down, mlp.activation)

    def _sparse(self, i: int, moe: MoE) -> SparseMLP:
        hidden, width = self._spec.hidden_size, moe.intermediate
        router = self._linear(_at(self._names.router, i), moe.num_experts, hidden)
        experts = [GatedMLP(*parts, moe.activation) for parts in self._experts(i, moe.num_experts, width, hidden)]
        return SparseMLP(router, experts, moe)

    def _experts(self, i: int, count: int, width: int, hidden: int) -> Iterator[list[Linear]]:
        """Gate, up and down of each expert."""
        n = self._names
        patterns = ((n.expert_gate, (width, hidden)), (n.expert_up, (width, hidden)), (n.expert_down, (hidden, width)))
        if n.expert_gate is not None and "{e}" in n.expert_gate:
            for e in range(count):
                yield [self._linear(_at(p, i, e), *shape) for p, shape in patterns]
            return
        names = [_at(p, i) for p, _ in patterns]
        stacks = [
            self._take(f"{name}.weight", (count, *shape)) for name, (_, shape) in zip(names, patterns, strict=True)
        ]
        for e in range(count):
            yield [self._of_stack(stack[e], name, e) for stack, name in zip(stacks, names, strict=True)]

    def _of_stack(self, values: Floats, name: str, e: int) -> Linear:
        if self._quantized is not None:
            return self._quantized.linear_of(values, name, e)
        return Linear(self._tensor(values))


def _head_rows(heads: int, order: np.ndarray) -> np.ndarray:
    """Rows of a projection of `heads` heads when each head's dimensions are reordered."""
    return (np.arange(heads)[:, None] * len(order) + order[None, :]).reshape(-1)


def _at(pattern: str | None, i: int, e: int = 0) -> str:
    if pattern is None:
        raise UnsupportedModel("the architecture has no tensor name for a part that its config asks for")
    return pattern.format(i=i, e=e)
