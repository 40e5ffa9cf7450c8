"""The pace of prompts beside running streams, with costs that are given and not measured."""

import pytest
from control_rig import Rig
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.prefill import FIRST_TOKENS, LEAST_TOKENS_PER_STREAM, StepPace


def prompt(length, seed=0):
    return [1 + (seed * 7 + i * i) % 20 for i in range(length)]


def settled(target_s, cost, streams, steps=200):
    """The prompt tokens of the last of `steps` steps that are each as long as the pace says."""
    pace = StepPace(target_s)
    tokens = FIRST_TOKENS
    for _ in range(steps):
        pace.observe(tokens + streams, cost(tokens))
        tokens = pace.prompt_tokens(streams)
    return tokens


@given(
    fixed_s=st.floats(0.0, 0.02),
    token_s=st.floats(1e-5, 1e-3),
    target_s=st.floats(0.04, 0.2),
    streams=st.integers(1, 8),
)
@settings(max_examples=100, deadline=None)
def test_steps_settle_at_the_target_although_they_have_a_fixed_part(fixed_s, token_s, target_s, streams):
    tokens = settled(target_s, lambda tokens: fixed_s + token_s * (tokens + streams), streams)
    least = LEAST_TOKENS_PER_STREAM * streams
    wanted = (target_s - fixed_s) / token_s - streams
    assert tokens == least if wanted < least else tokens == pytest.approx(wanted, rel=0.02, abs=1.5)


def test_the_pace_follows_what_tokens_cost():
    pace = StepPace(0.1)
    for _ in range(20):
        pace.observe(100, 0.1)
    assert pace.prompt_tokens(1) == 99
    for _ in range(30):
        pace.observe(100, 0.2)
    assert pace.prompt_tokens(1) == 49


def test_until_a_step_is_measured_the_pace_is_a_guess():
    assert StepPace(0.05).prompt_tokens(1) == FIRST_TOKENS
    assert StepPace(0.05).prompt_tokens(20) == 20 * LEAST_TOKENS_PER_STREAM


def test_steps_that_take_no_time_are_not_limited():
    pace = StepPace(0.05)
    pace.observe(10, 0.0)
    assert pace.prompt_tokens(4) is None


def rig(token_s, **settings):
    return Rig(
        max_batched_tokens=256,
        max_model_len=1000,
        blocks=600,
        step_target_s=0.05,
        prefix_caching=False,
        compute_s=lambda plan: 0.002 + token_s * plan.num_tokens,
        **settings,
    )


def prompts_beside_streams(rig, most_steps=400):
    """Prompt tokens of each step that also makes tokens for running streams, until all is done."""
    seen = []
    for _ in range(most_steps):
        while len(rig.flight) < rig.depth and (plan := rig.plan()) is not None:
            if any(c.length == 1 for c in plan.chunks):
                seen.append(sum(c.length for c in plan.chunks if c.length > 1))
        if not rig.flight:
            break
        rig.commit()
    assert not rig.scheduler.has_work()
    return [tokens for tokens in seen if tokens]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("token_s", "expected"), [(0.0005, 95), (0.01, LEAST_TOKENS_PER_STREAM)])
def test_a_long_prompt_is_cut_beside_a_stream_by_the_time_that_steps_take(depth, token_s, expected):
    """(50 ms - 2 ms) / 0.5 ms is 96 tokens, one of them the stream's own; where tokens cost 10 ms the least goes on."""
    rig_ = rig(token_s, depth=depth)
    rig_.submit(prompt(40), max_tokens=300, ignore_eos=True)
    rig_.step()
    rig_.submit(prompt(700, 3), max_tokens=2)
    chunks = prompts_beside_streams(rig_)
    assert sum(chunks) == 700
    assert chunks[-2] == pytest.approx(expected, abs=1)  # the last is what was left
    assert max(chunks) <= max(FIRST_TOKENS, expected + 1)


def test_prompts_alone_are_not_cut():
    rig_ = rig(0.01)
    for seed in range(3):
        rig_.submit(prompt(100, seed), max_tokens=1)
    assert rig_.plan().num_tokens == 256
    rig_.commit()
    rig_.run()


def test_a_fixed_limit_and_a_paced_one_hold_together():
    rig_ = rig(0.0001, max_prefill_tokens=30)
    rig_.submit(prompt(40), max_tokens=100, ignore_eos=True)
    rig_.step()
    rig_.submit(prompt(400, 3), max_tokens=2)
    assert set(prompts_beside_streams(rig_)[:-1]) == {30}
    slow = rig(0.005, max_prefill_tokens=30)
    slow.submit(prompt(40), max_tokens=100, ignore_eos=True)
    slow.step()
    slow.submit(prompt(400, 3), max_tokens=2)
    assert set(prompts_beside_streams(slow)[1:-1]) == {LEAST_TOKENS_PER_STREAM}


def test_the_same_costs_give_the_same_steps():
    def run():
        rig_ = rig(0.0007, depth=2)
        for seed in range(6):
            rig_.submit(prompt(40 + 90 * seed, seed), max_tokens=30, ignore_eos=True)
        chunks = prompts_beside_streams(rig_)
        return chunks, rig_.tokens

    assert run() == run()
