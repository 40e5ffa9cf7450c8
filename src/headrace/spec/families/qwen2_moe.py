"""Qwen1.5/Qwen2 mixture of experts: biased Q/K/V, a shared expert behind its own gate."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.qwen3_moe import sparse_layers
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    experts = p.moe(
        c,
        shared_intermediate=c.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        normalize_top_k=c.flag("norm_topk_prob", default=False),
    )
    size = p.window(c) if c.flag("use_sliding_window", default=False) else None
    first = c.integer("max_window_layers", default=28, minimum=0)
    feed_forwards = sparse_layers(c, experts)
    kinds = p.layer_types(
        c,
        len(feed_forwards),
        lambda i: p.SLIDING if size and i % 2 == 0 and i < first else p.FULL,
        (p.FULL, p.SLIDING),
    )
    bias = c.flag("qkv_bias", default=True)
    layers = [
        Layer(p.attention(c, window=size if kind == p.SLIDING else None, qkv_bias=bias), feed_forward)
        for kind, feed_forward in zip(kinds, feed_forwards, strict=True)
    ]
    return p.model(c, layers, tied=False)
