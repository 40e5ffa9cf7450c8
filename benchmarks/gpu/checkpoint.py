"""Write a random bf16 checkpoint, N(0, 0.02), of a known shape: `checkpoint.py FOLDER [mistral-7b | qwen3-0.6b | qwen3-8-layers]`.

Zeros or tiny values would change the card's clock, so the values are drawn like a fresh model's; needs a GPU to be quick.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

SHAPES = {
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 32000, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "sliding_window": None, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "attention_bias": False, "tie_word_embeddings": True,
    },
}  # fmt: skip
SHAPES["qwen3-8-layers"] = SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 8}  # for many short steps
COMMON = {
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "torch_dtype": "bfloat16",
    "use_cache": True, "attention_dropout": 0.0,
}  # fmt: skip


def main(folder: str, shape: str) -> None:
    root, c = Path(folder), SHAPES[shape]
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(COMMON | c))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}

    def random(*size: int) -> torch.Tensor:
        return torch.empty(*size, device=device, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator).cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def shard(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, root / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    h, i, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    ends = {"model.embed_tokens.weight": random(c["vocab_size"], h), "model.norm.weight": ones(h)}
    if not c["tie_word_embeddings"]:
        ends["lm_head.weight"] = random(c["vocab_size"], h)
    shard("model-ends.safetensors", ends)
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        parts = {
            "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q), "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h), "mlp.down_proj": (h, i),
        }  # fmt: skip
        tensors = {f"{p}{name}.weight": random(*size) for name, size in parts.items()}
        tensors |= {f"{p}input_layernorm.weight": ones(h), f"{p}post_attention_layernorm.weight": ones(h)}
        if c["model_type"] == "qwen3":
            tensors |= {f"{p}self_attn.q_norm.weight": ones(d), f"{p}self_attn.k_norm.weight": ones(d)}
        shard(f"model-{n:02d}.safetensors", tensors)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "mistral-7b")
