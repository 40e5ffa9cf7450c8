"""Each architecture in bf16, as GPUs serve it: as near to transformers in fp32 as the torch backend is in bf16, through captured
graphs, alone, mixed and chunked. The interpreter's bf16 products are wrong, so this runs on a GPU only."""

from __future__ import annotations

import random

import kernel_device
import numpy as np
import pytest
from test_models_logits import CASES, VOCAB, dense, reference, tiny_model
from torch_steps import Engine

from headrace.engine.executors.cuda import BACKEND
from headrace.engine.executors.torch import BACKEND as TORCH
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

pytestmark = pytest.mark.skipif(not kernel_device.ON_GPU, reason="needs a GPU")
DENSE = [name for name in CASES if "moe" not in name and name != "mixtral"]
WIDE = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}
"""Heads that Hopper's own kernels take."""


def off(backend, folder, model) -> float:
    """Root mean square of the differences of all log-probabilities from the model's in fp32."""
    device = "cuda" if backend is BACKEND else "cpu"
    config = EngineConfig(model=str(folder), backend=backend.name, device=device, weights="bf16", kv="bf16")
    files = locate(str(folder))
    assert backend.unavailable(files, config) is None
    runs = Engine(backend.load(files, config), num_blocks=400, block_tokens=16, max_num_seqs=16, max_model_len=256)
    rng = random.Random(5)
    long, *short = (
        runs.add([rng.randrange(3, VOCAB) for _ in range(n)], logprobs=VOCAB, prompt_logprobs=VOCAB)
        for n in (150, 3, 17, 40, 9, 21)
    )
    runs.step([(s, len(s.prompt)) for s in short])
    runs.step([*((s, 1) for s in short), (long, 97)])
    runs.step([(long, 53), *((s, 1) for s in short)])
    for _ in range(3):
        runs.step([(s, 1) for s in (long, *short)])
    gaps = []
    for s in (long, *short):
        assert not s.errors
        wanted = reference(model, s.tokens).numpy()
        found = np.concatenate([dense(s.prompt_logprobs), dense(s.logprobs)])
        gaps.append((found - wanted[:-1]).ravel())
    runs.close()
    return float(np.sqrt(np.mean(np.concatenate(gaps) ** 2)))


@pytest.mark.parametrize(
    ("name", "sizes"), [*((name, {}) for name in DENSE), *((name, WIDE) for name in ("llama", "qwen3", "gemma3"))]
)
def test_distributions_in_bf16(tmp_path, name, sizes):
    model, folder = tiny_model(tmp_path, name, **sizes)
    ours, theirs = off(BACKEND, folder, model), off(TORCH, folder, model)
    print(f"\n{name} {sizes}: rms {ours:.4f}, the torch backend {theirs:.4f}")
    assert ours < 1.5 * theirs + 1e-3
