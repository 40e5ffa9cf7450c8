"""Parameter counts equal those of transformers' own models, built on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.spec import accounting
from headrace.spec.hf import spec_from_hf
from headrace.spec.tensors import weights

SMALL: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 8,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4, "head_dim": 16,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 16, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2,
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied-biased": {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"model_type": "llama", "head_dim": 24},
    "mistral": {"model_type": "mistral", "sliding_window": 64},
    "ministral": {"model_type": "ministral", "head_dim": 8, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "ministral3": {"model_type": "ministral3", "head_dim": 16},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_moe": {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 80},
    "qwen2_moe-mixed": {
        "model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 80, "decoder_sparse_step": 2,
        "mlp_only_layers": [3], "qkv_bias": False,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "head_dim": 16},
    "qwen3_next": {"model_type": "qwen3_next", **EXPERTS, **DELTA, "shared_expert_intermediate_size": 80},
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **EXPERTS, **DELTA, "shared_expert_intermediate_size": 80},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma2": {"model_type": "gemma2", "head_dim": 16},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 7},
    "gemma3n": {
        "model_type": "gemma3n_text", "head_dim": 16, "num_hidden_layers": 10, "num_kv_shared_layers": 4,
        "vocab_size_per_layer_input": 990, "hidden_size_per_layer_input": 12, "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 10,
    },
    "phi": {"model_type": "phi", "num_key_value_heads": 8},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "phimoe": {"model_type": "phimoe", "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v2": {"model_type": "deepseek_v2", **ROUTED, **LATENT, "topk_method": "greedy"},
    "deepseek_v2-lite": {"model_type": "deepseek_v2", **ROUTED, **LATENT, "q_lora_rank": None},
    "deepseek_v3": {"model_type": "deepseek_v3", **ROUTED, **LATENT},
    "deepseek_v32": {
        "model_type": "deepseek_v32", **ROUTED, **LATENT, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8,
    },
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa", **ROUTED, **LATENT, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8,
        "index_topk_freq": 2, "num_hidden_layers": 5,
    },
    "gemma4": {
        "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 24, "num_hidden_layers": 12, "sliding_window": 64,
        "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 990, "num_kv_shared_layers": 5,
        "use_double_wide_mlp": True,
    },
    "gemma4-moe": {
        "model_type": "gemma4_text", **EXPERTS, "top_k_experts": 2, "enable_moe_block": True, "head_dim": 16,
        "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_hidden_layers": 7,
        "hidden_size_per_layer_input": 0,
    },
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **ROUTED, **LATENT},
    "minicpm3": {"model_type": "minicpm3", **LATENT},
    "kimi_linear": {
        "model_type": "kimi_linear", "pad_token_id": 0, **LATENT, "q_lora_rank": None, "moe_intermediate_size": 48, "num_experts": 8,
        "num_experts_per_token": 2, "num_shared_experts": 1, "num_expert_group": 1, "model_max_length": 256,
        "num_hidden_layers": 5, "first_k_dense_replace": 1,
        "linear_attn_config": {
            "head_dim": 12, "num_heads": 4, "short_conv_kernel_size": 4, "full_attn_layers": [4],
            "kda_layers": [1, 2, 3, 5],
        },
    },
    "glm": {"model_type": "glm", "head_dim": 16, "pad_token_id": 0},
    "glm4": {"model_type": "glm4", "head_dim": 16, "pad_token_id": 0},
    "glm4_moe": {"model_type": "glm4_moe", **ROUTED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    "dots1": {"model_type": "dots1", **ROUTED, "head_dim": 16},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 1000},
    "gpt_bigcode": {
        "model_type": "gpt_bigcode", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 1000,
    },
    "gpt_neox": {"model_type": "gpt_neox"},
    "opt": {"model_type": "opt", "ffn_dim": 200, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    "falcon-7b": {"model_type": "falcon", "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
    "falcon-40b": {"model_type": "falcon", "num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon-rw": {"model_type": "falcon", "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
    "starcoder2": {"model_type": "starcoder2"},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True},
    "stablelm-12b": {"model_type": "stablelm", "qk_layernorm": True, "use_parallel_residual": True},
    "olmo": {"model_type": "olmo"},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3"},
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2},
    "cohere": {"model_type": "cohere", "use_qk_norm": True},
    "cohere2": {"model_type": "cohere2"},
    "granite": {"model_type": "granite", "attention_multiplier": 0.1, "logits_scaling": 8.0},
    "granitemoe": {"model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        "model_type": "granitemoehybrid", **MAMBA2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 96, "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "tie_word_embeddings": True,
    },
    "granitemoehybrid-dense": {
        "model_type": "granitemoehybrid", **MAMBA2, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 96, "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "position_embedding_type": "rope",
    },
    "llama4": {
        "model_type": "llama4_text", "head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 200,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 32,
    },
    "mamba": {"model_type": "mamba", "state_size": 16},
    "mamba-untied": {"model_type": "mamba", "state_size": 16, "tie_word_embeddings": False, "use_bias": True},
    "falcon_mamba": {"model_type": "falcon_mamba", "state_size": 16},
    "mamba2": {"model_type": "mamba2", "num_heads": 16, "head_dim": 8, "n_groups": 2, "state_size": 16},
    "jamba": {
        "model_type": "jamba", "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 4, "attn_layer_offset": 2,
        "mamba_d_state": 8,
    },
    "falcon_h1": {
        "model_type": "falcon_h1", **MAMBA2, "mamba_d_ssm": 128, "mamba_rms_norm": True, "attention_bias": True,
    },
    "falcon_h1-plain": {"model_type": "falcon_h1", **MAMBA2, "mamba_d_ssm": 128, "head_dim": 16},
    "nemotron": {"model_type": "nemotron"},
    "nemotron_h": {
        "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-E", "num_hidden_layers": 6, "mamba_num_heads": 16,
        "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "head_dim": 16, **ROUTED,
        "moe_shared_expert_intermediate_size": 40, "n_shared_experts": 1,
    },
    "bamba": {"model_type": "bamba", **MAMBA2, "attn_layer_indices": [1, 3]},
    "minimax": {"model_type": "minimax", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "minimax_m2": {"model_type": "minimax_m2", "num_local_experts": 4, "head_dim": 16, "num_experts_per_tok": 2},
    "smollm3": {"model_type": "smollm3", "pad_token_id": 0},
    "arcee": {"model_type": "arcee"},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16},
    "internlm3": {"model_type": "internlm3", "head_dim": 16},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16},
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48,
        "moe_num_shared_experts": 2,
    },
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", "head_dim": 16},
    "exaone4": {"model_type": "exaone4", "sliding_window": 64},
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash", "num_hidden_layers": 7, "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    },
}  # fmt: skip

_GPT2 = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# Keys of SMALL that configs of these types do not have.
FOREIGN: dict[str, tuple[str, ...]] = {
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": ("num_key_value_heads",),
    "opt": ("num_key_value_heads", "intermediate_size"),
    "falcon": ("num_key_value_heads", "intermediate_size"),
    "mamba": ("intermediate_size",),
    "falcon_mamba": ("intermediate_size",),
    "mamba2": ("intermediate_size",),
}


def config_of(case: str) -> dict[str, Any]:
    merged = {**SMALL, **CASES[case]}
    for key in FOREIGN.get(str(merged["model_type"]), ()):
        del merged[key]
    return merged


def built(case: str, device: str) -> Any:
    """transformers' model of the case; on the meta device it is shapes without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(config_of(case))
    kind = config.pop("model_type")
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval()


def built_on_cpu(case: str) -> Any:
    return built(case, "cpu")


@pytest.mark.parametrize("case", CASES)
def test_parameter_count_equals_transformers(case: str) -> None:
    model = built(case, "meta")
    expected = sum(p.numel() for p in model.parameters())
    # The correction bias of DeepSeek's router is a buffer there, but it is stored and loaded like a weight.
    expected += sum(b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    spec = spec_from_hf(config_of(case))
    assert accounting.parameters(spec).total == expected


@pytest.mark.parametrize("case", CASES)
def test_parts_add_up_and_active_is_total_without_experts(case: str) -> None:
    spec = spec_from_hf(config_of(case))
    counted = accounting.parameters(spec)
    assert sum(n for part, n in counted.by_part.items() if part != "mtp") == counted.total
    experts = [w for w in weights(spec) if w.copies > 1]
    idle = sum(w.elements - w.active_elements for w in experts)
    assert counted.active == counted.total - idle
    assert (counted.active < counted.total) == bool(experts)
