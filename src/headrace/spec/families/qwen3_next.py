"""Qwen3-Next: three gated-delta layers to one gated full-attention layer, many small experts and a shared one."""

from collections.abc import Sequence

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.qwen3_moe import sparse_layers
from headrace.spec.model import FeedForward, Layer, LinearAttention, ModelSpec, MoE


def build(c: Config) -> ModelSpec:
    experts = shared_expert_moe(c)
    return hybrid(c, sparse_layers(c, experts), mtp_feed_forward=experts)


def shared_expert_moe(c: Config) -> MoE:
    return p.moe(
        c,
        shared_intermediate=c.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        normalize_top_k=c.flag("norm_topk_prob", default=True),
    )


def hybrid(c: Config, feed_forwards: Sequence[FeedForward], *, mtp_feed_forward: FeedForward) -> ModelSpec:
    """Gated delta nets with a gated full-attention layer every `full_attention_interval`; MTP layers are full ones."""
    kinds = p.layer_types(
        c,
        len(feed_forwards),
        p.every(c.integer("full_attention_interval", default=4), other=p.LINEAR),
        (p.FULL, p.LINEAR),
    )
    bias = c.flag("attention_bias", default=False)
    full = p.attention(c, qkv_bias=bias, out_bias=bias, qk_norm="head", partial=0.25, output_gate=True)
    delta = LinearAttention(
        c.integer("linear_num_key_heads"),
        c.integer("linear_num_value_heads"),
        c.integer("linear_key_head_dim"),
        c.integer("linear_value_head_dim"),
        c.integer("linear_conv_kernel_dim", default=4),
    )
    extra = c.integer("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0, minimum=0)
    return p.model(
        c,
        [
            Layer(full if kind == p.FULL else delta, feed_forward)
            for kind, feed_forward in zip(kinds, feed_forwards, strict=True)
        ],
        tied=False,
        norm_offset=True,
        mtp_layers=(Layer(full, mtp_feed_forward),) * extra,
    )
