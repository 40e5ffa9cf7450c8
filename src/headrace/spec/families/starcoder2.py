"""StarCoder2: GQA with a window, LayerNorm, ungated MLP, biases everywhere."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    bias = c.flag("use_bias", default=True)
    layer = Layer(
        p.attention(c, window=p.window(c), qkv_bias=bias, out_bias=bias),
        p.mlp(c, gated=False, bias=bias, act=p.activation(c, default="gelu_pytorch_tanh")),
    )
    return p.model(
        c,
        [layer] * p.num_layers(c),
        tied=True,
        norm_kind="layer",
        norm_bias=True,
        norm_eps=c.number("norm_epsilon", default=1e-5),
    )
