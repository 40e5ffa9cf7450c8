"""ERNIE 4.5 mixture of experts: a router corrected by a learned bias, shared experts, dense first layers."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec, MoE


def build(c: Config) -> ModelSpec:
    bias = c.flag("use_bias", default=False)
    count = p.num_layers(c)
    attention = p.attention(c, qkv_bias=bias, out_bias=bias, theta=5e5, interleaved=True)
    width = c.integer("moe_intermediate_size")
    experts = MoE(
        c.integer("moe_num_experts", "num_experts"),
        c.integer("moe_k", "num_experts_per_tok"),
        width,
        shared_intermediate=width * c.integer("moe_num_shared_experts", default=0, minimum=0),
        router_correction=True,
        activation=p.activation(c),
    )
    first = c.integer("moe_layer_start_index", default=1, minimum=0)
    last = c.integer("moe_layer_end_index", default=-1, minimum=-1)
    step = c.integer("moe_layer_interval", default=1)
    last = count - 1 if last == -1 else last
    layers = [
        Layer(attention, experts if (i + 1) % step == 0 and first <= i <= last else p.mlp(c, bias=bias))
        for i in range(count)
    ]
    return p.model(c, layers, tied=True, norm_eps=c.number("rms_norm_eps", default=1e-5))
