"""Qwen3 dense: no biases, RMSNorm on each query and key head."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.qwen2 import qwen_windows
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    return p.model(
        c,
        [
            Layer(p.attention(c, window=w, qkv_bias=bias, out_bias=bias, qk_norm="head"), p.mlp(c))
            for w in qwen_windows(c)
        ],
        tied=False,
    )
