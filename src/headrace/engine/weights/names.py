"""What checkpoints call the tensors of a decoder: one `Names` per format and architecture, used by `engine.models`."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace


class Names(msgspec.Struct, frozen=True):
    """Name patterns without the `.weight`/`.bias` ending; `{i}` is the layer, `{e}` the expert.

    A field that an architecture does not have is None. Where `qkv` or `gate_up` is set, the projections are stored fused, in
    that order. Experts are stored one by one (`{e}` in the pattern) or stacked in one tensor [experts, out, in].
    """

    embedding: str
    final_norm: str
    head: str
    attn_norm: str
    mlp_norm: str
    q: str
    k: str
    v: str
    o: str
    gate: str
    up: str
    down: str
    qkv: str | None = None
    gate_up: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    post_attn_norm: str | None = None
    post_mlp_norm: str | None = None
    router: str | None = None
    expert_gate: str | None = None
    expert_up: str | None = None
    expert_down: str | None = None


class Architecture(msgspec.Struct, frozen=True):
    """One `model_type`: its names in a Hugging Face checkpoint and in GGUF."""

    hf: Names
    gguf: Names


HF = Names(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attn_norm="model.layers.{i}.input_layernorm",
    mlp_norm="model.layers.{i}.post_attention_layernorm",
    q="model.layers.{i}.self_attn.q_proj",
    k="model.layers.{i}.self_attn.k_proj",
    v="model.layers.{i}.self_attn.v_proj",
    o="model.layers.{i}.self_attn.o_proj",
    gate="model.layers.{i}.mlp.gate_proj",
    up="model.layers.{i}.mlp.up_proj",
    down="model.layers.{i}.mlp.down_proj",
)

HF_HEAD_NORMS = replace(HF, q_norm="model.layers.{i}.self_attn.q_norm", k_norm="model.layers.{i}.self_attn.k_norm")

GGUF = Names(
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    attn_norm="blk.{i}.attn_norm",
    mlp_norm="blk.{i}.ffn_norm",
    q="blk.{i}.attn_q",
    k="blk.{i}.attn_k",
    v="blk.{i}.attn_v",
    o="blk.{i}.attn_output",
    gate="blk.{i}.ffn_gate",
    up="blk.{i}.ffn_up",
    down="blk.{i}.ffn_down",
    q_norm="blk.{i}.attn_q_norm",
    k_norm="blk.{i}.attn_k_norm",
    post_attn_norm="blk.{i}.post_attention_norm",
    post_mlp_norm="blk.{i}.post_ffw_norm",
    router="blk.{i}.ffn_gate_inp",
    expert_gate="blk.{i}.ffn_gate_exps",
    expert_up="blk.{i}.ffn_up_exps",
    expert_down="blk.{i}.ffn_down_exps",
)
