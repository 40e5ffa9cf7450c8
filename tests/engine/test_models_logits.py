"""Each architecture's distribution at every position equals transformers' on tiny random weights, through the paged
executor, with chunked prefill and decode mixed in the same steps."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import transformers
from torch_steps import Engine

TOLERANCE = 1e-4
VOCAB = 160

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 256,
}

CASES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied-biased": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "mistral-window": ("MistralConfig", {"sliding_window": 12}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 12, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 12, "query_pre_attn_scalar": 24, "num_hidden_layers": 7, "sliding_window_pattern": 6},
    ),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3-longrope-partial": (
        "Phi3Config",
        {
            "head_dim": 32,
            "hidden_size": 128,
            "sliding_window": None,
            "original_max_position_embeddings": 256,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_moe-normalized": (
        "Qwen3MoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
}


def tiny_model(tmp_path, name: str, shard: str = "5GB", **changes):
    """A random model of the case, saved as a checkpoint; biases and norms are made to matter."""
    config_class, fields = CASES[name]
    config = getattr(transformers, config_class)(**SIZES | fields | changes, attn_implementation="eager")
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() == 1 else 0.12
            parameter.add_(torch.randn_like(parameter) * spread)
    folder = tmp_path / name
    model.save_pretrained(folder, max_shard_size=shard)
    return model, folder


def reference(model, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def dense(entries) -> np.ndarray:
    """Full distributions [positions, vocab] from entries that list every token."""
    out = np.full((len(entries), VOCAB), np.nan)
    for row, entry in enumerate(entries):
        out[row, list(entry.top_ids)] = entry.top_logprobs
    return out


def random_schedule(engine: Engine, sequences, rng: random.Random, new_tokens: int) -> None:
    """Advance random subsets by random amounts, so that steps mix fresh, continued and decoding sequences."""
    while any(len(s.generated) < new_tokens for s in sequences):
        live = [s for s in sequences if len(s.generated) < new_tokens]
        chosen = rng.sample(live, rng.randint(1, len(live)))
        engine.step([(s, min(s.known - s.computed, rng.choice((1, 3, 7, 16, 60)))) for s in chosen])


@pytest.mark.parametrize("name", CASES)
def test_distributions_equal_transformers(tmp_path, name):
    model, folder = tiny_model(tmp_path, name)
    engine = Engine.of(str(folder), threads=1)
    try:
        rng = random.Random(name)
        sequences = [
            engine.add([rng.randrange(VOCAB) for _ in range(n)], prompt_logprobs=VOCAB, logprobs=VOCAB)
            for n in (1, 2, 9, 16, 33, 50, 51, 70)
        ]
        random_schedule(engine, sequences, rng, new_tokens=12)
        for s in sequences:
            assert not s.errors
            expected = reference(model, s.tokens).numpy()
            ours = dense(s.prompt_logprobs + s.logprobs)
            assert len(ours) == len(s.tokens) - 1
            np.testing.assert_allclose(ours, expected[:-1], atol=TOLERANCE, rtol=0)
            prompt = len(s.prompt)
            assert s.generated == np.argmax(dense(s.logprobs), -1).tolist()
            assert [e.token_id for e in s.prompt_logprobs] == s.prompt[1:]
            assert len(s.prompt_logprobs) == prompt - 1
    finally:
        engine.close()
