"""Who marches: closed loops on a virtual clock, request by request, against what the formulas assume of them.

Time is counted in prompts prefilled and steps decoded, so that no cost of either matters. Nothing here is fitted or measured.
"""

import random

import pytest

from headrace.plan.closed_loop import closed_loop
from headrace.plan.costs.roofline import efficiency
from headrace.plan.deployment import Inputs, resolve
from headrace.plan.workload import traffic


def waits(requests, answer, *, prompts_first, shortest=1.0, rounds=12, per_step=2, seed=1):
    """Prompts' worth of prefilling between a request's arrival and its first token, its own left out: means by round.

    `prompts_first`: nothing decodes while prompts wait; else a step takes `per_step` prompts beside decoding. Answers are drawn from
    `shortest` x `answer` on.
    """
    draw = random.Random(seed)

    def length():
        return draw.randint(round(answer * shortest), answer)

    queue = [(0.0, 0, length()) for _ in range(requests)]
    running, found = [], [[] for _ in range(rounds)]
    prefilled = 0.0
    while queue or running:
        taken, queue = queue[:per_step], queue[per_step:]
        before = prefilled + len(taken)
        decodes = bool(running) and not (prompts_first and taken)
        ended = []
        if decodes:
            running = [(left - 1, turn) for left, turn in running]
            ended = [turn for left, turn in running if left <= 0]
            running = [(left, turn) for left, turn in running if left > 0]
        prefilled = before
        for at, turn, tokens in taken:
            found[turn].append(prefilled - at - 1)
            running.append((tokens - 1, turn))
        queue += [(prefilled, turn + 1, length()) for turn in ended if turn + 1 < rounds]
    return [sum(w) / len(w) for w in found]


@pytest.mark.parametrize("answer", [64, 512])
def test_equal_requests_march_where_prompts_go_first_however_long_the_answers(answer):
    """All end together, so that in every round each waits for half of the others, as the planner has it."""
    asked = Inputs(
        model="qwen3-32b", gpu="h100-sxm-80", n_gpus=4, engine="sglang", isl=2048, osl=answer, concurrency=32,
        equal_lengths=True, max_batched_tokens=2 * 2048,
    )  # fmt: skip
    t, e = traffic(resolve(asked)), efficiency({}, "sglang", "hopper", "bf16")
    assert (t.loop.marching, t.loop.prompts) == (1.0, 2.0)
    times = closed_loop(t.loop, t.peaks, e)
    before_others = times.ttft_s - e.prompt_s - times.alone_s - 0.5 * times.decode_s
    assert waits(32, answer, prompts_first=True) == pytest.approx([before_others / times.prompt_s] * 12)


@pytest.mark.parametrize("answer", [64, 512])
def test_equal_requests_that_decode_beside_prompts_do_not_march(answer):
    """They start one step after another, and so they end: from the second round on each waits for its own step alone."""
    first, *later = waits(32, answer, prompts_first=False)
    assert first == pytest.approx((31 + 2 - 1) / 2)
    assert max(later) <= 1.0


def test_drawn_lengths_do_not_march_even_where_prompts_go_first():
    """InferenceX's lengths, from 0.8 of the longest on: after a few rounds hardly anything of the start is left."""
    first, *later = waits(32, 1024, prompts_first=True, shortest=0.8)
    assert first > 15
    assert sum(later[2:]) / len(later[2:]) < 3
