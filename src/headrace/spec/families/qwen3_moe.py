"""Qwen3 mixture of experts: attention of Qwen3, experts on every `decoder_sparse_step`-th layer."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import DenseMLP, Layer, ModelSpec, MoE


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    window = p.window(c) if c.flag("use_sliding_window", default=False) else None
    attention = p.attention(c, window=window, qkv_bias=bias, out_bias=bias, qk_norm="head")
    experts = p.moe(c, normalize_top_k=c.flag("norm_topk_prob", default=False))
    return p.model(c, [Layer(attention, f) for f in sparse_layers(c, experts)], tied=False)


def sparse_layers(c: Config, experts: MoE) -> list[DenseMLP | MoE]:
    """Which layers are sparse: `mlp_only_layers` never, of the others every `decoder_sparse_step`-th."""
    dense_only = set(c.integers("mlp_only_layers") or ())
    step = c.integer("decoder_sparse_step", default=1)
    return [p.mlp(c) if i in dense_only or (i + 1) % step else experts for i in range(p.num_layers(c))]
