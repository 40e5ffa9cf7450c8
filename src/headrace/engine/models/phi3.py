"""Phi-3, Phi-3.5 and Phi-4-mini: projections are stored fused."""

from msgspec.structs import replace

from headrace.engine.weights.names import GGUF, HF, Architecture

MODEL = Architecture(
    hf=replace(HF, qkv="model.layers.{i}.self_attn.qkv_proj", gate_up="model.layers.{i}.mlp.gate_up_proj"),
    gguf=replace(GGUF, qkv="blk.{i}.attn_qkv", gate_up="blk.{i}.ffn_up"),
)
