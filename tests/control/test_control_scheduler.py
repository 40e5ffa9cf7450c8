"""Named situations: what once broke servers, and what the scheduler promises."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from control_rig import VOCAB, HalfRight, Rig

from headrace.base.errors import InvalidInput
from headrace.control.api import FinishReason
from headrace.control.config import SchedulerConfig
from headrace.control.step import RowResult, StepResult


def prompt(length, start=1):
    return [(start * 31 + 7 * i + i // 5) % VOCAB for i in range(length)]


# Ends


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_b61_abort_and_finish_in_the_same_step(depth):
    rng = random.Random(depth)
    rig = Rig(depth=depth, check=False, blocks=40)
    for number in range(1000):
        name = rig.submit(prompt(1 + number % 7, number), max_tokens=1 + number % 3, ignore_eos=True)
        for _ in range(rng.randrange(4)):
            rig.step()
        if name not in rig.finish:
            rig.abort(name)
        assert rig.scheduler.abort(name) is None
    rig.run()
    rig.scheduler.check()


def test_abort_frees_blocks_at_once_also_with_steps_in_flight():
    rig = Rig(depth=2, blocks=20)
    name = rig.submit(prompt(30), max_tokens=20, ignore_eos=True)
    rig.plan()
    rig.plan()
    assert rig.scheduler.stats().free_blocks < 20
    rig.abort(name)
    assert rig.scheduler.stats().free_blocks == 20
    rig.run()


@pytest.mark.parametrize("told_first", [False, True])
def test_a_request_that_ends_is_published_after_its_tokens_are_told(told_first):
    rig = Rig(blocks=20)
    first = rig.submit(prompt(14), max_tokens=1, ignore_eos=True)
    while first not in rig.finish:
        rig.step()
    stats = rig.scheduler.stats()
    assert (stats.running, stats.free_blocks, stats.cached_blocks) == (0, 20, 0)
    assert rig.scheduler.unsettled
    if told_first:
        rig.scheduler.settle()
        assert rig.scheduler.stats().cached_blocks == 4
        assert not rig.scheduler.unsettled
    second = rig.submit(prompt(14), max_tokens=1, ignore_eos=True)  # planning settles what nobody has settled
    rig.run()
    assert rig.finish[second].cached_tokens == 13


@pytest.mark.parametrize("held", [False, True])
def test_blocks_that_only_ended_requests_share_count_as_free(held):
    rig = Rig(blocks=20)
    rig.submit(prompt(12), max_tokens=1, ignore_eos=True)
    rig.run()
    names = [rig.submit(prompt(12) + prompt(2, seed), max_tokens=1, ignore_eos=True) for seed in (5, 6)]
    if held:
        rig.submit(prompt(12), max_tokens=3, ignore_eos=True)
    while not all(name in rig.finish for name in names):
        rig.step()
    # The third goes on with two of the blocks and a copy of the last, in which it writes.
    assert rig.scheduler.stats().free_blocks == 20 - 3 * held
    rig.run()


def test_what_ended_in_the_step_that_failed_for_another_is_not_cached():
    rig = Rig(max_batched_tokens=64, share_min=0.99)  # the second does not wait for what the first will publish
    good = rig.submit(prompt(4) + prompt(10, 5), max_tokens=1, ignore_eos=True)
    bad = rig.submit(prompt(4) + prompt(10, 6), nan=0, max_tokens=1, ignore_eos=True)
    assert len(rig.plan().chunks) == 2
    rig.run()
    assert [rig.finish[name].reason for name in (good, bad)] == [FinishReason.LENGTH, FinishReason.ERROR]
    assert rig.scheduler.stats().cached_blocks == 0


def test_a_waiting_request_can_be_aborted():
    rig = Rig(max_num_seqs=1)
    rig.submit(prompt(8), max_tokens=20, ignore_eos=True)
    second = rig.submit(prompt(8, 2))
    rig.step()
    rig.abort(second)
    assert rig.finish[second].timeline.prefill_s == 0.0
    rig.run()


def test_the_end_by_max_tokens_is_known_ahead():
    rig = Rig(depth=3)
    rig.submit(prompt(4), max_tokens=2, ignore_eos=True)
    assert [rig.plan() is not None for _ in range(3)] == [True, True, False]
    rig.run()
    assert rig.executor.tokens_computed == 5


def test_the_row_after_an_eos_is_discarded():
    rig = Rig(depth=2)
    names = [rig.submit(prompt(3 + n, n), max_tokens=30) for n in range(20)]
    rig.run()
    reasons = [rig.finish[name].reason for name in names]
    assert reasons.count(FinishReason.STOP) > 3
    assert rig.executor.tokens_computed > sum(
        len(rig.requests[n].prompt_token_ids) + rig.finish[n].completion_tokens - 1 for n in names
    )


def test_max_tokens_zero_computes_the_prompt_and_ends():
    rig = Rig()
    name = rig.submit(prompt(20), max_tokens=0, prompt_logprobs=0)
    rig.run()
    assert rig.finish[name].reason is FinishReason.LENGTH
    assert rig.prompt_logprobs[name] == 19
    assert rig.tokens[name] == []


@pytest.mark.parametrize(
    ("length", "sampling", "message"),
    [
        (0, {}, "the prompt is empty"),
        (64, {}, "64 prompt tokens and one to generate exceed max_model_len 64"),
        (50, {}, "50 prompt tokens need 13 KV blocks of 4 tokens, but the pool has 12"),
        (5, {"max_tokens": -1}, "max_tokens: must not be negative"),
    ],
)
def test_what_can_never_run_is_refused_with_its_numbers(length, sampling, message):
    rig = Rig(blocks=12)
    name = rig.submit(prompt(length), **sampling)
    assert rig.finish[name].reason is FinishReason.ERROR
    assert message in rig.finish[name].error
    assert not rig.scheduler.has_work()


def test_ids_out_of_range_are_refused_and_a_live_id_is_an_error():
    rig = Rig()
    name = rig.submit([-1])
    assert "2^32" in rig.finish[name].error
    live = rig.submit([1])
    with pytest.raises(InvalidInput, match="already in use"):
        rig.scheduler.submit(rig.requests[live])
    rig.run()


def test_a_lone_request_that_fills_the_pool_ends_with_length():
    rig = Rig(blocks=4, depth=2)
    name = rig.submit(prompt(6), max_tokens=50, ignore_eos=True)
    rig.run()
    assert rig.finish[name].reason is FinishReason.LENGTH
    assert rig.finish[name].completion_tokens == 4 * 4 + 1 - 6
    assert rig.scheduler.stats().preemptions == 0


def test_a_sliding_window_lets_a_request_outgrow_the_pool():
    rig = Rig(windows=(6,), blocks=4, depth=2)
    name = rig.submit(prompt(6), max_tokens=50, ignore_eos=True)
    rig.run()
    assert rig.finish[name].completion_tokens == 50


@pytest.mark.parametrize("windows", [(None, 5), (6,), (3, 9)])
def test_a_lone_request_in_the_smallest_pool_waits_for_its_own_steps(windows):
    for length in range(9, 40):
        blocks = next(n for n in range(1, 60) if Rig(windows=windows, blocks=n).scheduler.capacity_tokens >= length + 6)
        rig = Rig(windows=windows, blocks=blocks, depth=3, max_batched_tokens=23)
        name = rig.submit(prompt(length), max_tokens=6, ignore_eos=True)
        rig.run(most_steps=60)
        assert rig.finish[name].completion_tokens == 6
        assert rig.finish[name].timeline.preemptions == 0  # a sequence that gives itself up may never get anywhere


def test_nan_fails_one_row_alone_and_nothing_of_it_is_cached():
    rig = Rig(depth=2)
    bad = rig.submit(prompt(24), nan=1, max_tokens=9, ignore_eos=True)
    good = rig.submit(prompt(24, 2), max_tokens=9, ignore_eos=True)
    rig.run()
    assert rig.finish[bad].error == "logits are not finite"
    assert rig.finish[good].reason is FinishReason.LENGTH
    again = rig.submit(prompt(24), max_tokens=9, ignore_eos=True)
    warm = rig.submit(prompt(24, 2), max_tokens=9, ignore_eos=True)
    rig.run()
    assert rig.finish[again].cached_tokens == 0
    assert rig.finish[warm].cached_tokens == 23


def test_an_executor_that_returns_no_token_fails_that_row():
    rig = Rig()
    bad, good = rig.submit(prompt(4)), rig.submit(prompt(4, 2), max_tokens=1)
    plan = rig.scheduler.plan()
    rows = (RowResult(plan.chunks[0].slot), RowResult(plan.chunks[1].slot, (3,)))
    outputs = rig.scheduler.commit(plan, StepResult(plan.step_id, rows))
    assert [o.request_id for o in outputs] == [bad, good]
    assert "returned 0 tokens" in outputs[0].finish.error
    assert outputs[1].finish.reason is FinishReason.LENGTH


def test_results_out_of_order_are_refused():
    rig = Rig(depth=2)
    rig.submit(prompt(4))
    rig.plan()
    plan = rig.plan()
    with pytest.raises(ValueError, match="not the oldest step"):
        rig.scheduler.commit(plan, StepResult(plan.step_id, ()))
    with pytest.raises(ValueError, match="0 rows for 1 chunks"):
        rig.scheduler.commit(rig.flight[0][0], StepResult(0, ()))


def test_a_dead_executor_ends_every_request_once():
    rig = Rig(depth=2)
    names = [rig.submit(prompt(20, n)) for n in range(9)]
    rig.step()
    rig.plan()
    rig.lose_steps()
    rig.take(rig.scheduler.fail_all("gone"))
    assert {rig.finish[n].error for n in names} == {"gone"}
    assert not rig.scheduler.has_work()
    assert rig.scheduler.stats().cached_blocks == 0
    rig.submit(prompt(20))
    rig.run()


def test_one_request_can_be_run_alone():
    rig = Rig(depth=1)
    names = [rig.submit(prompt(9, n), max_tokens=6, ignore_eos=True) for n in range(4)]
    rig.step()
    while names[2] not in rig.finish:
        plan = rig.scheduler.plan(names[2])
        assert len(plan.chunks) == 1
        rig.flight.append((plan, rig.executor.submit(plan)))
        rig.commit()
    rig.run()


# The prefix cache


def test_b62_an_aborted_prefill_leaves_only_what_was_committed():
    rig = Rig(depth=2, max_batched_tokens=8)
    name = rig.submit(prompt(40))
    rig.plan()
    rig.plan()
    rig.commit()
    rig.abort(name)
    again = rig.submit(prompt(40))
    rig.run()
    assert rig.finish[again].cached_tokens == 8  # the second step was in flight


@pytest.mark.parametrize("blocks_long", [1, 2, 5])
def test_b64_a_fully_cached_prompt_of_whole_blocks_computes_its_last_token(blocks_long):
    rig = Rig()
    first = rig.submit(prompt(4 * blocks_long), max_tokens=3)
    rig.run()
    before = rig.executor.tokens_computed
    second = rig.submit(prompt(4 * blocks_long), max_tokens=3)
    rig.run()
    assert rig.finish[second].cached_tokens == 4 * blocks_long - 1
    assert rig.tokens[first] == rig.tokens[second]
    assert rig.executor.tokens_computed - before == rig.finish[second].completion_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_b65_preempted_requests_that_return_on_cached_prefixes(depth):
    rig = Rig(blocks=14, depth=depth, max_num_seqs=8, watermark=0.0)
    shared = prompt(17)
    for n in range(50):
        rig.submit([*shared, n % VOCAB, 3], max_tokens=12, ignore_eos=n % 2 == 0, priority=n % 3)
    rig.run()
    stats = rig.scheduler.stats()
    assert stats.preemptions > 5
    assert stats.prefix_hit_tokens > 50 * 8
    assert all(f.reason in (FinishReason.STOP, FinishReason.LENGTH) for f in rig.finish.values())


def test_b67_a_flush_while_requests_live_is_safe():
    rig = Rig(depth=2)
    for n in range(6):
        rig.submit([*prompt(18), n], max_tokens=20, ignore_eos=True)
    flushes = 0
    while rig.step():
        rig.scheduler.flush_prefix()
        rig.check()
        flushes += 1
    assert flushes > 10
    rig.run()


def test_b71_the_same_long_prompt_twice():
    rig = Rig(blocks=300, max_model_len=600, max_batched_tokens=128, check=False)
    one = rig.submit(prompt(500), max_tokens=5, ignore_eos=True)
    rig.run()
    assert rig.scheduler.stats().prefill_tokens_computed == 500
    two = rig.submit(prompt(500), max_tokens=5, ignore_eos=True)
    rig.run()
    stats = rig.scheduler.stats()
    assert rig.tokens[one] == rig.tokens[two]
    assert rig.finish[two].cached_tokens == 499
    assert stats.prefix_queries_tokens == 1000
    assert stats.prefix_hit_tokens == 499
    assert stats.prefill_tokens_computed == 501


def test_a_followup_hits_the_answer_too():
    rig = Rig()
    first = rig.submit(prompt(10), max_tokens=9, ignore_eos=True)
    rig.run()
    second = rig.submit([*prompt(10), *rig.tokens[first], 5, 6])
    rig.run()
    assert rig.finish[second].cached_tokens == 10 + 9 - 1  # the last generated token was never an input


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("order", ["fcfs", "priority", "prefix-aware"])
def test_copies_submitted_together_compute_their_prompt_once(depth, order):
    rig = Rig(depth=depth, order=order, blocks=100, max_num_seqs=16, max_batched_tokens=16)
    for _ in range(12):
        rig.submit(prompt(41), max_tokens=4, ignore_eos=True)
    rig.run()
    assert rig.scheduler.stats().prefill_tokens_computed == 41 + 11


def test_a_shared_prefix_in_the_making_is_waited_for():
    rig = Rig(depth=2, blocks=100, max_batched_tokens=16, max_model_len=100)
    rig.submit([*prompt(20), *prompt(60, 3)], max_tokens=4, ignore_eos=True)
    two = rig.submit([*prompt(20), *prompt(9, 5)], max_tokens=4, ignore_eos=True)
    rig.run()
    assert rig.finish[two].cached_tokens == 20
    assert rig.scheduler.stats().prefill_tokens_computed == 80 + 9


@pytest.mark.parametrize("end", ["abort", "nan", "preempt"])
def test_who_waits_for_a_producer_goes_on_without_it(end):
    rig = Rig(depth=1, max_batched_tokens=8)
    one = rig.submit(prompt(40), nan=0 if end == "nan" else None)
    two = rig.submit(prompt(40))
    rig.step()
    assert rig.scheduler.stats().waiting == 1
    if end == "abort":
        rig.abort(one)
    elif end == "preempt":
        rig.lose_steps()
        rig.scheduler.withdraw()
    rig.run()
    assert rig.finish[two].reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_an_urgent_request_does_not_wait_for_a_less_urgent_producer():
    rig = Rig(max_batched_tokens=16, blocks=100)
    rig.submit(prompt(40), priority=5)
    rig.plan()
    urgent = rig.submit(prompt(40), priority=0)
    rig.commit()
    assert len(rig.plan().chunks) == 1  # the running prefill comes first and takes the whole step
    rig.commit()
    assert len(rig.plan().chunks) == 2
    assert rig.order[-1] == urgent
    rig.run()


def test_prompt_logprobs_take_no_hits():
    rig = Rig()
    rig.submit(prompt(20))
    rig.run()
    name = rig.submit(prompt(20), prompt_logprobs=0)
    rig.run()
    assert rig.finish[name].cached_tokens == 0
    assert rig.prompt_logprobs[name] == 19


def test_without_caching_nothing_is_kept():
    rig = Rig(prefix_caching=False)
    for _ in range(2):
        rig.submit(prompt(20), max_tokens=3, ignore_eos=True)
    rig.run()
    stats = rig.scheduler.stats()
    assert (stats.cached_blocks, stats.prefix_queries_tokens, stats.prefill_tokens_computed) == (0, 0, 40)


def test_sliding_blocks_return_to_the_pool_while_a_request_runs():
    rig = Rig(windows=(None, 8), blocks=40, max_batched_tokens=8, prefix_caching=False)
    rig.submit(prompt(50), max_tokens=4, ignore_eos=True)
    most = 0
    while rig.step():
        most = max(most, 40 - rig.scheduler.stats().free_blocks)
    assert most <= 14 + 5  # 54 tokens of the full group, 7 + 8 of the sliding one


# Budget, order, fairness, time


@pytest.mark.parametrize("windows", [(None,), (None, 12)])
@pytest.mark.parametrize("seed", range(40))
def test_what_running_sequences_were_promised_is_counted_as_they_are_let_in(windows, seed):
    """The count that admission goes on with through a step is, at each decision, the sum over all that run."""
    rng, seen = random.Random(seed), []
    rig = Rig(windows=windows, blocks=14, max_num_seqs=8, max_batched_tokens=24)
    scheduler = rig.scheduler
    inner = scheduler._admission

    class Watching:
        def admits(self, *, promised_blocks, **more):
            counted = [scheduler._tables.promised(sequence) for sequence in scheduler._running]
            seen.append((promised_blocks, sum(counted)))
            return inner.admits(promised_blocks=promised_blocks, **more)

    scheduler._admission = Watching()
    for _ in range(30):
        for _ in range(rng.randrange(4)):
            rig.submit(
                [rng.randrange(1, VOCAB) for _ in range(rng.choice((3, 9, 21, 40)))], max_tokens=rng.randrange(1, 9)
            )
        rig.step()
    rig.run()
    assert all(promised == slow for promised, slow in seen)
    assert any(slow for _, slow in seen)


def test_decodes_come_first_and_prefill_takes_the_rest():
    rig = Rig(max_batched_tokens=10, blocks=100)
    rig.submit(prompt(4), max_tokens=20, ignore_eos=True)
    rig.step()
    rig.submit(prompt(30, 2), max_tokens=4)
    plan = rig.plan()
    assert [(c.length, c.sample) for c in plan.chunks] == [(1, True), (9, False)]
    rig.run()


def test_prefill_is_capped_only_while_others_decode():
    rig = Rig(max_batched_tokens=16, max_prefill_tokens=3, blocks=100)
    rig.submit(prompt(12), max_tokens=8, ignore_eos=True)
    assert rig.plan().num_tokens == 12
    rig.commit()
    rig.submit(prompt(30, 2), max_tokens=2)
    assert [c.length for c in rig.plan().chunks] == [1, 3]
    rig.run()


@pytest.mark.parametrize(
    ("burst", "new", "capped"), [(None, 4, True), (1.5, 3, True), (1.5, 4, False), (0.0, 1, False)]
)
def test_a_burst_of_new_requests_lifts_the_cap_on_prefill(burst, new, capped):
    """`new` requests come while two decode; those that prefill already count like those that wait."""
    rig = Rig(max_batched_tokens=16, max_prefill_tokens=3, prefill_burst=burst, blocks=100)
    for seed in (1, 2):
        rig.submit(prompt(6, seed), max_tokens=20, ignore_eos=True)
    rig.step()
    for seed in range(new):
        rig.submit(prompt(40, 10 + seed), max_tokens=2)
    for _ in range(2):  # all of them wait, then the first prefills
        plan = rig.plan()
        assert [c.length for c in plan.chunks[:2]] == [1, 1]
        assert plan.num_tokens == 2 + (3 if capped else 14)
        rig.commit()
    rig.run()


@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", [0, 1, 2, 3]), ("priority", [0, 3, 1, 2]), ("prefix-aware", [0, 3, 1, 2])]
)
def test_order_of_service(order, expected):
    rig = Rig(order=order, max_num_seqs=1)
    names = [rig.submit(prompt(6), max_tokens=3)]
    rig.step()
    names += [rig.submit(prompt(6, n), priority=p) for n, p in ((2, 1), (3, 1), (4, 0))]
    rig.run()
    assert rig.order == [names[i] for i in expected]


def test_prefix_aware_serves_hits_first_but_starves_no_one():
    rig = Rig(order="prefix-aware", max_num_seqs=1, blocks=60)
    rig.submit(prompt(24), max_tokens=1)
    rig.run()
    loner = rig.submit(prompt(24, 9), max_tokens=1)
    for n in range(10):
        rig.submit([*prompt(20), n], max_tokens=1)
    for _ in range(100):  # an endless stream of requests that all hit
        rig.submit([*prompt(20), 3, 3], max_tokens=1)
        rig.step()
        if loner in rig.finish:
            break
    assert loner in rig.finish
    overtaken = rig.order.index(loner) - 1
    assert 10 < overtaken <= 32
    rig.run()


def test_the_least_important_is_preempted():
    rig = Rig(blocks=10, watermark=0.0, admission="eager")
    low = rig.submit(prompt(12), max_tokens=16, ignore_eos=True, priority=1)
    high = rig.submit(prompt(12, 2), max_tokens=16, ignore_eos=True, priority=0)
    rig.run()
    assert rig.finish[low].timeline.preemptions > 0
    assert rig.finish[high].timeline.preemptions == 0


def test_a_preempted_request_returns_only_with_its_tokens_in_flight():
    rig = Rig(blocks=8, depth=3, watermark=0.0, admission="eager")
    high = rig.submit(prompt(12), max_tokens=16, ignore_eos=True)
    low = rig.submit(prompt(12, 2), max_tokens=16, ignore_eos=True)
    while rig.scheduler.stats().preemptions == 0:
        if len(rig.flight) == 2:
            rig.commit()
        rig.plan()
    assert rig.flight  # steps that sample for the preempted request
    rig.abort(high)  # room for it again
    assert rig.plan() is None
    rig.run()
    assert rig.finish[low].timeline.preemptions == 1


def test_a_timeline_adds_up_and_says_where_time_went():
    rig = Rig(blocks=10, watermark=0.0, max_num_seqs=2, admission="eager")
    rig.clock.advance_to(200.1)
    names = [rig.submit(prompt(12, n), max_tokens=16, ignore_eos=True, arrival_s=199.7) for n in range(3)]
    rig.run()
    timelines = [rig.finish[n].timeline for n in names]
    for t in timelines:
        assert t.total_s == t.queue_s + t.prefill_s + t.decode_s + t.preempted_s
        assert t.queue_s >= 0.39
        assert t.prefill_s > 0
        assert t.decode_s > 0
        assert t.decode_steps >= 15 - t.preemptions
        assert (t.preempted_s > 0) == (t.preemptions > 0)
    assert any(t.preemptions for t in timelines)


def test_drafts_change_nothing_but_the_number_of_steps():
    steps = {}
    for depth in (0, 4):
        rig = Rig(blocks=60, max_batched_tokens=24, drafter=HalfRight(depth) if depth else None)
        for n in range(8):
            rig.submit(prompt(9 + n, n), max_tokens=24, logprobs=0, ignore_eos=n % 2 == 0)
        rig.run()
        steps[depth] = rig.executor.steps
    assert steps[4] < steps[0]


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_seqs": 0},
        {"max_batched_tokens": 5},
        {"max_model_len": 1},
        {"max_prefill_tokens": 0},
        {"step_target_s": 0.0},
        {"step_target_s": math.nan},
        {"step_target_s": 0.1, "chunked_prefill": False, "max_batched_tokens": 10},
        {"watermark": 1.0},
        {"share_min": -0.1},
    ],
)
def test_wrong_settings_name_their_field(change):
    good = SchedulerConfig(max_num_seqs=6, max_batched_tokens=6, max_model_len=10)
    with pytest.raises(InvalidInput) as caught:
        replace(good, **change)
    assert caught.value.field == next(iter(change))


@pytest.mark.parametrize("kind", ["order", "eviction", "admission"])
def test_unknown_policies_are_refused_by_name(kind):
    with pytest.raises(InvalidInput, match="choose one of") as caught:
        Rig(**{kind: "nonesuch"})
    assert caught.value.field == kind
