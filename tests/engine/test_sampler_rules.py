"""The vectorized sampler against a slow one that follows the rules one row and one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from headrace.control.request import Sampling
from headrace.engine.sampler.draws import uniforms
from headrace.engine.sampler.sampler import NOT_FINITE, NOTHING_ALLOWED, Rows, sample, token_logprobs
from headrace.engine.sampler.state import GREEDY_BELOW, SamplingState
from headrace.text.grammar import mask_words

VOCAB = 60


def run(logits, samplings, histories, prompts, masks=None):
    """Sample with each row in a slot of its own, scattered."""
    state = SamplingState(len(samplings) + 3)
    slots = np.array([len(samplings) + 2 - i for i in range(len(samplings))], np.int64)
    for slot, sampling in zip(slots, samplings, strict=True):
        state.admit(int(slot), sampling)
    rows = Rows(slots, [np.array(h, np.int32) for h in histories], np.array(prompts, np.int64), masks or {})
    return sample(torch.tensor(logits, dtype=torch.float32), rows, state)


def altered(logits, s: Sampling, history, prompt, allowed=None) -> np.ndarray:
    """The logits that are chosen from."""
    x = np.array(logits, np.float64)
    output = list(history[prompt:])
    for token in range(len(x)):
        if token in history:
            x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
        count = output.count(token)
        x[token] -= s.frequency_penalty * count + (s.presence_penalty if count else 0.0)
    for token, bias in s.logit_bias.items():
        x[token] += bias
    if len(output) < s.min_tokens and s.grammar is None:
        for token in s.stopping_ids:
            x[token] = -math.inf
    if allowed is not None:
        x[~allowed] = -math.inf
    return x


def kept_weights(x: np.ndarray, s: Sampling) -> np.ndarray:
    """Weights of the tokens that may be drawn, in vocabulary order, unnormalized."""
    w = np.exp((x - x.max()) / s.temperature)
    order = sorted(range(len(w)), key=lambda i: -w[i])
    if s.top_k:
        least = w[order[min(s.top_k, len(w)) - 1]]
        w = np.where(w >= least, w, 0.0)
    if s.top_p < 1.0:
        by_k = w.copy()
        if s.top_k:  # ties beyond top_k are kept, yet do not count towards the mass
            by_k[order[s.top_k :]] = 0.0
        total, before, least = by_k.sum(), 0.0, w.max()
        for i in sorted(range(len(w)), key=lambda i: -by_k[i]):
            if by_k[i] > 0 and (before < s.top_p * total or before == 0.0):
                least = by_k[i]
            before += by_k[i]
        w = np.where(w >= least, w, 0.0)
    return np.where(w >= s.min_p, w, 0.0)


def slow_choice(logits, s: Sampling, history, prompt, allowed=None) -> tuple[set[int], np.ndarray]:
    """Tokens that a correct sampler may return (more than one only where rounding decides)."""
    x = altered(logits, s, history, prompt, allowed)
    if s.temperature < GREEDY_BELOW or s.top_k == 1:
        return {int(i) for i in np.flatnonzero(x >= x.max() - 1e-5)}, x
    w = kept_weights(x, s)
    index = len(history) - prompt
    u = uniforms(np.array([s.seed], np.uint64), np.array([index]))[0]
    cumulative = np.cumsum(w) / w.sum()
    near = {int(np.searchsorted(cumulative, t, side="right")) for t in (u - 3e-6, u, u + 3e-6)}
    return {min(i, len(w) - 1) for i in near}, x


samplings = st.builds(
    Sampling,
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.05, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -0.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 100.0, 1.5, -2.0]), max_size=3),
    min_tokens=st.sampled_from([0, 0, 3, 6]),
    eos_token_ids=st.just((3,)),
    stop_token_ids=st.sampled_from([(), (7, 11)]),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**63),
    logprobs=st.sampled_from([None, None, 0, 4]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(samplings, min_size=1, max_size=7), st.integers(0, 10**6))
def test_equals_the_slow_sampler(batch, seed):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((len(batch), VOCAB)) * 3).astype(np.float32)
    prompts = [int(rng.integers(1, 9)) for _ in batch]
    histories = [rng.integers(0, VOCAB, n + int(rng.integers(0, 9))).tolist() for n in prompts]
    found = run(logits, batch, histories, prompts)
    assert found.errors == {}
    for i, s in enumerate(batch):
        acceptable, _ = slow_choice(logits[i], s, histories[i], prompts[i])
        assert found.token_ids[i] in acceptable
        assert (i in found.logprobs) == (s.logprobs is not None)
        if s.logprobs is not None:
            check_logprobs(found.logprobs[i], logits[i], found.token_ids[i], s.logprobs)


def check_logprobs(entry, raw, token, wanted):
    """They are those of the raw model, whatever the sampling rules did."""
    x = raw.astype(np.float64)
    expected = x - np.log(np.exp(x - x.max()).sum()) - x.max()
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(expected[token], abs=1e-5)
    assert entry.rank == 1 + int((x > x[token]).sum())
    assert len(entry.top_ids) == len(entry.top_logprobs) == wanted
    assert list(entry.top_logprobs) == pytest.approx(sorted(expected, reverse=True)[:wanted], abs=1e-5)
    assert [expected[i] for i in entry.top_ids] == pytest.approx(list(entry.top_logprobs), abs=1e-5)


@pytest.mark.parametrize("vocab", [1, 5, 255, 256, 257, 5000])
def test_any_vocabulary_size_and_a_wide_top_p(vocab):
    """Flat distributions, whose top-p set is larger than the candidates looked at first."""
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((40, vocab)) * 0.05).astype(np.float32)
    batch = [
        Sampling(max_tokens=9, temperature=1.0, seed=i, top_p=p, top_k=k)
        for i, (p, k) in enumerate([(0.9, 0), (1.0, 0), (0.999, 3000), (0.3, 0)] * 10)
    ]
    found = run(logits, batch, [[0]] * 40, [1] * 40)
    for i, s in enumerate(batch):
        assert found.token_ids[i] in slow_choice(logits[i], s, [0], 1)[0]


def test_the_drawn_distribution_is_the_model_s():
    """Chi-square over 20,000 seeds, with and without filters."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal(VOCAB) * 1.5).astype(np.float32)
    for rules in ({}, {"top_k": 10}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.6, "top_k": 20, "top_p": 0.9}):
        batch = [Sampling(**{"max_tokens": 9, "temperature": 1.0, "seed": i} | rules) for i in range(20_000)]
        found = run(np.tile(logits, (len(batch), 1)), batch, [[0]] * len(batch), [1] * len(batch))
        weights = kept_weights(altered(logits, batch[0], [], 0), batch[0])
        counts = np.bincount(found.token_ids, minlength=VOCAB)
        assert counts[weights == 0].sum() == 0
        likely = weights > 0
        expected = weights[likely] / weights.sum() * len(batch)
        few = expected < 5
        observed = counts[likely]
        if few.any():  # the rare ones are counted together
            observed = np.append(observed[~few], observed[few].sum())
            expected = np.append(expected[~few], expected[few].sum())
        assert chisquare(observed, expected).pvalue > 1e-3


def test_one_seed_s_stream_is_uniform_and_uncorrelated():
    draws = uniforms(np.full(50_000, 1234, np.uint64), np.arange(50_000))
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    assert chisquare(np.histogram(draws, 100, (0, 1))[0]).pvalue > 1e-3
    pairs = np.histogram2d(draws[:-1], draws[1:], 10, [[0, 1], [0, 1]])[0].ravel()
    assert chisquare(pairs).pvalue > 1e-3
    neighbours = uniforms(np.arange(50_000).astype(np.uint64), np.zeros(50_000, np.int64))
    assert abs(np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1]) < 0.02


def test_a_draw_depends_on_nothing_but_seed_and_index():
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((6, VOCAB)) * 2).astype(np.float32)
    batch = [
        Sampling(max_tokens=9, temperature=1.0, seed=5),
        Sampling(max_tokens=9, temperature=0.0),
        Sampling(max_tokens=9, temperature=1.3, seed=5, top_p=0.8),
        Sampling(max_tokens=9, temperature=0.8, seed=6, repetition_penalty=1.2, logprobs=2),
        Sampling(max_tokens=9, temperature=0.8, seed=7, logit_bias={4: 2.0}),
        Sampling(max_tokens=9, temperature=1.0, seed=5, top_k=7, min_p=0.01),
    ]
    histories = [[1] * (3 + i) for i in range(6)]
    together = run(logits, batch, histories, [2] * 6).token_ids
    for order in (range(6), reversed(range(6))):
        for i in order:
            assert run(logits[i : i + 1], [batch[i]], [histories[i]], [2]).token_ids == [together[i]]


def test_a_row_that_is_not_finite_fails_alone():
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, 9] = 5.0
    logits[0, 3] = np.nan
    logits[2, 9] = np.inf
    logits[3, 5] = -np.inf
    batch = [Sampling(max_tokens=9, temperature=t, seed=1, logprobs=1) for t in (1.0, 0.0, 0.0, 1.0)]
    found = run(logits, batch, [[0]] * 4, [1] * 4)
    assert found.errors == {0: NOT_FINITE, 2: NOT_FINITE, 3: NOT_FINITE}
    assert found.token_ids[1] == 9


def test_a_row_with_nothing_left_fails_alone():
    logits = np.zeros((2, VOCAB), np.float32)
    none = np.zeros(mask_words(VOCAB), np.int32)
    batch = [Sampling(max_tokens=9, temperature=0.0), Sampling(max_tokens=9, temperature=1.0, seed=1)]
    found = run(logits, batch, [[0]] * 2, [1] * 2, {0: none})
    assert found.errors == {0: NOTHING_ALLOWED}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_mask_is_obeyed(temperature):
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((50, VOCAB))).astype(np.float32)
    allowed = {i: rng.random(VOCAB) < 0.1 for i in range(0, 50, 2)}
    for bits in allowed.values():
        bits[17] = True
    masks = {}
    for i, bits in allowed.items():
        padded = np.zeros(mask_words(VOCAB) * 32, bool)
        padded[:VOCAB] = bits
        masks[i] = np.packbits(padded, bitorder="little").view(np.int32)
    batch = [Sampling(max_tokens=9, temperature=temperature, seed=i) for i in range(50)]
    found = run(logits, batch, [[0]] * 50, [1] * 50, masks)
    for i in range(50):
        assert found.token_ids[i] in slow_choice(logits[i], batch[i], [0], 1, allowed.get(i))[0]
        assert i not in allowed or allowed[i][found.token_ids[i]]


def test_tiny_temperature_is_greedy():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 30] = 1e-3
    batch = [Sampling(max_tokens=9, temperature=t, seed=3) for t in (1e-5, 1e-30, 0.0)]
    assert run(logits, batch, [[0]] * 3, [1] * 3).token_ids == [30, 30, 30]


def test_bias_of_a_hundred_decides():
    logits = np.random.default_rng(4).standard_normal((2, VOCAB)).astype(np.float32) * 4
    best = int(logits[1].argmax())
    batch = [
        Sampling(max_tokens=9, temperature=1.0, seed=1, logit_bias={12: 100.0}),
        Sampling(max_tokens=9, temperature=0.0, logit_bias={best: -100.0}),
    ]
    ids = run(logits, batch, [[0]] * 2, [1] * 2).token_ids
    assert ids[0] == 12
    assert ids[1] != best


def test_token_logprobs_of_given_tokens():
    logits = np.random.default_rng(5).standard_normal((3, VOCAB)).astype(np.float32)
    entries = token_logprobs(torch.tensor(logits), torch.tensor([4, 0, 59]), [2, 0, 5])
    for entry, row, token, wanted in zip(entries, logits, (4, 0, 59), (2, 0, 5), strict=True):
        check_logprobs(entry, row, token, wanted)
