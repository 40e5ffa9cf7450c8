"""EXAONE 4: norms after each part, a norm on each head, sliding layers; global layers without rope in hybrids."""

from headrace.spec.families import _parts as p
from headrace.spec.families._config import Config
from headrace.spec.model import Layer, ModelSpec


def build(c: Config) -> ModelSpec:
    count = p.num_layers(c)
    size = p.window(c)
    pattern = c.get("sliding_window_pattern")
    if isinstance(pattern, str):  # the 32B release writes "LLLG"
        step = len(pattern)
    else:
        step = c.integer("sliding_window_pattern", default=4, minimum=0)
    hybrid = size is not None and step > 0
    kinds = p.layer_types(c, count, p.every(step) if hybrid else p.FULL, (p.FULL, p.SLIDING))
    layers = [
        Layer(
            p.attention(
                c,
                window=size if kind == p.SLIDING else None,
                qk_norm="head",
                rotary=size is None or kind == p.SLIDING,
            ),
            p.mlp(c),
        )
        for kind in kinds
    ]
    return p.model(c, layers, tied=False, norm_eps=c.number("rms_norm_eps", default=1e-5))
