"""Captured steps whose prompt chunk follows a long context: equal to the same step launched kernel by kernel and to the plain
attention kernel. Nothing but a Hopper card runs the kernel that they take, so that elsewhere a formula stands in for it."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import kernel_device
import numpy as np
import pytest
import torch
from test_models_logits import VOCAB, dense, reference, tiny_model
from torch_steps import Engine

from headrace.engine.cuda import runner
from headrace.engine.executors.cuda import BACKEND
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

HOPPER = kernel_device.ON_GPU and torch.cuda.get_device_capability()[0] == 9
SHAPE = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCAB,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": None, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def run(folder, kv: str, graphs: str) -> tuple[list[np.ndarray], list[tuple]]:
    """Distributions after each prompt's last token and of the streams beside them, and the graphs that mixed steps took."""
    config = EngineConfig(
        model=str(folder), backend="cuda", device="cuda", weights="bf16", kv=kv, load_format="dummy",
        options=(("graphs", graphs),),
    )  # fmt: skip
    model = BACKEND.load(locate(str(folder)), config)
    runs = Engine(model, num_blocks=400, block_tokens=16, max_num_seqs=16, max_model_len=4096)
    taken, steps = [], runs.executor.runner
    replay = steps.graphs.replay
    steps.graphs.replay = lambda key: taken.append(key) or replay(key)
    rng = random.Random(5)

    def ids(n: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(n)]

    # The streams' next tokens are known, so that near-ties cannot part them.
    streams = [runs.add(ids(11 + i), logprobs=VOCAB) for i in range(9)]
    long, second = runs.add(ids(2600), logprobs=VOCAB), runs.add(ids(30), logprobs=VOCAB)
    runs.step([(s, len(s.prompt) - 4) for s in streams])
    # Odd starts and lengths; two parts of the cached keys, then one, beside a prompt that has none.
    runs.step([(long, 900)])
    runs.step([*((s, 1) for s in streams), (long, 237)])
    runs.step([(long, 1000)])
    for work in ([(long, 256)], [(long, 207), (second, 30)]):
        runs.step([*((s, 1) for s in streams), *work])
    runs.step([(s, 1) for s in streams])
    runs.close()
    return [dense(s.logprobs) for s in (*streams, long, second)], [k for k in taken if isinstance(k[0], str)]


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9")
@pytest.mark.parametrize("kv", ["bf16", "fp8", "int8"])
def test_long_contexts_beside_streams(tmp_path, monkeypatch, kv):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    captured, kinds = run(tmp_path, kv, "1")
    assert [k[0] for k in kinds[-3:]] == ["mixed", "deep", "deep"]
    launched, none = run(tmp_path, kv, "0")
    assert not none
    monkeypatch.setattr(runner, "DEEP_START", 10**9)
    plain, kinds = run(tmp_path, kv, "1")
    assert all(k[0] == "mixed" for k in kinds)
    for found, eager, wanted in zip(captured, launched, plain, strict=True):
        assert len(found) == len(wanted) >= 1
        assert np.abs(found - wanted).max() < 0.05
        assert np.abs(found - eager).max() < 0.05


TILE = 64
"""Smaller than the kernel's, for the interpreter's sake."""


def formula(qkv, out, cached, chunks, tiles, offsets, heads, kv_heads, *, scale, programs, counts, work):
    """What `prefill_hopper` computes with `counts`, from the same arguments."""
    dim = cached.shape[1] // (2 * kv_heads)
    count, parts = counts.tolist()
    for chunk, m0 in tiles[:count].tolist():
        _, start, length, row0 = chunks[chunk].tolist()
        assert m0 < length
        assert parts == 1 or start > (parts - 1) * TILE
        rows, first = min(TILE, length - m0), int(offsets[chunk])
        q = qkv[row0 + m0 : row0 + m0 + rows, : heads * dim].view(rows, heads, dim)
        fresh = qkv[row0 : row0 + m0 + rows, heads * dim :]
        keys, values = torch.cat([cached[first : first + start], fresh]).view(-1, 2, kv_heads, dim).unbind(1)
        keys, values = (t.repeat_interleave(heads // kv_heads, 1) for t in (keys, values))
        scores = torch.einsum("mhd,nhd->hmn", q, keys) * scale
        seen = torch.arange(len(keys))[None] <= start + m0 + torch.arange(rows)[:, None]
        found = torch.einsum("hmn,nhd->mhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)
        out[row0 + m0 : row0 + m0 + rows] = found.flatten(1)


@pytest.mark.skipif(kernel_device.ON_GPU, reason="with a GPU the kernel itself is tested")
def test_what_captured_steps_read(tmp_path, monkeypatch):
    """Steps whose views were made once, of padding, as captured ones are, and that later steps only fill."""
    model, folder = tiny_model(tmp_path, "llama", num_hidden_layers=2)
    monkeypatch.setattr(runner, "DEEP_START", 50)
    monkeypatch.setattr(runner, "DEEP_TOKENS", (80,))
    monkeypatch.setattr(runner, "HOPPER_TILE", TILE)
    monkeypatch.setattr("headrace.engine.cuda.decoder.GATHERERS", 1)
    config = EngineConfig(model=str(folder), backend="cuda", weights="fp32", kv="fp32")
    runs = Engine(BACKEND.load(locate(str(folder)), config), num_blocks=150, max_num_seqs=4, max_model_len=512)
    steps, decoder = runs.executor.runner, runs.executor.runner._decoder
    decoder.gathered_rows = 512
    decoder.parts = lambda tiles, least: 2 if least > TILE else 1
    decoder._gathered = torch.full((512, 2 * runs.layout.num_kv_heads * runs.layout.head_dim), float("nan"))
    decoder._parts, decoder._hopper = None, SimpleNamespace(prefill_hopper=formula)
    steps._mixed_keys = [k for k in steps._mixed_sizes() if k[0] == "deep"]
    made = {key: steps._mixed_step(steps._mixed_padding(*key), key[1]) for key in steps._mixed_keys}
    steps._graphed, taken = True, []

    def replay(key) -> bool:
        if key in made:
            taken.append(key)
            steps._launch_mixed(*made[key])
        return key in made

    steps.graphs.replay = replay
    rng = random.Random(4)
    long, stream, second = (runs.add([rng.randrange(3, VOCAB) for _ in range(n)], logprobs=VOCAB) for n in (196, 5, 4))
    runs.step([(stream, 3)])
    runs.step([(long, 57)])
    runs.step([(stream, 1), (long, 73)])
    runs.step([(stream, 1), (long, 66), (second, 4)])
    assert [k[0] for k in taken[-2:]] == ["deep", "deep"]
    for sequence in (long, stream, second):
        assert not sequence.errors
        wanted = reference(model, sequence.tokens).numpy()
        assert np.abs(dense(sequence.logprobs) - wanted[len(sequence.prompt) - 1 : -1]).max() < 1e-4
    runs.close()
