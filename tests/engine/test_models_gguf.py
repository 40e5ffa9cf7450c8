"""The other architectures from GGUF: the same tiny models, converted as llama.cpp's converter does, against transformers."""

from __future__ import annotations

import random

import gguf
import numpy as np
import pytest
from test_models_logits import VOCAB, dense, random_schedule, reference, tiny_model
from torch_steps import Engine

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "llama-llama3": gguf.MODEL_ARCH.LLAMA,
    "llama-yarn": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe-normalized": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
}


def hf_tensors(folder) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """The converter's row order for llama: rotary pairs become neighbours."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, 2, rows // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def stacked_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of one projection in one tensor, under the name that the converter's map knows."""
    import re

    rest, experts = {}, {}
    for name, value in tensors.items():
        match = re.fullmatch(r"(model\.layers\.\d+)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)\.weight", name)
        if match:
            experts.setdefault((match[1], match[3]), {})[int(match[2])] = value
        else:
            rest[name] = value
    kinds = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for (layer, part), found in experts.items():
        rest[f"{layer}.mlp.experts.{kinds.get(part, part)}.weight"] = np.stack([found[e] for e in range(len(found))])
    return rest


def convert(folder, path, name: str, config) -> None:
    arch = ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(full["rope_theta"])
    tensors = stacked_experts(hf_tensors(folder))
    if full.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if full.get("rope_type") == "llama3":
        # The converter stores the divisors of the frequencies, computed by the formula of the Llama 3.1 report.
        base = 1.0 / full["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
        low = full["original_max_position_embeddings"] / full["low_freq_factor"]
        high = full["original_max_position_embeddings"] / full["high_freq_factor"]
        factors = []
        for wavelength in 2 * np.pi / base:
            if wavelength < high:
                factors.append(1.0)
            elif wavelength > low:
                factors.append(full["factor"])
            else:
                smooth = (full["original_max_position_embeddings"] / wavelength - full["low_freq_factor"]) / (
                    full["high_freq_factor"] - full["low_freq_factor"]
                )
                factors.append(1 / ((1 - smooth) / full["factor"] + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "sliding_window", None) and "gemma" in name:
        writer.add_sliding_window(config.sliding_window)
    if "gemma2" in name:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if "sliding_attention" in rope:
        writer.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for hf_name, value in tensors.items():
        new = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert new is not None, hf_name
        value = value.astype(np.float32)
        if arch == gguf.MODEL_ARCH.LLAMA and "q_proj" in hf_name:
            value = neighbours(value, heads)
        if arch == gguf.MODEL_ARCH.LLAMA and "k_proj" in hf_name:
            value = neighbours(value, kv_heads)
        if "gemma" in name and hf_name.endswith("norm.weight"):
            value = value + 1
        if config.tie_word_embeddings and new == "output.weight":
            continue
        writer.add_tensor(new, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Query scales that a GGUF file does not carry are 1/sqrt(head_dim) there.
CHANGES = {"gemma2": {"query_pre_attn_scalar": 16}, "gemma3": {"query_pre_attn_scalar": 16}}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gguf_distributions_equal_transformers(tmp_path, name):
    model, folder = tiny_model(tmp_path, name, **CHANGES.get(name, {}))
    convert(folder, tmp_path / "model.gguf", name, model.config)
    engine = Engine.of(str(tmp_path / "model.gguf"), threads=1)
    rng = random.Random(name)
    sequences = [
        engine.add([rng.randrange(VOCAB) for _ in range(n)], prompt_logprobs=VOCAB, logprobs=VOCAB)
        for n in (3, 18, 41, 60)
    ]
    random_schedule(engine, sequences, rng, new_tokens=8)
    for s in sequences:
        assert not s.errors
        ours = dense(s.prompt_logprobs + s.logprobs)
        np.testing.assert_allclose(ours, reference(model, s.tokens).numpy()[:-1], atol=1e-4, rtol=0)
    for item in engine.model.memory():
        assert item.predicted_bytes == item.actual_bytes
    engine.close()
