"""Granite: Llama's block with four multipliers."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("attention_bias", default=False)
    attention = p.attention(c, qkv_bias=bias, out_bias=bias, scale=c.number("attention_multiplier", default=1.0))
    layer = Layer(attention, p.mlp(c, bias=c.flag("mlp_bias", default=False)))
    return p.model(c, [layer] * p.num_layers(c), tied=False, **multipliers(c))


def multipliers(c: Config) -> dict[str, float]:
    """Granite's scales of embeddings, residuals and logits."""
    return {
        "embedding_scale": c.number("embedding_multiplier", default=1.0),
        "residual_scale": c.number("residual_multiplier", default=1.0),
        "logit_scale": 1.0 / c.number("logits_scaling", default=1.0),
    }
