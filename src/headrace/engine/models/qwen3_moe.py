"""Qwen3 mixture of experts."""

from msgspec.structs import replace

from headrace.engine.weights.names import GGUF, HF_HEAD_NORMS, Architecture

MODEL = Architecture(
    hf=replace(
        HF_HEAD_NORMS,
        router="model.layers.{i}.mlp.gate",
        expert_gate="model.layers.{i}.mlp.experts.{e}.gate_proj",
        expert_up="model.layers.{i}.mlp.experts.{e}.up_proj",
        expert_down="model.layers.{i}.mlp.experts.{e}.down_proj",
    ),
    gguf=GGUF,
)
