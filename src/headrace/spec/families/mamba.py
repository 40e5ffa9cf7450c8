"""Mamba: state-space layers only; the context is bounded by nothing but patience."""

from headrace.base.units import ceil_div
from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec, NoMLP, StateSpace

# There is no positional limit; this is what a request may ask for.
MAX_CONTEXT = 1 << 20


def build(c: Config) -> ModelSpec:
    layer = Layer(mamba1(c), NoMLP(), num_norms=1)
    return p.model(
        c,
        [layer] * p.num_layers(c),
        tied=True,
        max_context=MAX_CONTEXT,
        norm_eps=c.number("layer_norm_epsilon", default=1e-5),
    )


def mamba1(c: Config) -> StateSpace:
    hidden = p.hidden_size(c)
    automatic = c.get("time_step_rank") in (None, "auto")
    return StateSpace(
        1,
        int(c.number("expand", default=2.0) * hidden),
        c.integer("state_size"),
        c.integer("conv_kernel", default=4),
        dt_rank=ceil_div(hidden, 16) if automatic else c.integer("time_step_rank"),
        conv_bias=c.flag("use_conv_bias", default=True),
        proj_bias=c.flag("use_bias", default=False),
        gated_norm=False,
    )
