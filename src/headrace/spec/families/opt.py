"""OPT: learned positions (offset by two), LayerNorm, ReLU, biases, tied."""

from headrace.base.errors import UnsupportedModel
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    hidden = p.hidden_size(c)
    if c.integer("word_embed_proj_dim", default=hidden) != hidden:
        raise UnsupportedModel("embeddings narrower than the model are not supported", field="word_embed_proj_dim")
    bias = c.flag("enable_bias", default=True)
    before = c.flag("do_layer_norm_before", default=True)
    layer = Layer(
        p.attention(c, qkv_bias=bias, out_bias=bias, rotary=False),
        p.mlp(
            c,
            gated=False,
            bias=bias,
            width=c.integer("ffn_dim"),
            act=p.activation(c, "activation_function", default="relu"),
        ),
    )
    return p.model(
        c,
        [layer] * p.num_layers(c),
        tied=True,
        norm_kind="layer",
        norm_bias=True,
        norm_eps=1e-5,
        final_norm=before and not c.flag("_remove_final_layer_norm", default=False),
        learned_positions=c.integer("max_position_embeddings") + 2,
    )
