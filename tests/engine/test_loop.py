"""The step loop on an executor that invents tokens: order, endings, faults, and sleeping when there is nothing to do."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fake_core import FaultyExecutor, launch, request

from headrace.base.clock import SystemClock
from headrace.base.errors import EngineDead
from headrace.control.api import (
    Abort,
    FinishReason,
    FlushPrefixCache,
    Output,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
)
from headrace.engine.launch import EngineCore
from headrace.engine.loop import MAX_FAILURES_IN_A_ROW, EngineLoop
from headrace.spec.config import EngineConfig


class Script:
    """An inbox that gives one list of messages per step, then shuts down once everything is done. Records its waits."""

    def __init__(self, *batches: list[ToEngine], each_step: Callable[[int], list[ToEngine]] | None = None) -> None:
        self.batches = list(batches)
        self.each_step = each_step
        self.calls = 0
        self.slept: list[int] = []

    def receive(self, wait_s: float | None) -> list[ToEngine]:
        self.calls += 1
        if wait_s is None:
            self.slept.append(self.calls)
        if self.batches:
            return self.batches.pop(0)
        if self.each_step is not None:
            return self.each_step(self.calls)
        return [Shutdown(drain_s=1e9)]


class Record:
    """What the loop said, by request."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[Output]] = {}
        self.messages: list[StepOutputs] = []

    def __call__(self, message: object) -> None:
        assert isinstance(message, StepOutputs)
        self.messages.append(message)
        for output in message.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def tokens(self, request_id: str) -> tuple[int, ...]:
        return tuple(t for o in self.outputs[request_id] for t in o.token_ids)

    def reason(self, request_id: str) -> FinishReason:
        """The ending, of which there is exactly one, and last."""
        endings = [o.finish for o in self.outputs[request_id]]
        assert endings[-1] is not None
        assert endings[:-1] == [None] * (len(endings) - 1)
        return endings[-1].reason


def drive(core: EngineCore, script: Script, *, overlap: bool = True) -> Record:
    record = Record()
    EngineLoop(core.scheduler, core.executor, script, record, clock=SystemClock(), overlap=overlap).run()
    core.scheduler.check()
    stats = core.scheduler.stats()
    assert stats.free_blocks == stats.total_blocks
    return record


def core(**options: object) -> EngineCore:
    faults = tuple((k, str(v)) for k, v in options.pop("faults", {}).items())  # type: ignore[attr-defined]
    return launch(EngineConfig(model="fake", options=faults, **options))  # type: ignore[arg-type]


def submits(*requests: object) -> list[ToEngine]:
    return [Submit(r) for r in requests]  # type: ignore[arg-type]


def test_overlapped_steps_give_the_same_tokens_as_steps_one_by_one() -> None:
    requests = [request(f"r{i}", 3 + 5 * i, max_tokens=4 + i) for i in range(12)]
    results = []
    for overlap in (False, True):
        record = drive(core(), Script(submits(*requests[:7]), [], submits(*requests[7:])), overlap=overlap)
        results.append({r.request_id: record.tokens(r.request_id) for r in requests})
        assert {record.reason(r.request_id) for r in requests} == {FinishReason.LENGTH}
    assert results[0] == results[1]
    assert [len(results[0][r.request_id]) for r in requests] == [r.sampling.max_tokens for r in requests]


def test_the_last_token_is_told_before_its_request_is_published() -> None:
    record = drive(core(), Script(submits(request("a", 30, max_tokens=1)), *[[]] * 4))
    at = next(i for i, m in enumerate(record.messages) if any(o.finish is not None for o in m.outputs))
    told, settled, _ = record.messages[at:]  # the last is of the end of the loop
    assert (told.stats.running, told.stats.cached_blocks) == (0, 0)
    assert not settled.outputs
    assert settled.stats.cached_blocks > 0
    assert settled.stats.free_blocks == told.stats.free_blocks == told.stats.total_blocks


def test_overlap_keeps_a_second_step_in_flight() -> None:
    depths: dict[bool, int] = {}
    for overlap in (False, True):
        made = core()
        in_flight, most = 0, 0
        submit, commit = made.executor.submit, made.scheduler.commit

        def counted_submit(plan, submit=submit):  # type: ignore[no-untyped-def]
            nonlocal in_flight, most
            in_flight += 1
            most = max(most, in_flight)
            return submit(plan)

        def counted_commit(plan, result, commit=commit):  # type: ignore[no-untyped-def]
            nonlocal in_flight
            in_flight -= 1
            return commit(plan, result)

        made.executor.submit, made.scheduler.commit = counted_submit, counted_commit  # type: ignore[method-assign]
        drive(made, Script(submits(request("a"))), overlap=overlap)
        depths[overlap] = most
    assert depths == {False: 1, True: 2}


def test_an_idle_loop_sleeps_and_a_busy_one_does_not() -> None:
    script = Script([], submits(request("a", max_tokens=5)))
    drive(core(), script)
    # Calls 1 and 2 find nothing to do; the request's five steps are never slept through.
    assert script.slept == [1, 2]


class Idler:
    """An executor's work of its own: it has `pieces`, and more for each step. Records its calls by the inbox's."""

    def __init__(self, made: EngineCore, script: Script, *, pieces: int, each_step: int = 0) -> None:
        self.pieces, self.script, self.called, self.submitted = pieces, script, [], []
        submit = made.executor.submit

        def counted(plan):  # type: ignore[no-untyped-def]
            self.pieces += each_step
            self.submitted.append(script.calls)
            return submit(plan)

        made.executor.submit, made.executor.idle = counted, self  # type: ignore[method-assign,attr-defined]

    def __call__(self) -> bool:
        self.called.append(self.script.calls)
        self.pieces -= 1
        return self.pieces > 0


def test_an_idle_executor_works_piece_by_piece_until_nothing_is_left_then_the_loop_sleeps() -> None:
    script = Script([], [], [], [])
    made = core()
    idler = Idler(made, script, pieces=3)
    drive(made, script)
    # Each piece comes after a look for messages; after the last one the loop sleeps, once.
    assert idler.called == [1, 2, 3]
    assert script.slept == [4]


def test_a_message_between_two_pieces_is_served_before_the_next() -> None:
    script = Script([], [], submits(request("a", max_tokens=5)))
    made = core()
    idler = Idler(made, script, pieces=100)
    drive(made, script)
    assert idler.called == [1, 2]
    assert min(idler.submitted) == 3


def test_an_executor_does_nothing_of_its_own_while_there_is_work() -> None:
    script = Script(submits(request("a", max_tokens=5)), [], [], [], [], [], [], [], [], [], [])
    made = core()
    idler = Idler(made, script, pieces=0, each_step=1)
    drive(made, script)
    assert len(idler.submitted) >= 5
    assert idler.called
    assert min(idler.called) > max(idler.submitted)


def test_refused_requests_end_at_once_and_alone() -> None:
    record = drive(core(), Script(submits(request("good"), request("long", 500), request("empty", ()))))
    assert record.reason("long") is FinishReason.ERROR
    assert "128" in (record.outputs["long"][0].finish.error or "")  # type: ignore[union-attr]
    assert record.reason("empty") is FinishReason.ERROR
    assert record.reason("good") is FinishReason.LENGTH


def test_a_doubled_id_does_not_end_the_first_request() -> None:
    record = drive(core(), Script(submits(request("a"), request("a"))))
    assert record.reason("a") is FinishReason.LENGTH
    assert len(record.tokens("a")) == 8


def test_a_row_with_nan_logits_fails_alone() -> None:
    names = ["a", "b", "nan", "c"]
    record = drive(core(), Script(submits(*[request(n, max_tokens=16) for n in names])))
    assert {n: record.reason(n) for n in names} == {
        "a": FinishReason.LENGTH,
        "b": FinishReason.LENGTH,
        "c": FinishReason.LENGTH,
        "nan": FinishReason.ERROR,
    }
    assert len(record.tokens("nan")) < 16


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 9])
def test_a_request_that_breaks_its_steps_fails_alone(overlap: bool, num_blocks: int) -> None:
    """Also where its company does not fit into the pool together; the others' tokens are those of an undisturbed run."""
    names = ["a", "b", "c", "d"]
    calm = drive(core(num_blocks=num_blocks), Script(submits(*[request(n, 10, max_tokens=12) for n in names])))
    made = core(num_blocks=num_blocks, faults={"break": "bad"})
    batch = [request(n, 10, max_tokens=12) for n in [*names[:2], "bad", *names[2:]]]
    record = drive(made, Script(submits(*batch), [], [], submits(request("late", 10))), overlap=overlap)
    assert record.reason("bad") is FinishReason.ERROR
    assert "the executor tripped" in record.outputs["bad"][-1].finish.error  # type: ignore[union-attr,operator]
    for name in names:
        assert record.reason(name) is FinishReason.LENGTH
        assert record.tokens(name) == calm.tokens(name)
    assert record.reason("late") is FinishReason.LENGTH
    assert isinstance(made.executor, FaultyExecutor)
    assert made.executor.resets == made.executor.failed_steps >= 1


def test_several_bad_requests_are_each_found() -> None:
    made = core(faults={"break": "bad"})
    names = ["a", "bad1", "b", "bad2", "c"]
    record = drive(made, Script(submits(*[request(n) for n in names])))
    assert [n for n in names if record.reason(n) is FinishReason.ERROR] == ["bad1", "bad2"]


def test_a_suspect_that_is_aborted_meanwhile_holds_nobody_up() -> None:
    made = core(faults={"break": "bad"})
    batches = [submits(request("bad"), request("a"), request("b")), [Abort("bad"), Abort("a")]]
    record = drive(made, Script(*batches))
    assert record.reason("a") is FinishReason.ABORT
    assert record.reason("bad") is FinishReason.ABORT
    assert record.reason("b") is FinishReason.LENGTH


def test_an_executor_that_always_fails_ends_the_loop() -> None:
    made = core(faults={"always_break": "1"})
    with pytest.raises(EngineDead, match=f"{MAX_FAILURES_IN_A_ROW} steps in a row failed.*tripped"):
        drive(made, Script(submits(*[request(f"r{i}") for i in range(6)]), each_step=lambda call: []))


def test_shutdown_lets_running_requests_finish_and_takes_no_more() -> None:
    batches = [submits(request("a", max_tokens=20)), [Shutdown(drain_s=1e9)], submits(request("b"))]
    record = drive(core(), Script(*batches, each_step=lambda call: []))
    assert record.reason("a") is FinishReason.LENGTH
    assert record.reason("b") is FinishReason.ABORT


def test_shutdown_without_patience_aborts() -> None:
    record = drive(core(), Script(submits(request("a", max_tokens=100)), [], [Shutdown()]))
    assert record.reason("a") is FinishReason.ABORT
    assert record.outputs["a"][-1].finish.timeline is not None  # type: ignore[union-attr]


def test_a_flush_while_requests_live_is_safe() -> None:
    prompt = tuple(range(24))
    batches = [
        submits(request("a", prompt, max_tokens=20)),
        [],
        [FlushPrefixCache()],
        submits(request("b", prompt, max_tokens=20)),
        [FlushPrefixCache()],
    ]
    record = drive(core(), Script(*batches))
    assert record.tokens("a") == record.tokens("b")


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_storm_leaves_no_block_behind(overlap: bool) -> None:
    """1000 requests of one to three tokens, each aborted near its end, at times in the very step that ends it."""
    rng = random.Random(61)
    waiting = [request(f"s{i}", rng.randrange(1, 30), max_tokens=rng.randrange(1, 4)) for i in range(1000)]
    ends: dict[int, list[str]] = {}

    def each_step(call: int) -> list[ToEngine]:
        messages: list[ToEngine] = [Abort(name) for name in ends.pop(call, [])]
        for _ in range(rng.randrange(6)):
            if waiting:
                messages.append(Submit(waiting.pop()))
                ends.setdefault(call + rng.randrange(1, 7), []).append(messages[-1].request.request_id)  # type: ignore[union-attr]
        if not waiting and not ends:
            messages.append(Shutdown(drain_s=1e9))
        return messages

    record = drive(core(num_blocks=40), Script(each_step=each_step), overlap=overlap)
    reasons = [record.reason(f"s{i}") for i in range(1000)]
    assert len(reasons) == 1000
    assert reasons.count(FinishReason.ABORT) > 50
    assert reasons.count(FinishReason.LENGTH) > 50


def test_without_chunked_prefill_every_prompt_is_computed_in_one_step() -> None:
    requests = [request(f"r{i}", 20 + 7 * i, max_tokens=6) for i in range(8)]
    results, steps = [], []
    for chunked in (True, False):
        made = core(chunked_prefill=chunked, max_batched_tokens=128 if not chunked else 16, prefix_cache=False)
        record = drive(made, Script(submits(*requests[:5]), [], submits(*requests[5:])))
        results.append([record.tokens(r.request_id) for r in requests])
        timelines = [record.outputs[r.request_id][-1].finish.timeline for r in requests]  # type: ignore[union-attr]
        steps.append([t.prefill_steps for t in timelines if t is not None])
    assert results[0] == results[1]
    assert min(steps[0]) > 1
    assert steps[1] == [1] * 8
