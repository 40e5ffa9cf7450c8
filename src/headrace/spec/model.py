"""The geometry of a language model: what each layer is, without any weights and without torch.

A `ModelSpec` is built from a Hugging Face `config.json` (`headrace.spec.hf`) or a GGUF header (`headrace.spec.gguf`).
Everything that turns geometry into bytes or FLOPs is in `headrace.spec.accounting` and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from headrace.base.errors import InvalidInput

_MOST_HEAD_DIMS = 1 << 24
"""Heads times their size; the largest models known have 2^17."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "relu", "clamped_swiglu"]


class RopeScaling(msgspec.Struct, frozen=True):
    """How rotary frequencies are stretched beyond the trained context.

    `kind`: `none`, `linear`, `dynamic`, `llama3`, `yarn`, `longrope`. Fields that a kind does not use stay at their default.
    Formulas as in the papers and in transformers' `modeling_rope_utils`.
    """

    kind: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_max_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


class Rope(msgspec.Struct, frozen=True):
    """Rotary position embedding over the first `dim` of each head's dimensions.

    `interleaved` pairs (0,1),(2,3)…; otherwise pairs (i, i + dim/2). `freq_factors` are per-pair divisors (GGUF `rope_freqs`).
    """

    theta: float = 10_000.0
    dim: int = 0
    interleaved: bool = False
    scaling: RopeScaling = RopeScaling()
    freq_factors: tuple[float, ...] = ()


class Attention(msgspec.Struct, frozen=True):
    """Softmax attention with `num_heads` query heads over `num_kv_heads` key/value heads (MHA, GQA or MQA).

    `window`: tokens that a query sees, itself included (None: all). `chunked`: the window is an aligned chunk (Llama 4)
    rather than a sliding one. `kv_source`: index of the layer whose keys and values are reused (cross-layer sharing);
    such a layer has no K/V projections and no cache of its own. `value_from_key`: values are taken from the key projection
    (before its norm and rotation), so there is no V projection; the cache still holds both.
    `scale`: softmax scale, None means head_dim**-0.5.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    window: int | None = None
    chunked: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    sinks: bool = False
    output_gate: bool = False
    softcap: float | None = None
    scale: float | None = None
    rope: Rope | None = None
    kv_source: int | None = None
    value_from_key: bool = False

    def __post_init__(self) -> None:
        # Whoever loads weights makes tables of this size before it sees a tensor's shape.
        if self.num_heads * self.head_dim > _MOST_HEAD_DIMS:
            raise InvalidInput(
                f"{self.num_heads} heads of {self.head_dim} are absurdly many", field="num_attention_heads"
            )

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


class SparseIndexer(msgspec.Struct, frozen=True):
    """DeepSeek-style top-k selector: its own small keys are cached beside the latent.

    `shared`: the layer reuses what the nearest earlier layer with an indexer selected; it has no weights or keys of its own.
    """

    num_heads: int
    head_dim: int
    top_k: int
    shared: bool = False


class LatentAttention(msgspec.Struct, frozen=True):
    """Multi-head latent attention (MLA): the cache holds one latent of `kv_lora_rank` and one rotary key of `rope_dim`."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    qkv_bias: bool = False
    rope: Rope | None = None
    scale: float | None = None
    indexer: SparseIndexer | None = None


class LinearAttention(msgspec.Struct, frozen=True):
    """Gated delta-rule style linear attention with a fixed-size state (Qwen3-Next, Kimi Linear)."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int
    flavour: Literal["gated_delta", "kimi_delta", "lightning"] = "gated_delta"


class StateSpace(msgspec.Struct, frozen=True):
    """Mamba layer. `version` 2: `num_heads` heads of `head_dim`, `groups` shared B/C; `version` 1: `dt_rank` low-rank step.

    `inner_norms`: learned norms on dt, B and C (Jamba).
    """

    version: Literal[1, 2]
    inner: int
    state: int
    conv_kernel: int
    num_heads: int = 0
    head_dim: int = 0
    groups: int = 1
    dt_rank: int = 0
    conv_bias: bool = True
    proj_bias: bool = False
    gated_norm: bool = True
    inner_norms: bool = False


class NoMixer(msgspec.Struct, frozen=True):
    """A layer without token mixing (hybrids that list MLP-only layers)."""


Mixer = Attention | LatentAttention | LinearAttention | StateSpace | NoMixer


class DenseMLP(msgspec.Struct, frozen=True):
    """`gated`: down(act(gate(x)) * up(x)); otherwise down(act(up(x)))."""

    intermediate: int
    gated: bool = True
    bias: bool = False
    activation: Activation = "silu"


class MoE(msgspec.Struct, frozen=True):
    """`top_k` of `num_experts` experts of width `intermediate`, plus always-active shared experts of total width `shared_intermediate`."""

    num_experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int = 0
    shared_gate: bool = False
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    router_correction: bool = False
    normalize_top_k: bool = True
    scoring: Literal["softmax", "sigmoid", "softmax_after_top_k"] = "softmax"
    num_groups: int = 1
    top_k_groups: int = 1
    routed_scale: float = 1.0
    activation: Activation = "silu"


class NoMLP(msgspec.Struct, frozen=True):
    """A layer without a feed-forward part (pure Mamba blocks)."""


FeedForward = DenseMLP | MoE | NoMLP


class Layer(msgspec.Struct, frozen=True):
    """One block. `num_norms`: norm weight vectors of hidden_size in the block (2 usual, 4 with Gemma's post-norms).

    `parallel_ssm`: a state-space mixer that runs beside `mixer` on the same input (Falcon-H1).
    """

    mixer: Mixer
    mlp: FeedForward
    num_norms: int = 2
    parallel_ssm: StateSpace | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything about a model that does not depend on its weights' values.

    `model_type` is Hugging Face's; it selects the engine's model file. `norm_offset`: RMSNorm multiplies by (1 + w) (Gemma).
    `extra_parameters`: counted parameters outside the standard parts, by name (e.g. per-layer embeddings); a name that ends
    in `_embeddings` is a lookup table, the rest is multiplied by every token.
    `plain_precision`: what a quantized checkpoint stores the parts in that it leaves alone.
    `mtp_layers`: multi-token-prediction layers shipped in the checkpoint and needed only for speculation.
    """

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    tied_embeddings: bool
    max_context: int
    norm_eps: float = 1e-6
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_offset: bool = False
    norm_bias: bool = False
    final_norm: bool = True
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    lm_head_bias: bool = False
    learned_positions: int = 0
    mtp_layers: tuple[Layer, ...] = ()
    extra_parameters: tuple[tuple[str, int], ...] = ()
    checkpoint_precision: str = "bf16"
    unquantized_parts: tuple[str, ...] = ()
    plain_precision: str = "bf16"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.norm_eps < math.inf:
            raise InvalidInput(f"must not be negative or infinite, got {self.norm_eps}", field="norm_eps")

    @property
    def num_layers(self) -> int:
        return len(self.layers)
