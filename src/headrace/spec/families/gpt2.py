"""GPT-2: learned positions, LayerNorm, biases everywhere, tied."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    hidden = p.hidden_size(c)
    width = c.integer("n_inner", default=4 * hidden)
    act = p.activation(c, "activation_function", default="gelu_new")
    layer = Layer(
        p.attention(c, qkv_bias=True, out_bias=True, rotary=False),
        p.mlp(c, gated=False, bias=True, width=width, act=act),
    )
    return p.model(
        c,
        [layer] * p.num_layers(c),
        tied=True,
        norm_kind="layer",
        norm_bias=True,
        norm_eps=c.number("layer_norm_epsilon", default=1e-5),
        learned_positions=c.integer("n_positions", "n_ctx", "max_position_embeddings"),
    )
