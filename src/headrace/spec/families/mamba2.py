"""Mamba-2: state-space layers with heads and a gated norm."""

from headrace.base.errors import InvalidInput
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.families.mamba import MAX_CONTEXT
from headrace.spec.model import Layer, ModelSpec, NoMLP, StateSpace


def build(c: Config) -> ModelSpec:
    hidden = p.hidden_size(c)
    inner = int(c.number("expand", default=2.0) * hidden)
    heads, head_dim = c.integer("num_heads"), c.integer("head_dim")
    if heads * head_dim != inner:
        raise InvalidInput(
            f"num_heads {heads} x head_dim {head_dim} is not expand x hidden_size {inner}", field="num_heads"
        )
    mixer = StateSpace(
        2,
        inner,
        c.integer("state_size"),
        c.integer("conv_kernel", default=4),
        num_heads=heads,
        head_dim=head_dim,
        groups=c.integer("n_groups", default=8),
        conv_bias=c.flag("use_conv_bias", default=True),
        proj_bias=c.flag("use_bias", default=False),
    )
    return p.model(
        c,
        [Layer(mixer, NoMLP(), num_norms=1)] * p.num_layers(c),
        tied=False,
        max_context=MAX_CONTEXT,
        norm_eps=c.number("layer_norm_epsilon", default=1e-5),
    )
