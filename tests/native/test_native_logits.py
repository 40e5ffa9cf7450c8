"""Each architecture through the native backend: with exact activations equal to transformers, with int8 ones close."""

from __future__ import annotations

import random

import headrace_native
import numpy as np
import pytest
from test_models_logits import (
    CASES,
    VOCAB,
    dense,
    random_schedule,
    reference,
    test_distributions_equal_transformers,
    tiny_model,
)
from torch_steps import Engine

pytestmark = pytest.mark.usefixtures("native_engines")


@pytest.mark.parametrize("kernels", [k for k in headrace_native.kernels() if k != "scalar"] + ["scalar"])
@pytest.mark.parametrize("name", ["llama-tied-biased", "gemma3", "phi3-longrope-partial", "qwen3_moe"])
def test_every_kernel_set_is_exact(tmp_path, name, kernels, native_engines):
    native_engines["options"] = (("activations", "fp32"), ("kernels", kernels))
    test_distributions_equal_transformers(tmp_path, name)


@pytest.mark.parametrize("name", CASES)
def test_int8_activations_are_close(tmp_path, name, native_engines):
    """Matrices are kept exact (fp32 has no int8 path), so weights go to 8 bits too: the drift is of both."""
    model, folder = tiny_model(tmp_path, name)
    native_engines["options"] = ()
    native_engines["kv"] = "fp16"
    engine = Engine.of(str(folder), threads=1, weights="int8")
    try:
        rng = random.Random(name)
        prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (30, 60, 90)]
        sequences = [engine.add(p, prompt_logprobs=VOCAB, logprobs=VOCAB) for p in prompts]
        random_schedule(engine, sequences, rng, new_tokens=3)
        drift = []
        for s in sequences:
            expected = reference(model, s.tokens).numpy().astype(np.float64)[:-1]
            ours = dense(s.prompt_logprobs + s.logprobs)
            drift.append((np.exp(expected) * (expected - ours)).sum(-1).mean())
        assert np.mean(drift) < 0.02
    finally:
        engine.close()
