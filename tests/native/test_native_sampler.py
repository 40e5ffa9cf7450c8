"""The native sampler against the same slow one as the torch sampler: its tests, run again."""

from __future__ import annotations

import headrace_native
import numpy as np
import pytest
import test_sampler_rules as rules
from test_sampler_rules import (  # noqa: F401
    test_a_draw_depends_on_nothing_but_seed_and_index,
    test_a_grammar_mask_is_obeyed,
    test_a_row_that_is_not_finite_fails_alone,
    test_a_row_with_nothing_left_fails_alone,
    test_any_vocabulary_size_and_a_wide_top_p,
    test_bias_of_a_hundred_decides,
    test_equals_the_slow_sampler,
    test_the_drawn_distribution_is_the_model_s,
    test_tiny_temperature_is_greedy,
)

from headrace.engine.native.sampler import sample, token_logprobs

POOL = headrace_native.Pool(2)


@pytest.fixture(autouse=True, scope="module")
def _native_sampler():
    torch_sample = rules.sample
    rules.sample = lambda logits, rows, state: sample(logits.numpy().copy(), rows, state, POOL)
    yield
    rules.sample = torch_sample


def test_token_logprobs_of_given_tokens():
    logits = np.random.default_rng(5).standard_normal((3, rules.VOCAB)).astype(np.float32)
    entries = token_logprobs(logits, np.array([4, 0, 59]), [2, 0, 5], POOL)
    for entry, row, token, wanted in zip(entries, logits, (4, 0, 59), (2, 0, 5), strict=True):
        rules.check_logprobs(entry, row, token, wanted)


def test_more_alternatives_than_tokens():
    logits = np.random.default_rng(6).standard_normal((1, 7)).astype(np.float32)
    (entry,) = token_logprobs(logits, np.array([3]), [20], POOL)
    assert sorted(entry.top_ids) == list(range(7))
