"""Mixtral: sparse experts, stored one by one; GGUF files call it llama and stack them."""

from msgspec.structs import replace

from headrace.engine.weights.names import GGUF, HF, Architecture

MODEL = Architecture(
    hf=replace(
        HF,
        router="model.layers.{i}.block_sparse_moe.gate",
        expert_gate="model.layers.{i}.block_sparse_moe.experts.{e}.w1",
        expert_up="model.layers.{i}.block_sparse_moe.experts.{e}.w3",
        expert_down="model.layers.{i}.block_sparse_moe.experts.{e}.w2",
    ),
    gguf=GGUF,
)
