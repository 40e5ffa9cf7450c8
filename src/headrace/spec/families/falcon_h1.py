"""Falcon-H1: attention and Mamba-2 side by side in every layer."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.bamba import mamba2
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    layer = Layer(
        p.attention(c, qkv_bias=bias, out_bias=bias),
        p.mlp(c, bias=c.flag("mlp_bias", default=False)),
        parallel_ssm=mamba2(
            c,
            inner=c.integer("mamba_d_ssm", default=None),
            gated_norm=c.flag("mamba_rms_norm", default=False),
        ),
    )
    return p.model(
        c,
        [layer] * p.num_layers(c),
        tied=False,
        norm_eps=c.number("rms_norm_eps", default=1e-5),
        embedding_scale=c.number("embedding_multiplier", default=1.0),
        logit_scale=c.number("lm_head_multiplier", default=1.0),
    )
