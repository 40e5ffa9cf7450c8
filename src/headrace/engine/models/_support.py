"""Whether the torch executor computes a geometry; torch-free, so that it can be asked before anything is loaded."""

from __future__ import annotations

from headrace.engine.models import MODELS
from headrace.spec.model import Attention, DenseMLP, Layer, ModelSpec, MoE

_ROPE_SCALINGS = ("none", "linear", "llama3", "yarn", "longrope")


def unsupported(spec: ModelSpec) -> str | None:
    """None if every part of `spec` is computed, else the first that is not, in one line."""
    if spec.model_type.replace("_", "-") not in MODELS.names():
        return f"model_type {spec.model_type} is not computed here, only {', '.join(sorted(MODELS.names()))}"
    reasons = (
        (spec.norm_kind != "rms" or spec.norm_bias, "layer norms with a mean or a bias"),
        (not spec.final_norm, "a missing final norm"),
        (bool(spec.learned_positions), "learned position embeddings"),
        (spec.lm_head_bias, "a bias on the output head"),
        (bool(spec.extra_parameters), f"extra parameters {[name for name, _ in spec.extra_parameters]}"),
    )
    for present, what in reasons:
        if present:
            return f"{what} are not supported"
    for i, layer in enumerate(spec.layers):
        if what := _layer(layer):
            return f"layer {i}: {what} not supported"
    return None


def _layer(layer: Layer) -> str | None:
    a, mlp = layer.mixer, layer.mlp
    if not isinstance(a, Attention):
        return f"mixer {type(a).__name__} is"
    if layer.parallel_ssm is not None:
        return "a parallel state-space mixer is"
    if layer.num_norms not in (2, 4):
        return f"{layer.num_norms} norms are"
    if a.chunked or a.kv_source is not None or a.output_gate or a.sinks or a.qk_norm == "full":
        return "chunked windows, shared keys, output gates, sinks and whole-vector head norms are"
    if a.value_dim != a.head_dim:
        return f"values of {a.value_dim} beside keys of {a.head_dim} are"
    if a.rope is not None and a.rope.scaling.kind not in _ROPE_SCALINGS:
        return f"rope scaling {a.rope.scaling.kind} is"
    if isinstance(mlp, MoE):
        return _moe(mlp)
    return None if isinstance(mlp, DenseMLP) else f"feed-forward {type(mlp).__name__} is"


def _moe(moe: MoE) -> str | None:
    if moe.bias or moe.router_bias or moe.router_correction or moe.shared_intermediate or not moe.gated:
        return "experts with biases, router correction or shared experts are"
    if moe.num_groups != 1:
        return "experts in groups are"
    if moe.scoring not in ("softmax", "softmax_after_top_k"):
        return f"expert scoring {moe.scoring} is"
    return None
