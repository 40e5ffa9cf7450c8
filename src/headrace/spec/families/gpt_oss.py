"""gpt-oss: alternating windows, attention sinks, biases everywhere, experts with clamped SwiGLU."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec

_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def build(c: Config) -> ModelSpec:
    if c.get("rope_parameters", "rope_scaling") is None:
        c = c.with_defaults({"rope_scaling": _YARN})
    kinds = p.layer_types(c, p.num_layers(c), lambda i: p.FULL if i % 2 else p.SLIDING, (p.FULL, p.SLIDING))
    bias = c.flag("attention_bias", default=True)
    experts = p.moe(
        c,
        bias=True,
        router_bias=True,
        scoring="softmax_after_top_k",
        activation="clamped_swiglu",
    )
    size = p.window(c, default=128)
    layers = [
        Layer(
            p.attention(
                c,
                window=size if kind == p.SLIDING else None,
                qkv_bias=bias,
                out_bias=bias,
                sinks=True,
                theta=150_000.0,
            ),
            experts,
        )
        for kind in kinds
    ]
    return p.model(c, layers, tied=False, norm_eps=c.number("rms_norm_eps", default=1e-5))
