"""What the CUDA backend does to logits before a choice, and the log-probabilities it reports: against plain loops in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_device import DEVICE

from headrace.control.request import Sampling
from headrace.engine.cuda.sampling import alter, altered_rows, logprobs
from headrace.engine.sampler.rows import Rows
from headrace.engine.sampler.state import SamplingState

VOCAB = 70
RULES = [
    {},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.9},
    {"frequency_penalty": 0.8},
    {"repetition_penalty": 0.6, "presence_penalty": -0.4, "frequency_penalty": 1.1},
    {"logit_bias": {3: 2.5, 69: -100.0}, "min_tokens": 9, "stop_token_ids": (4, 5)},
    {"logit_bias": {8: 1.5}, "frequency_penalty": 0.5},
    {},
]


def by_loops(logits: np.ndarray, rules: dict, prompt: list[int], output: list[int], mask: np.ndarray | None):
    found = logits.astype(np.float64).copy()
    for token in {*prompt, *output}:
        by = rules.get("repetition_penalty", 1.0)
        found[token] = found[token] / by if found[token] > 0 else found[token] * by
    for token in set(output):
        found[token] -= rules.get("frequency_penalty", 0.0) * output.count(token) + rules.get("presence_penalty", 0.0)
    for token, by in rules.get("logit_bias", {}).items():
        found[token] += by
    if len(output) < rules.get("min_tokens", 0):
        found[list(rules["stop_token_ids"])] = -np.inf
    if mask is not None:
        found[~mask] = -np.inf
    return found


@pytest.mark.parametrize("seed", range(6))
def test_logits_are_changed_as_the_rules_say(seed):
    rng = np.random.default_rng(seed)
    count = len(RULES)
    state, slots = SamplingState(count + 3), rng.permutation(count + 3)[:count].astype(np.int64)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 30)).tolist() for _ in RULES]
    outputs = [rng.integers(0, VOCAB // 4, rng.integers(0, 25)).tolist() for _ in RULES]
    for slot, rules in zip(slots.tolist(), RULES, strict=True):
        state.admit(slot, Sampling(max_tokens=40, temperature=0.0, **rules))
    mask = rng.random(VOCAB) < 0.3
    words = np.packbits(np.pad(mask, (0, -VOCAB % 32)), bitorder="little").view(np.int32)
    histories = [np.array(p + o, np.int32) for p, o in zip(prompts, outputs, strict=True)]
    rows = Rows(slots, histories, np.array([len(p) for p in prompts]), {count - 1: words})
    before = rng.normal(0, 3, (count, VOCAB)).astype(np.float32)
    logits = torch.from_numpy(before.copy()).to(DEVICE)
    altered = altered_rows(rows, state)
    assert 0 not in altered
    assert {1, 2, 3, 4, 5, 6, count - 1} == set(altered.tolist())
    alter(logits, altered, rows, state)
    for i, rules in enumerate(RULES):
        wanted = by_loops(before[i], rules, prompts[i], outputs[i], mask if i == count - 1 else None)
        np.testing.assert_allclose(logits[i].cpu().numpy(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5])
def test_log_probabilities_and_ranks(rows):
    rng = np.random.default_rng(rows)
    # Apart from all others by more than fp32 loses, so that ranks are what they are.
    logits = np.stack([rng.permutation(VOCAB) for _ in range(rows)]).astype(np.float32) / 7
    ids = rng.integers(0, VOCAB, rows)
    wanted = [int(n) for n in rng.integers(0, 9, rows)]
    found = logprobs(torch.from_numpy(logits).to(DEVICE), torch.from_numpy(ids.astype(np.int32)).to(DEVICE), wanted)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    for entry, token, row, count in zip(found.read(), ids.tolist(), exact, wanted, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=1e-5)
        ranked = np.argsort(-row)
        assert ranked[entry.rank - 1] == token
        assert entry.top_ids == tuple(ranked[:count].tolist())
        np.testing.assert_allclose(entry.top_logprobs, row[ranked[:count]], atol=1e-5)
