"""Command R: parallel block under one LayerNorm without bias, interleaved rope, scaled logits, tied."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    attention = p.attention(
        c,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="full" if c.flag("use_qk_norm", default=False) else "none",
        theta=5e5,
        interleaved=True,
    )
    return p.model(
        c,
        [Layer(attention, p.mlp(c), num_norms=1)] * p.num_layers(c),
        tied=True,
        norm_kind="layer",
        norm_eps=c.number("layer_norm_eps", default=1e-5),
        logit_scale=c.number("logit_scale", default=0.0625),
    )
