"""From a `ModelSpec` and a checkpoint to the layers that `headrace_native.Model` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import headrace_native
import numpy as np

from headrace.base.errors import UnsupportedModel
from headrace.engine.native.arena import Arena, Place
from headrace.engine.weights.checkpoint import Checkpoint
from headrace.engine.weights.names import Names
from headrace.engine.weights.source import Stored
from headrace.spec.cache import CacheLayout
from headrace.spec.model import Attention, DenseMLP, Layer, ModelSpec, MoE, Rope
from headrace.spec.packing import Role, packing

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4}


class Plan:
    """Every weight of a model with its place in the arena: made without reading matrices, built once the arena is full."""

    def __init__(self, spec: ModelSpec, names: Names, checkpoint: Checkpoint, weights: str) -> None:
        self.spec = spec
        self.arena = Arena()
        self.ropes: tuple[Rope, ...] = tuple(
            dict.fromkeys(layer.mixer.rope for layer in spec.layers if layer.mixer.rope is not None)
        )
        self._names = names
        self._checkpoint = checkpoint
        self._weights = weights
        self.packed_as: dict[str, int] = {}
        table = (spec.vocab_size, spec.hidden_size)
        self._embedding = self._matrix(names.embedding, table, "table")
        if spec.tied_embeddings:
            checkpoint.leave(f"{names.head}.weight")  # some files repeat a tied head
            self._head = self._embedding
        else:
            self._head = self._matrix(names.head, table, "table")
        self._final_norm = self._vector(names.final_norm, spec.hidden_size)
        self._layers = [self._layer(i, layer) for i, layer in enumerate(spec.layers)]
        checkpoint.finish()
        del self._checkpoint  # whose maps count as resident once they have been read

    @property
    def precision(self) -> str:
        """The packed format that most bytes are in."""
        return max(self.packed_as, key=lambda name: self.packed_as[name])

    def build(
        self, pool: headrace_native.Pool, layout: CacheLayout, kernels: str, exact_activations: bool
    ) -> headrace_native.Model:
        spec, arena = self.spec, self.arena
        activation = next(layer.mlp.activation for layer in spec.layers)
        model = headrace_native.Model(
            {
                "hidden": spec.hidden_size,
                "vocab": spec.vocab_size,
                "eps": spec.norm_eps,
                "norm_offset": float(spec.norm_offset),
                "embedding_scale": spec.embedding_scale,
                "residual_scale": spec.residual_scale,
                "logit_scale": spec.logit_scale,
                "logit_softcap": spec.logit_softcap or 0.0,
                "activation": ACTIVATIONS[activation],
                "exact_activations": exact_activations,
            },
            pool,
            kernels,
        )
        for i, made in enumerate(self._layers):
            group, slot = layout.place(i)
            model.add_layer(_built(made, arena) | {"group": group, "slot": slot})
        embedding = arena.matrix(self._embedding)
        head = embedding if self._head is self._embedding else arena.matrix(self._head)
        model.set_ends(embedding, head, arena.vector(self._final_norm))
        return model

    # ------------------------------------------------------------------------------------------- reserving

    def _reserve(self, name: str, stored: Stored, role: Role = "matrix") -> Place:
        place = self.arena.reserve(name, stored, packing(stored.kind, self._weights, role))
        self.packed_as[place.form.name] = self.packed_as.get(place.form.name, 0) + place.nbytes
        return place

    def _matrix(self, name: str, shape: tuple[int, int], role: Role = "matrix") -> Place:
        return self._reserve(name, self._checkpoint.stored(f"{name}.weight", shape), role)

    def _vector(self, name: str, count: int, ending: str = "weight") -> Any:
        return self.arena.reserve_vector(name, self._checkpoint.take(f"{name}.{ending}", (count,)))

    def _biases(self, parts: list[tuple[str, int]]) -> Any:
        found = [self._checkpoint.take(f"{name}.bias", (count,)) for name, count in parts]
        return self.arena.reserve_vector(parts[0][0], np.concatenate(found))

    def _split(self, name: str, counts: tuple[int, ...], columns: int) -> list[Place]:
        """Matrices stored one below the other in a fused tensor."""
        whole = self._checkpoint.stored(f"{name}.weight", (sum(counts), columns))
        starts = np.cumsum((0, *counts)).tolist()
        return [
            self._reserve(f"{name}[{start}]", whole.part(start, count))
            for start, count in zip(starts, counts, strict=False)
        ]

    def _layer(self, i: int, layer: Layer) -> dict[str, Any]:
        n, hidden = self._names, self.spec.hidden_size
        made = self._attention(i, layer.mixer)
        made["attention_norm"] = self._vector(_at(n.attn_norm, i), hidden)
        made["mlp_norm"] = self._vector(_at(n.mlp_norm, i), hidden)
        if layer.num_norms == 4:
            made["post_attention_norm"] = self._vector(_at(n.post_attn_norm, i), hidden)
            made["post_mlp_norm"] = self._vector(_at(n.post_mlp_norm, i), hidden)
        return made | (self._moe(i, layer.mlp) if isinstance(layer.mlp, MoE) else self._dense(i, layer.mlp))

    def _attention(self, i: int, a: Attention) -> dict[str, Any]:
        n, hidden = self._names, self.spec.hidden_size
        widths = (a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim)
        made: dict[str, Any] = {
            "heads": a.num_heads,
            "kv_heads": a.num_kv_heads,
            "head_dim": a.head_dim,
            "scale": a.head_dim**-0.5 if a.scale is None else a.scale,
            "window": a.window or 0,
            "softcap": a.softcap or 0.0,
        }
        if a.rope is not None:
            made |= {
                "rope": self.ropes.index(a.rope),
                "rope_dim": a.rope.dim,
                "rope_interleaved": a.rope.interleaved,
            }
        names = [_at(name, i) for name in (n.q, n.k, n.v)]
        if n.qkv is not None:
            made["qkv"] = self._split(_at(n.qkv, i), widths, hidden)
            biases = [(_at(n.qkv, i), sum(widths))]
        else:
            made["qkv"] = [self._matrix(name, (width, hidden)) for name, width in zip(names, widths, strict=True)]
            biases = list(zip(names, widths, strict=True))
        if a.qkv_bias:
            made["qkv_bias"] = self._biases(biases)
        made["out"] = [self._matrix(_at(n.o, i), (hidden, widths[0]))]
        if a.out_bias:
            made["out_bias"] = self._vector(_at(n.o, i), hidden, "bias")
        if a.qk_norm == "head":
            made["q_norm"] = self._vector(_at(n.q_norm, i), a.head_dim)
            made["k_norm"] = self._vector(_at(n.k_norm, i), a.head_dim)
        return made

    def _dense(self, i: int, mlp: DenseMLP) -> dict[str, Any]:
        n, hidden, width = self._names, self.spec.hidden_size, mlp.intermediate
        made: dict[str, Any] = {}
        if n.gate_up is not None:
            made["gate_up"] = self._split(_at(n.gate_up, i), (width, width), hidden)
            biases = [(_at(n.gate_up, i), 2 * width)]
        else:
            made["gate_up"] = [self._matrix(_at(name, i), (width, hidden)) for name in (n.gate, n.up)]
            biases = [(_at(name, i), width) for name in (n.gate, n.up)]
        made["down"] = [self._matrix(_at(n.down, i), (hidden, width))]
        if mlp.bias:
            made["gate_up_bias"] = self._biases(biases)
            made["down_bias"] = self._vector(_at(n.down, i), hidden, "bias")
        return made

    def _moe(self, i: int, moe: MoE) -> dict[str, Any]:
        n, hidden, width = self._names, self.spec.hidden_size, moe.intermediate
        shapes = {
            "expert_gate": (n.expert_gate, width, hidden),
            "expert_up": (n.expert_up, width, hidden),
            "expert_down": (n.expert_down, hidden, width),
        }
        made: dict[str, Any] = {
            "router": self._matrix(_at(n.router, i), (moe.num_experts, hidden), "router"),
            "top_k": moe.top_k,
            "normalize": moe.normalize_top_k or moe.scoring == "softmax_after_top_k",
            "intermediate": width,
        }
        for key, (pattern, outputs, inputs) in shapes.items():
            if "{e}" in (pattern or ""):
                made[key] = [self._matrix(_at(pattern, i, e), (outputs, inputs)) for e in range(moe.num_experts)]
            else:
                name = f"{_at(pattern, i)}.weight"
                whole = self._checkpoint.stored(name, (moe.num_experts, outputs, inputs))
                made[key] = [
                    self._reserve(f"{name}[{e}]", whole.part(e * outputs, outputs)) for e in range(moe.num_experts)
                ]
        return made


def _built(made: dict[str, Any], arena: Arena) -> dict[str, Any]:
    """Places replaced by what lies there."""
    build: Callable[[Any], Any] = lambda value: (  # noqa: E731
        arena.matrix(value)
        if isinstance(value, Place)
        else [build(v) for v in value]
        if isinstance(value, list)
        else arena.vector(value)
        if hasattr(value, "offset")
        else value
    )
    return {key: build(value) for key, value in made.items()}


def unsupported(spec: ModelSpec) -> str | None:
    """What the kernels do not compute of a model that `engine.models` knows, in one line, or None."""
    activations = {layer.mlp.activation for layer in spec.layers if isinstance(layer.mlp, DenseMLP | MoE)}
    if len(activations) > 1 or not activations <= ACTIVATIONS.keys():
        return f"activations {sorted(activations)} are not computed"
    for i, layer in enumerate(spec.layers):
        a = layer.mixer
        if a.head_dim % 16:
            return f"layer {i}: a head dimension of {a.head_dim} is not a multiple of 16"
        if a.head_dim > 1024:
            return f"layer {i}: a head dimension of {a.head_dim} is above 1024"
        if isinstance(layer.mlp, DenseMLP) and not layer.mlp.gated:
            return f"layer {i}: an MLP without a gate is not computed"
        if isinstance(layer.mlp, MoE) and layer.mlp.routed_scale != 1.0:
            return f"layer {i}: scaled experts are not computed"
    return None


def _at(pattern: str | None, i: int, e: int = 0) -> str:
    if pattern is None:
        raise UnsupportedModel("the architecture has no tensor name for a part that its config asks for")
    return pattern.format(i=i, e=e)
