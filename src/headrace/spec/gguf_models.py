"""`ModelSpec` from GGUF metadata: one entry per architecture that llama.cpp's converter writes.

The converter permutes the query and key rows of some architectures so that rotary pairs are neighbours; for these
`Rope.interleaved` is True and the tensors can be used as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from headrace.base.errors import CorruptCheckpoint, UnsupportedModel
from headrace.spec.gguf import GGUFHeader
from headrace.spec.model import (
    Attention,
    DenseMLP,
    FeedForward,
    LatentAttention,
    Layer,
    Mixer,
    ModelSpec,
    MoE,
    Rope,
    RopeScaling,
)

Build = Callable[["_Metadata"], ModelSpec]

_GATING = {0: "softmax", 1: "softmax", 2: "sigmoid", 3: "softmax_after_top_k"}


def spec_from_gguf(header: GGUFHeader, name: str = "") -> ModelSpec:
    """Geometry of the model described by a GGUF header.

    Raises UnsupportedModel naming an architecture without an entry here, CorruptCheckpoint naming a metadata key that is
    missing or contradicts the tensors.
    """
    architecture = header.architecture
    build = _ARCHITECTURES.get(architecture)
    if build is None:
        raise UnsupportedModel(
            f"GGUF architecture {architecture!r} is not supported",
            field="general.architecture",
            remedy="supported: " + ", ".join(sorted(_ARCHITECTURES)),
        )
    if not header.tensors:
        raise CorruptCheckpoint(
            f"{header.path} holds no tensors",
            field="tensors",
            remedy="name a file with weights, not one of a vocabulary",
        )
    return build(_Metadata(header, name))


class _Metadata:
    """Typed access to `<architecture>.<key>`."""

    def __init__(self, header: GGUFHeader, name: str) -> None:
        self.header = header
        self.architecture = header.architecture
        self.name = name or str(header.metadata.get("general.name") or header.path.stem)

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray | list) and len(value) and all(v == value[0] for v in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 1 << 40:
            raise self.wrong(key, value)
        return int(value)

    def per_layer(self, key: str, count: int, default: int | None = None) -> list[int]:
        """A value per layer, given as one number or as an array."""
        value = self.get(key)
        if isinstance(value, np.ndarray | list):
            if len(value) < count:
                raise self.wrong(key, f"{len(value)} entries for {count} layers")
            return [int(v) for v in value[:count]]
        return [self.integer(key, default)] * count

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise self.wrong(key, value)
        return float(value)

    def optional(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        found = self.header.tensors.get(tensor)
        if found is None:
            raise CorruptCheckpoint(f"tensor {tensor!r} is missing", field=tensor)
        return found.shape

    def wrong(self, key: str, value: Any) -> CorruptCheckpoint:
        full = f"{self.architecture}.{key}"
        what = "is missing" if value is None else f"has an impossible value: {value!r}"
        return CorruptCheckpoint(f"GGUF metadata {full} {what}", field=full)

    @property
    def hidden(self) -> int:
        return self.integer("embedding_length")

    @property
    def num_layers(self) -> int:
        count = self.integer("block_count")
        if not 0 < count <= 10_000:
            raise self.wrong("block_count", count)
        return count

    @property
    def vocab_size(self) -> int:
        return self.shape("token_embd.weight")[0]

    def rope(self, dim: int, *, interleaved: bool, local: bool = False) -> Rope:
        rotary = min(self.integer("rope.dimension_count", dim), dim)
        if rotary < 2 or rotary % 2:
            raise self.wrong("rope.dimension_count", rotary)
        base = "rope.freq_base_swa" if local else "rope.freq_base"
        theta = self.number(base, 10_000.0)
        if not 0 < theta < math.inf:
            raise self.wrong(base, theta)
        if local:
            return Rope(theta, rotary, interleaved)
        factors = self.header.vector("rope_freqs.weight")
        if factors and not all(0 < factor < math.inf for factor in factors):
            raise CorruptCheckpoint("rope_freqs.weight holds factors that are not positive", field="rope_freqs.weight")
        if factors and len(factors) != rotary // 2:
            raise CorruptCheckpoint(
                f"rope_freqs.weight has {len(factors)} factors for {rotary} dimensions", field="rope_freqs.weight"
            )
        return Rope(theta, rotary, interleaved, self._scaling(), factors)

    def _scaling(self) -> RopeScaling:
        kind = self.get("rope.scaling.type")
        if kind is None and self.get("rope.scale_linear") is not None:
            return RopeScaling("linear", factor=self.number("rope.scale_linear"))
        if kind in (None, "none", ""):
            return RopeScaling()
        original = self.integer("rope.scaling.original_context_length", self.integer("context_length"))
        if kind == "longrope":
            factor = self.integer("context_length") / original if original else 1.0
            return RopeScaling(
                "longrope",
                factor=factor,
                original_max_context=original,
                attention_factor=self.optional("rope.scaling.attn_factor"),
                short_factors=self.header.vector("rope_factors_short.weight"),
                long_factors=self.header.vector("rope_factors_long.weight"),
            )
        if kind not in ("linear", "yarn"):
            raise UnsupportedModel(f"rope scaling type {kind!r} is not supported", field="rope.scaling.type")
        # The converter stores 0.1 · mscale_all_dim; equal mscale and mscale_all_dim leave cos and sin unscaled.
        multiplier = self.optional("rope.scaling.yarn_log_multiplier")
        mscale = None if multiplier is None else multiplier / 0.1
        return RopeScaling(
            cast(Any, kind),
            factor=self.number("rope.scaling.factor", 1.0),
            original_max_context=original,
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
            mscale=mscale,
            mscale_all_dim=mscale,
            truncate=self.architecture != "gpt-oss",
        )

    def attention(
        self, i: int, *, interleaved: bool, window: int | None = None, local: bool = False, **fields: Any
    ) -> Attention:
        """Layer `i`'s attention; biases, head norms and sinks are there if their tensors are."""
        count = self.num_layers
        heads = self.per_layer("attention.head_count", count)[i]
        kv_heads = self.per_layer("attention.head_count_kv", count, heads)[i]
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise self.wrong("attention.head_count_kv", kv_heads)
        if self.get("attention.key_length") is None and self.hidden % heads:
            raise self.wrong("attention.head_count", heads)
        head_dim = self.integer("attention.key_length", self.hidden // heads)
        value_dim = self.integer("attention.value_length", head_dim)
        fused = self.has(f"blk.{i}.attn_qkv.weight")
        return Attention(
            heads,
            kv_heads,
            head_dim,
            v_head_dim=None if value_dim == head_dim else value_dim,
            window=window,
            qkv_bias=self.has(f"blk.{i}.attn_qkv.bias" if fused else f"blk.{i}.attn_q.bias"),
            out_bias=self.has(f"blk.{i}.attn_output.bias"),
            qk_norm=self._qk_norm(i, head_dim),
            sinks=self.has(f"blk.{i}.attn_sinks.weight") or self.has(f"blk.{i}.attn_sinks"),
            softcap=self.optional("attn_logit_softcapping"),
            rope=self.rope(head_dim, interleaved=interleaved, local=local),
            **fields,
        )

    def _qk_norm(self, i: int, head_dim: int) -> Any:
        name = f"blk.{i}.attn_q_norm.weight"
        if not self.has(name):
            return "none"
        return "head" if self.shape(name) == (head_dim,) else "full"

    def mlp(self, i: int, *, activation: str = "silu", gated: bool = True) -> DenseMLP:
        width = self.per_layer("feed_forward_length", self.num_layers)[i]
        return DenseMLP(width, gated, self.has(f"blk.{i}.ffn_down.bias"), cast(Any, activation))

    def feed_forward(self, i: int, *, activation: str = "silu", **fields: Any) -> FeedForward:
        """Experts where layer `i` has a router, else a gated MLP."""
        if self.has(f"blk.{i}.ffn_gate.0.weight"):
            raise UnsupportedModel(
                "this file stores each expert apart, as converters before April 2024 did",
                field=f"blk.{i}.ffn_gate.0.weight",
                remedy="convert or download it again",
            )
        if not self.has(f"blk.{i}.ffn_gate_inp.weight"):
            return self.mlp(i, activation=activation)
        return self.moe(i, activation=activation, **fields)

    def moe(self, i: int, **fields: Any) -> MoE:
        experts = self.integer("expert_count")
        top_k = self.integer("expert_used_count")
        if not 0 < top_k <= experts:
            raise self.wrong("expert_used_count", top_k)
        shared = f"blk.{i}.ffn_up_shexp.weight"
        gating = _GATING.get(self.integer("expert_gating_func", 1))
        if gating is None:
            raise self.wrong("expert_gating_func", self.get("expert_gating_func"))
        normalized = self.get("expert_weights_norm")
        values: dict[str, Any] = {
            "num_experts": experts,
            "top_k": top_k,
            "intermediate": self.shape(f"blk.{i}.ffn_down_exps.weight")[-1],
            "shared_intermediate": self.shape(shared)[0] if self.has(shared) else 0,
            "shared_gate": self.has(f"blk.{i}.ffn_gate_inp_shexp.weight"),
            "bias": self.has(f"blk.{i}.ffn_down_exps.bias"),
            "router_bias": self.has(f"blk.{i}.ffn_gate_inp.bias"),
            "router_correction": self.has(f"blk.{i}.exp_probs_b.bias") or self.has(f"blk.{i}.exp_probs_b"),
            "scoring": gating,
            "routed_scale": self.number("expert_weights_scale", 1.0) or 1.0,
            "normalize_top_k": True if normalized is None else bool(normalized),
            "num_groups": self.integer("expert_group_count", 1) or 1,
            "top_k_groups": self.integer("expert_group_used_count", 1) or 1,
        }
        return MoE(**(values | fields))

    def model(self, layers: list[Layer], model_type: str, **fields: Any) -> ModelSpec:
        metadata = self.header.metadata
        eos = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        types = {t.type.name for t in self.header.tensors.values()} - {"f32", "f16", "bf16"}
        main = max(
            types or {t.type.name for t in self.header.tensors.values()},
            key=lambda n: sum(t.nbytes for t in self.header.tensors.values() if t.type.name == n),
        )
        values: dict[str, Any] = {
            "name": self.name,
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "layers": tuple(layers),
            "tied_embeddings": not self.has("output.weight"),
            "max_context": self.integer("context_length"),
            "norm_eps": self.number(
                "attention.layer_norm_rms_epsilon", self.number("attention.layer_norm_epsilon", 1e-5)
            ),
            "lm_head_bias": self.has("output.bias"),
            "checkpoint_precision": {"f32": "fp32", "f16": "fp16"}.get(main, main),
            "eos_token_ids": tuple(dict.fromkeys(int(v) for v in eos if isinstance(v, int))),
            "bos_token_id": bos if isinstance(bos, int) else None,
            "source": "gguf",
        }
        return ModelSpec(**(values | fields))


def _llama(m: _Metadata) -> ModelSpec:
    layers = [Layer(m.attention(i, interleaved=True), m.feed_forward(i)) for i in range(m.num_layers)]
    sparse = any(isinstance(layer.mlp, MoE) for layer in layers)
    return m.model(layers, "mixtral" if sparse else "llama")


def _plain(model_type: str, **moe_fields: Any) -> Build:
    """Architectures whose rotary pairs are half a head apart and whose extras show in their tensors."""

    def build(m: _Metadata) -> ModelSpec:
        layers = [
            Layer(m.attention(i, interleaved=False), m.feed_forward(i, **moe_fields)) for i in range(m.num_layers)
        ]
        return m.model(layers, model_type)

    return build


def _phi3(m: _Metadata) -> ModelSpec:
    window = m.integer("attention.sliding_window", 0) or None
    layers = [Layer(m.attention(i, interleaved=False, window=window), m.mlp(i)) for i in range(m.num_layers)]
    return m.model(layers, "phi3")


def _gemma(model_type: str, norms: int, pattern: int) -> Build:
    """Gemma 1 (no window), 2 (every other layer slides) and 3 (five of six slide, with their own rope).

    The converter has added the 1 of Gemma's 1 + w into the norm weights, so `norm_offset` stays False.
    """

    def build(m: _Metadata) -> ModelSpec:
        size = m.integer("attention.sliding_window", 4096) if pattern else 0
        layers: list[Layer] = []
        for i in range(m.num_layers):
            local = bool(pattern) and (i + 1) % pattern != 0
            # The query scale is not in the file: 1/sqrt(head_dim), except where hidden/heads is used (the 27B models).
            wide = model_type != "gemma" and m.num_layers in (46, 62) and m.integer("attention.head_count") == 32
            scale = (m.hidden / m.integer("attention.head_count")) ** -0.5 if wide else None
            mixer: Mixer = m.attention(
                i,
                interleaved=False,
                window=size or None if local else None,
                local=local and model_type == "gemma3_text",
                scale=scale,
            )
            layers.append(Layer(mixer, m.mlp(i, activation="gelu_tanh"), num_norms=norms))
        return m.model(
            layers,
            model_type,
            embedding_scale=m.hidden**0.5,
            logit_softcap=m.optional("final_logit_softcapping"),
        )

    return build


def _gpt_oss(m: _Metadata) -> ModelSpec:
    size = m.integer("attention.sliding_window", 128)
    layers = [
        Layer(
            m.attention(i, interleaved=False, window=size if i % 2 == 0 else None),
            m.moe(i, activation="clamped_swiglu", scoring="softmax_after_top_k"),
        )
        for i in range(m.num_layers)
    ]
    return m.model(layers, "gpt_oss")


def _deepseek2(m: _Metadata) -> ModelSpec:
    heads = m.integer("attention.head_count")
    rope_dim = m.integer("rope.dimension_count")
    key = m.integer("attention.key_length_mla", m.integer("attention.key_length"))
    value = m.integer("attention.value_length_mla", m.integer("attention.value_length"))
    if key <= rope_dim:
        raise m.wrong("attention.key_length", key)
    rope = m.rope(rope_dim, interleaved=True)
    scale = key**-0.5
    if rope.scaling.kind == "yarn" and rope.scaling.mscale_all_dim and rope.scaling.factor > 1:
        scale *= (0.1 * rope.scaling.mscale_all_dim * math.log(rope.scaling.factor) + 1.0) ** 2
    mixer = LatentAttention(
        heads,
        m.integer("attention.q_lora_rank", 0) or None,
        m.integer("attention.kv_lora_rank"),
        nope_dim=key - rope_dim,
        rope_dim=rope_dim,
        v_dim=value,
        rope=rope,
        scale=scale,
    )
    layers = [Layer(mixer, m.feed_forward(i)) for i in range(m.num_layers)]
    corrected = any(isinstance(layer.mlp, MoE) and layer.mlp.router_correction for layer in layers)
    return m.model(layers, "deepseek_v3" if corrected else "deepseek_v2")


_ARCHITECTURES: dict[str, Build] = {
    "llama": _llama,
    "qwen2": _plain("qwen2"),
    "qwen2moe": _plain("qwen2_moe", normalize_top_k=False),
    "qwen3": _plain("qwen3"),
    "qwen3moe": _plain("qwen3_moe"),
    "phi3": _phi3,
    "gemma": _gemma("gemma", 2, 0),
    "gemma2": _gemma("gemma2", 4, 2),
    "gemma3": _gemma("gemma3_text", 4, 6),
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
}
