"""Gemma 2: a norm before and after attention and MLP, capped logits."""

from msgspec.structs import replace

from headrace.engine.weights.names import GGUF, HF, Architecture

MODEL = Architecture(
    hf=replace(
        HF,
        post_attn_norm="model.layers.{i}.post_attention_layernorm",
        mlp_norm="model.layers.{i}.pre_feedforward_layernorm",
        post_mlp_norm="model.layers.{i}.post_feedforward_layernorm",
    ),
    gguf=GGUF,
)
