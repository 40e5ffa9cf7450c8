"""A decoder's weights on the device, fused as the kernels want them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from headrace.base.errors import UnsupportedModel
from headrace.engine.cuda.products import Matrix, PackedParts
from headrace.engine.cuda.repack import repacked, unfit
from headrace.engine.cuda.upload import Part, Uploader
from headrace.engine.quant.formats import Format, Packed
from headrace.engine.quant.policy import Policy
from headrace.engine.weights.checkpoint import Checkpoint
from headrace.engine.weights.names import Names
from headrace.spec.model import Attention, Layer, ModelSpec, Rope


@dataclass(slots=True)
class LayerWeights:
    """One layer. `qkv` stacks queries, keys and values; `up` stacks gate and up where the MLP is gated."""

    attn_norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Matrix
    out_bias: torch.Tensor | None
    post_attn_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    up: Matrix
    up_bias: torch.Tensor | None
    down: Matrix
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
            for one in fields(layer):
                if isinstance(found := getattr(layer, one.name), torch.Tensor):
                    yield found
                elif found is not None:
                    yield from found.tensors()

    def matrices(self) -> Iterator[Matrix]:
        """All that tokens are multiplied by in the layers."""
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.up, layer.down)

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
    form: Format | None = None,
    policy: Policy | None = None,
) -> tuple[DecoderWeights, Uploader, Quantized]:
    """Allocate every weight and start filling it; the weights hold their values after `Uploader.finish`.

    With a `form` the matrices of the layers are quantized, those that the checkpoint holds so or `policy` does not keep.
    """
    uploader = Uploader(checkpoint, device, seed)
    load = _Loader(spec, names, dtype, device, uploader, checkpoint, form, policy or Policy())
    shape = (spec.vocab_size, spec.hidden_size)
    embedding = load.matrix(f"{names.embedding}.weight", shape)
    head = embedding
    if spec.tied_embeddings:
        checkpoint.leave(f"{names.head}.weight")  # some files repeat a tied head
    else:
        head = load.matrix(f"{names.head}.weight", shape)
    layers = [load.layer(i, layer) for i, layer in enumerate(spec.layers)]
    return DecoderWeights(embedding, layers, load.norm(names.final_norm), head), uploader, load.quantized


@dataclass(slots=True)
class Quantized:
    """Which modules turned out to be quantized and which not, with their shapes, and why some stay in their format's layout."""

    matrices: dict[str, tuple[int, int]] = field(default_factory=dict)
    plain: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)


def _unfilled(form: Format, rows: int, columns: int, device: torch.device) -> Packed:
    layout = form.layout(rows, columns)
    return Packed(form, (rows, columns), {k: torch.zeros(s, dtype=d, device=device) for k, (d, s) in layout.items()})


class _Loader:
    def __init__(
        self,
        spec: ModelSpec,
        names: Names,
        dtype: torch.dtype,
        device: torch.device,
        uploader: Uploader,
        checkpoint: Checkpoint,
        form: Format | None,
        policy: Policy,
    ) -> None:
        self._checkpoint = checkpoint
        self._form = form
        self._policy = policy
        self.quantized = Quantized()
        self._spec = spec
        self._names = names
        self._dtype = dtype
        self._device = device
        self._up = uploader

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def matrix(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if self._checkpoint.is_packed(name):
            raise UnsupportedModel(
                f"tensor {name!r} is quantized; on the GPU only the matrices of layers may be", field=name
            )
        if len(shape) == 2:
            self.quantized.plain[name.removesuffix(".weight")] = shape
        target = self._empty(*shape)
        self._up.fill(target, name, shape)
        return target

    def _joined(self, parts: list[Part]) -> Matrix:
        """The matrices of the same input one after the other, quantized if they are to be."""
        modules = [p.name.removesuffix(".weight") for p in parts]
        wanted = [
            self._checkpoint.is_packed(p.name) or (self._form is not None and self._policy.keeps(m) is None)
            for p, m in zip(parts, modules, strict=True)
        ]
        if len(set(wanted)) > 1:
            plain, packed = (parts[wanted.index(w)].name for w in (False, True))
            raise UnsupportedModel(
                f"tensor {plain!r} is not quantized and {packed!r} is; on the GPU they are one product", field=plain
            )
        rows, columns = sum(p.rows for p in parts), parts[0].shape[1]
        if self._form is None or not wanted[0]:
            target = self._empty(rows, columns)
            at = 0
            for part, module in zip(parts, modules, strict=True):
                self._up.fill(target[at : at + part.rows], part.name, part.shape, rows=part.cut, order=part.order)
                self.quantized.plain[module] = part.shape
                at += part.rows
            return target
        for i, (part, module) in enumerate(zip(parts, modules, strict=True)):
            self.quantized.matrices[module if part.cut is None else f"{module}[{i}]"] = (part.rows, columns)
        unfilled = [_unfilled(self._form, p.rows, columns, self._device) for p in parts]
        why = unfit(self._form.spec, [p.rows for p in parts], columns)
        if why is None:
            # The layout's own shapes, found by moving what is still empty.
            matrix: Matrix = repacked(unfilled)
        else:
            matrix = PackedParts((rows, columns), tuple(unfilled), why)
            self.quantized.unfit.setdefault(why, parts[0].name)
        self._up.quantize(matrix, self._form, parts)
        return matrix

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
            name, shape = n.gate_up.format(i=i), (2 * width, hidden)
            halves = [slice(0, width), slice(width, 2 * width)]
            up = self._joined([Part(f"{name}.weight", shape, half) for half in halves])
            up_bias = self.matrix(f"{name}.bias", (2 * width,)) if mlp.bias else None
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
            self._joined([Part(f"{name}.weight", (out, into))]),
            self.matrix(f"{name}.bias", (out,)) if bias else None,
        )

    def _stacked(self, i: int, parts: list[tuple[str, int, np.ndarray | None]], into: int, bias: bool):
        total = sum(rows for _, rows, _ in parts)
        weight = self._joined([Part(f"{p.format(i=i)}.weight", (rows, into), None, order) for p, rows, order in parts])
        biases = self._empty(total) if bias else None
        at = 0
        for pattern, rows, order in parts:
            name = pattern.format(i=i)
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
        bias = self._empty(total) if a.qkv_bias else None
        at, parts = 0, []
        for rows, rows_order in ((q_rows, q_order), (kv_rows, k_order), (kv_rows, None)):
            part = slice(at, at + rows)
            parts.append(Part(f"{name}.weight", (total, hidden), part, rows_order))
            if bias is not None:
                self._up.fill(bias[part], f"{name}.bias", (total,), rows=part, order=rows_order)
            at += rows
        return self._joined(parts), bias


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
