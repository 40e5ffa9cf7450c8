"""dots.llm1: GQA with a norm on each head, DeepSeek-V3's router."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.deepseek_v3 import routed_experts
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    count = p.num_layers(c)
    size = p.window(c)
    first = c.integer("max_window_layers", default=count, minimum=0)
    kinds = p.layer_types(c, count, lambda i: p.SLIDING if size and i >= first else p.FULL, (p.FULL, p.SLIDING))
    bias = c.flag("attention_bias", default=False)
    experts = routed_experts(c)
    dense_first = c.integer("first_k_dense_replace", default=0, minimum=0)
    layers = [
        Layer(
            p.attention(c, window=size if kind == p.SLIDING else None, qkv_bias=bias, out_bias=bias, qk_norm="head"),
            p.mlp(c) if i < dense_first else experts,
        )
        for i, kind in enumerate(kinds)
    ]
    return p.model(c, layers, tied=False)
