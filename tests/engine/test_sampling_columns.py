"""Columns of the sampling rules that are kept from step to step: they follow whoever is admitted."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.control.request import Sampling
from headrace.engine.batch import Slots
from headrace.engine.sampler.state import SamplingState
from headrace.spec.accounting import cache_layout
from headrace.spec.locate import locate


def test_columns_follow_admissions():
    state, slots = SamplingState(4), np.array([2, 0])
    state.admit(0, Sampling(max_tokens=1, temperature=0.0))
    state.admit(2, Sampling(max_tokens=1, temperature=0.0))
    first = state.columns(slots)
    assert first.all_greedy
    assert first.all_plain
    assert state.columns(slots) is first
    state.admit(2, Sampling(max_tokens=1, temperature=0.5, top_k=7, seed=3, logprobs=1))
    second = state.columns(slots)
    assert not second.all_greedy
    assert not second.all_plain
    assert second.top_k.tolist() == [7, 0]
    assert second.temperature[0] == pytest.approx(0.5)
    assert second.seed[0] == 3
    assert second.greedy.tolist() == [False, True]
    assert state.columns(np.array([0])).all_greedy  # of other rows


def test_slots_are_one_array_as_long_as_they_are_the_same():
    slots = Slots(cache_layout(locate("smollm2-135m").spec(), "fp16", 16), 4, 64)
    first = slots.rows_of([3, 1])
    assert slots.rows_of([3, 1]) is first
    assert first.tolist() == [3, 1]
    assert slots.rows_of([1, 3]).tolist() == [1, 3]
    assert slots.rows_of([1]).tolist() == [1]
