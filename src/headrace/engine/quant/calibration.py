"""Running one layer over calibration text, and seeing what reaches its matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.base.errors import CorruptCheckpoint, InvalidInput
from headrace.engine.layers.decoder import AttentionBlock, Block, layer_block
from headrace.engine.layers.rope import HeadBuffer, rotation_table
from headrace.engine.quant.methods._contract import Inputs
from headrace.engine.weights.checkpoint import Checkpoint
from headrace.engine.weights.names import Names
from headrace.engine.weights.source import Floats, Stored
from headrace.spec.model import DenseMLP, ModelSpec, Rope

_ROWS = 4096
"""Tokens that a layer is run over at a time."""


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Token ids [sequences, length]."""

    tokens: np.ndarray

    @classmethod
    def of(cls, ids: Sequence[int], samples: int, length: int) -> CalibrationText:
        """Up to `samples` pieces of `length` tokens, spread over the text; InvalidInput if it has not one."""
        pieces = len(ids) // length
        if pieces < 1:
            raise InvalidInput(
                f"has {len(ids)} tokens, not one piece of {length}", field="calibrate", remedy="give a longer text"
            )
        chosen = np.linspace(0, pieces - 1, min(samples, pieces)).round().astype(int)
        return cls(np.asarray(ids[: pieces * length], np.int64).reshape(pieces, length)[chosen])


class LayerRun:
    """One layer of a model over whole sequences, without a cache."""

    def __init__(self, spec: ModelSpec, names: Names, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        rope = spec.layers[index].mixer.rope
        self._ropes: tuple[Rope, ...] = () if rope is None else (rope,)
        self._block: Block = layer_block(spec, names, Checkpoint(_Tensors(tensors)), index, self._ropes)
        self._names = names
        self._index = index
        self._spec = spec

    def record(self) -> dict[str, Inputs]:
        """From now on what reaches each matrix is added up; matrices of one input share an entry."""
        seen: dict[str, Inputs] = {}
        order = iter(self._matrices())

        def wrap(layer: Any) -> Any:
            matrices = next(order)
            if not matrices:
                return layer
            inputs = Inputs.empty(layer.in_features)
            seen.update(dict.fromkeys(matrices, inputs))
            return _Recording(layer, inputs.add)

        self._block.attention.replace_linears(wrap)
        self._block.mlp.replace_linears(wrap)
        return seen

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [sequences, length, width] → the next layer's."""
        count, length, width = hidden.shape
        tables = [rotation_table(rope, length, torch.device("cpu")) for rope in self._ropes]
        out = torch.empty_like(hidden)
        step = max(1, _ROWS // length)
        for at in range(0, count, step):
            part = hidden[at : at + step]
            context = _Sequences(self._block.attention, tables, len(part), length)
            found = self._block(part.reshape(-1, width).clone(), context)
            out[at : at + step] = found.view(part.shape)
        return out

    def _matrices(self) -> Iterator[list[str]]:
        """Names of the matrices behind each linear layer, in the order in which a block shows these."""
        n, i = self._names, self._index

        def at(*patterns: str, e: int = 0) -> list[str]:
            return [f"{p.format(i=i, e=e)}.weight" for p in patterns]

        yield at(n.q, n.k, n.v) if n.qkv is None else at(n.qkv)
        yield at(n.o)
        mlp = self._spec.layers[i].mlp
        # Gate and up have one input, which is seen at the gate.
        if not isinstance(mlp, DenseMLP):
            yield []
            for e in range(mlp.num_experts):
                yield at(n.expert_gate, n.expert_up, e=e)
                yield []
                yield at(n.expert_down, e=e)
            return
        if mlp.gated:
            yield at(n.gate, n.up) if n.gate_up is None else at(n.gate_up)
            yield []
        else:
            yield at(n.up)
        yield at(n.down)


def outline_of_layer(spec: ModelSpec, names: Names, checkpoint: Checkpoint, index: int) -> None:
    """Take from `checkpoint` (over `Outlines`) every tensor of a layer: CorruptCheckpoint where one is missing or of another shape."""
    rope = spec.layers[index].mixer.rope
    layer_block(spec, names, checkpoint, index, () if rope is None else (rope,))


class _Recording:
    """A linear layer that shows its input to `see`."""

    def __init__(self, layer: Any, see: Callable[[torch.Tensor], None]) -> None:
        self._layer = layer
        self._see = see

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._see(x)
        return self._layer(x)

    def added(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        self._see(x)
        return self._layer.added(x, other)

    def multiplied(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        self._see(x)
        return self._layer.multiplied(x, other)

    def activated(self, x: torch.Tensor, name: str) -> torch.Tensor:
        self._see(x)
        return self._layer.activated(x, name)


class _Sequences:
    """A step's context for whole sequences of equal length side by side: each sees itself alone, nothing is cached."""

    def __init__(self, attention: AttentionBlock, tables: list[torch.Tensor], count: int, length: int) -> None:
        self._kind = kind = attention.kind
        self._count = count
        rotation = None if attention.rope is None else tables[attention.rope].repeat(count, 1)
        like = torch.empty(count * length, 0)
        self._heads = HeadBuffer(kind.num_heads, kind.num_kv_heads, kind.head_dim, rotation, like)

    def attend(self, layer: int, projected: torch.Tensor) -> torch.Tensor:
        kind, heads = self._kind, self._heads
        heads.fill(projected)
        group = kind.num_heads // kind.num_kv_heads
        q, k, v = (t.unflatten(0, (self._count, -1)).transpose(1, 2) for t in (heads.q, heads.k, heads.v))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(2, 3) * kind.scale
        if kind.softcap is not None:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        at = torch.arange(q.shape[2])
        hidden = at[None, :] > at[:, None]
        if kind.window is not None:
            hidden |= at[None, :] <= at[:, None] - kind.window
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (shares @ v).transpose(1, 2).reshape(-1, kind.num_heads * v.shape[-1])


class _Tensors:
    """A `TensorSource` over tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._find(name).shape)

    def read(self, name: str) -> Floats:
        return self._find(name).numpy().copy()

    def rows(self, name: str) -> None:
        return None

    def stored(self, name: str) -> Stored:
        return Stored.of_floats(self.read(name))

    def _find(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise CorruptCheckpoint(f"tensor {name!r} is missing", field=name)
        return self._tensors[name]


class Outlines:
    """A `TensorSource` of shapes alone: all elements of a tensor are the same zero in memory."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def names(self) -> Iterable[str]:
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise CorruptCheckpoint(f"tensor {name!r} is missing", field=name)
        return self._shapes[name]

    def read(self, name: str) -> Floats:
        return torch.zeros(()).expand(self.shape(name)).numpy()

    def rows(self, name: str) -> None:
        return None

    def stored(self, name: str) -> Stored:
        return Stored.of_floats(self.read(name))
