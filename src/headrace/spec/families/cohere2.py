"""Command R7B and A: Command R with three sliding rope layers to one full layer without rope."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    step = c.integer("sliding_window_pattern", "_sliding_window_pattern", default=4)
    kinds = p.layer_types(c, p.num_layers(c), p.every(step), (p.FULL, p.SLIDING))
    bias = c.flag("attention_bias", default=False)
    size = p.window(c, default=4096)
    by_kind = {
        kind: p.attention(
            c,
            window=size if kind == p.SLIDING else None,
            qkv_bias=bias,
            out_bias=bias,
            rotary=kind == p.SLIDING,
            interleaved=True,
        )
        for kind in (p.FULL, p.SLIDING)
    }
    return p.model(
        c,
        [Layer(by_kind[kind], p.mlp(c), num_norms=1) for kind in kinds],
        tied=True,
        norm_kind="layer",
        norm_eps=c.number("layer_norm_eps", default=1e-5),
        logit_scale=c.number("logit_scale", default=0.0625),
    )
