"""Numbers that are not finite, and rows that are left out past the last layer's attention."""

from __future__ import annotations

import random

import kernel_device
import numpy as np
import pytest
from test_cuda_steps import engine
from test_models_logits import VOCAB, dense, reference, tiny_model

from headrace.engine.sampler.rows import NOT_FINITE

TOLERANCE = 1e-4 if not kernel_device.ON_GPU else 2e-3
BROKEN = 9


def test_what_is_not_finite_fails_its_own_sequence(tmp_path):
    model, folder = tiny_model(tmp_path, "llama", num_hidden_layers=1)
    runs = engine(folder)
    runs.executor.runner._decoder._weights.embedding[BROKEN] = float("inf")
    good, unsampled = runs.add([5, 6, 7]), runs.add([8, BROKEN, 11, 12])
    # Of a chunk that samples nothing, whose rows alone can tell.
    runs.step([(good, 3), (unsampled, 3)])
    assert unsampled.errors == [NOT_FINITE]
    # Of one token behind others, whose logits tell.
    led = runs.add([20, 21], logit_bias={BROKEN: 1000.0})
    runs.step([(led, 2), (good, 1)])
    assert led.generated == [BROKEN]
    runs.step([(led, 1), (good, 1)])
    assert led.errors == [NOT_FINITE]
    assert not good.errors
    best = reference(model, good.tokens).argmax(-1).tolist()
    assert good.generated == best[2:-1]
    runs.close()


@pytest.mark.parametrize("name", ["llama-tied-biased", "gemma3"])
def test_prompts_whose_last_rows_alone_go_on(tmp_path, name):
    """Without log-probabilities of a prompt, only rows that are sampled pass the last layer's MLP and norms."""
    model, folder = tiny_model(tmp_path, name, num_hidden_layers=2)
    runs = engine(folder)
    rng = random.Random(6)
    sequences = [runs.add([rng.randrange(3, VOCAB) for _ in range(n)], logprobs=VOCAB) for n in (13, 4, 6)]
    runs.step([(sequences[0], 7), (sequences[1], 4)])
    runs.step([(sequences[1], 1), (sequences[0], 6), (sequences[2], 6)])
    for s in sequences:
        assert not s.errors
        wanted = reference(model, s.tokens).numpy()
        assert np.abs(dense(s.logprobs) - wanted[len(s.prompt) - 1 : -1]).max() < TOLERANCE
    runs.close()
