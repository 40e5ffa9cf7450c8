"""Each measure of quality on inputs whose answer is known exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.bootstrap import ratio_interval, share_interval
from headrace.base.errors import DoesNotFit, InvalidInput
from headrace.engine.quality.choices import Question, built_in, candidates, picks
from headrace.engine.quality.distance import LogitsFile, distance
from headrace.engine.quality.measure import built_in_text, special_prefix
from headrace.engine.quality.windows import windows
from headrace.text.tokenizer import Tokenizer


def rows(*distributions: list[float]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(distributions, np.float32))


def test_divergence_of_two_known_distributions() -> None:
    found = distance(rows([0.5, 0.5, 0.0]), rows([0.25, 0.75, 0.0]))
    assert found.kl[0] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-6)
    assert found.flipped.tolist() == [True]


def test_divergence_is_infinite_where_the_other_forbids_a_possible_token() -> None:
    assert distance(rows([0.5, 0.5]), rows([1.0, 0.0])).kl[0] == math.inf
    assert distance(rows([1.0, 0.0]), rows([0.5, 0.5])).kl[0] == pytest.approx(math.log(2), rel=1e-6)


def test_equal_logits_are_exactly_zero_apart_and_a_constant_changes_nothing() -> None:
    logits = np.random.default_rng(1).normal(0, 9, (50, 700)).astype(np.float32)
    same = distance(logits, logits)
    assert not same.kl.any()
    assert not same.flipped.any()
    shifted = distance(logits, logits + np.float32(64))
    assert shifted.kl == pytest.approx(np.zeros(50), abs=1e-4)
    assert not shifted.flipped.any()


def test_divergence_equals_torch_in_double_precision() -> None:
    source = np.random.default_rng(2)
    a = source.normal(0, 5, (40, 3000)).astype(np.float32)
    b = a + source.normal(0, 0.05, a.shape).astype(np.float32)
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (a, b))
    expected = (p.exp() * (p - q)).sum(-1).numpy()
    assert distance(a, b).kl == pytest.approx(expected, rel=1e-3)


@given(
    count=st.integers(2, 90),
    size=st.integers(4, 20),
    stride=st.integers(1, 17),
    prefix=st.sampled_from([(), (7,), (7, 8)]),
)
def test_windows_score_every_token_once_with_the_context_they_promise(count, size, stride, prefix) -> None:
    tokens = list(range(100, 100 + count))
    if stride > size - max(1, len(prefix)):
        with pytest.raises(InvalidInput, match="stride"):
            windows(tokens, size, stride, prefix)
        return
    found = windows(tokens, size, stride, prefix)
    scored = [t for w in found for t in w.tokens[w.first :]]
    assert scored == tokens[0 if prefix else 1 :]
    for k, w in enumerate(found):
        assert w.tokens[: len(prefix)] == prefix
        assert len(w.tokens) <= size
        assert w.first >= 1
        assert w.scored == len(w.tokens) - w.first
        if k:
            assert len(w.tokens) == size
            assert w.scored <= stride


def test_a_text_of_one_token_cannot_be_scored() -> None:
    with pytest.raises(InvalidInput, match="text"):
        windows([5], 8, 4)
    assert [w.tokens for w in windows([5], 8, 4, (1,))] == [(1, 5)]


def test_picks_by_likelihood_and_by_likelihood_per_byte_can_differ() -> None:
    tokenizer = Tokenizer.of_bytes()
    questions = [Question("Q?", ("ab", "abcdefgh", "x", "y"), 1), Question("R?", ("a", "b", "c", "d"), 2)]
    asked = candidates(questions, tokenizer)
    assert [bytes(c.tokens[c.first :]) for c in asked[:2]] == [b" ab", b" abcdefgh"]
    assert bytes(asked[0].tokens[: asked[0].first]) == b"Question: Q?\nAnswer:"
    # Each of the choice's tokens (a space first) costs this; what lies before must not count.
    cost = {0: -1.0, 1: -0.5, 2: -3.0, 3: -3.0, 4: -2.0, 5: -2.0, 6: -1.0, 7: -2.0}
    logprobs = [
        np.concatenate([np.full(c.first - 1, -1000.0 * k), np.full(len(c.tokens) - c.first, cost[k])])
        for k, c in enumerate(asked)
    ]
    found = picks(asked, logprobs)
    # Sums -3, -4.5, -6, -6; per byte -1.5, -0.5625, -6, -6.
    assert found.raw.tolist() == [0, 2]
    assert found.normalized.tolist() == [1, 2]


def test_a_choice_that_merges_with_the_question_s_last_token_begins_there() -> None:
    class Merging:
        """Joins the colon with the space that follows it."""

        def encode(self, text: str) -> list[int]:
            return [*text.replace(": ", "\x00").encode()]

    (one, *_) = candidates([Question("Q", ("a", "b", "c", "d"), 0)], Merging())
    assert bytes(one.tokens[one.first :]) == b"\x00a"


def test_the_built_in_material() -> None:
    questions = built_in()
    assert len(questions) == 60
    assert len({q.question for q in questions}) == 60
    assert [sum(q.answer == k for q in questions) for k in range(4)] == [15] * 4
    assert all(len(set(q.choices)) == 4 for q in questions)
    text = built_in_text()
    assert 20_000 < len(text) < 40_000
    assert text.isascii()


def test_the_prefix_is_what_the_tokenizer_puts_before_a_text() -> None:
    class Opening:
        def encode(self, text: str, *, add_special: bool = True) -> list[int]:
            return [1, *text.encode(), 2] if add_special else [*text.encode()]

    assert special_prefix(Opening()) == (1,)
    assert special_prefix(Tokenizer.of_bytes()) == ()


def test_rows_of_the_reference_come_back_and_too_many_are_refused(tmp_path) -> None:
    kept = LogitsFile(5, 3, tmp_path)
    written = np.arange(15, dtype=np.float32).reshape(5, 3)
    kept.write(0, written[:2])
    kept.write(2, written[2:])
    assert (kept.read(1, 3) == written[1:4]).all()
    kept.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(DoesNotFit, match="set it to"):
        LogitsFile(10**9, 262_144, tmp_path)


def test_an_interval_of_equal_items_is_a_point_and_of_one_item_unknown() -> None:
    found = ratio_interval(np.full(9, 3.0), np.full(9, 2.0))
    assert (found.value, found.low, found.high) == (1.5, 1.5, 1.5)
    alone = ratio_interval(np.array([3.0]), np.array([2.0]))
    assert alone.value == 1.5
    assert math.isnan(alone.low)
    assert math.isnan(alone.high)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("trials", [5, 40, 4000])
def test_a_share_without_exception_is_not_certain(share: float, trials: int) -> None:
    """Wilson's interval solves (share - p)^2 = z^2 p (1 - p) / trials for the p at its other end."""
    found = share_interval(np.full(5, share * trials / 5), np.full(5, trials / 5))
    assert found.value == share
    far = found.high if share == 0 else found.low
    assert (found.low if share == 0 else found.high) == share
    assert 0 < far < 1
    assert (share - far) ** 2 == pytest.approx(1.959964**2 * far * (1 - far) / trials)


def test_a_share_of_both_outcomes_is_resampled() -> None:
    hits, each = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]), np.ones(7)
    assert share_interval(hits, each) == ratio_interval(hits, each)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    source = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        counts = source.integers(50, 100, 40).astype(float)
        sums = counts * source.normal(2.0, 0.5, 40)
        found = ratio_interval(sums, counts, resamples=300)
        held += found.low <= 2.0 <= found.high
    assert 170 <= held <= 200
