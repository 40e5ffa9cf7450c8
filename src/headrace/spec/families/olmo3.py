"""OLMo 3: OLMo 2 with three sliding layers to one full; rope scaling is for the full ones."""

from msgspec.structs import replace

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    kinds = p.layer_types(c, p.num_layers(c), p.every(4), (p.FULL, p.SLIDING))
    bias = c.flag("attention_bias", default=False)
    size = p.window(c, default=4096)
    layers = []
    for kind in kinds:
        local = kind == p.SLIDING
        attention = p.attention(
            c, window=size if local else None, qkv_bias=bias, out_bias=bias, qk_norm="full", rotary=False
        )
        rope = p.rope(c, attention.head_dim, layer_type=kind, theta=5e5, scaled=not local)
        layers.append(Layer(replace(attention, rope=rope), p.mlp(c)))
    return p.model(c, layers, tied=False, norm_eps=c.number("rms_norm_eps", default=1e-5))
