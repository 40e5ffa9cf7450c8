"""The real model answers the same whatever the engine does around it: batches, chunks, caches, preemptions, overlap.

Answers are greedy and compared id by id. Batching and chunking change the shapes of matrix products and so their
rounding; where that could flip a near-tie, both runs must say so themselves: answers may part only at a token whose two
candidates are a near-tie in both runs (listed at the end of the session), and up to there all log-probabilities agree
within `TOLERANCE`.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from headrace import LLM, Completion, SamplingParams
from headrace.control.api import FinishReason
from headrace.control.step import StepPlan, StepResult
from near_ties import assert_tie

pytestmark = pytest.mark.model
TOLERANCE = 2e-3
TOKENS = 16

SUBJECTS = ("the sea", "a clock", "bread", "the moon", "an old map", "winter", "a violin", "rust")
PROMPTS = [f"Here is a short text about {s}:" for s in SUBJECTS]
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)

Make = Callable[..., LLM]


@pytest.fixture(scope="module", params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "native" and importlib.util.find_spec("headrace_native") is None:
        pytest.skip("headrace-native is not installed")
    return name


@pytest.fixture(scope="module")
def smollm(backend: str) -> Iterator[LLM]:
    with LLM("smollm2-135m", backend=backend, threads=1, max_model_len=768, kv_bytes=256 * 2**20) as llm:
        yield llm


@pytest.fixture
def make(backend: str) -> Iterator[Make]:
    """Further engines on the same model, with options, closed at the end of the test."""
    with ExitStack() as stack:

        def build(**options: Any) -> LLM:
            options = {"max_model_len": 768, "kv_bytes": 256 * 2**20, **options}
            return stack.enter_context(LLM("smollm2-135m", backend=backend, threads=1, **options))

        yield build


@pytest.fixture(scope="module")
def alone(smollm: LLM) -> list[Completion]:
    """Each prompt answered with nobody else there: what every other way must reproduce."""
    return [smollm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]


def assert_same(expected: list[Completion], found: list[Completion]) -> None:
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert one.finish_reason is other.finish_reason
        assert len(one.token_ids) == len(other.token_ids)
        for at, (p, q) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
            if p.token_id != q.token_id:
                where = f"{os.environ['PYTEST_CURRENT_TEST'].split(' ')[0]}, prompt {one.prompt_index}, token {at}"
                rows = [dict(zip(row.top_ids, row.top_logprobs, strict=True)) for row in (p, q)]
                assert_tie(where, p.token_id, q.token_id, *rows)
                break  # from here on they answer different texts
            assert abs(p.logprob - q.logprob) < TOLERANCE


def test_streamed_is_whole(smollm: LLM, alone: list[Completion]) -> None:
    texts = [""] * len(PROMPTS)
    ids: list[list[int]] = [[] for _ in PROMPTS]
    for delta in smollm.stream(PROMPTS, GREEDY):
        texts[delta.prompt_index] += delta.text
        ids[delta.prompt_index] += delta.token_ids
    whole = smollm.generate(PROMPTS, GREEDY)
    assert [c.text for c in whole] == texts
    assert [list(c.token_ids) for c in whole] == ids
    assert_same(alone, whole)


def test_batched_is_alone(smollm: LLM, alone: list[Completion]) -> None:
    order = list(range(len(PROMPTS)))
    random.Random(7).shuffle(order)
    strangers = [f"A stranger's request number {i} about" for i in range(5)]
    together = smollm.generate([*strangers, *[PROMPTS[i] for i in order]], GREEDY)[len(strangers) :]
    assert_same([alone[i] for i in order], together)


@pytest.mark.parametrize("options", [{"max_batched_tokens": 13, "max_num_seqs": 8}, {"chunked_prefill": False}])
def test_chunked_is_whole(make: Make, smollm: LLM, options: dict[str, Any]) -> None:
    """Prompts of a hundred tokens in chunks of at most 13, in chunks of 512, and never in chunks."""
    prompts = [" ".join([prompt] * 12) for prompt in PROMPTS[:4]]
    cold = [smollm.generate(prompt, GREEDY)[0] for prompt in prompts]
    other = make(prefix_cache=False, **options).generate(prompts, GREEDY)
    steps = [c.timeline.prefill_steps for c in other if c.timeline is not None]
    assert min(steps) > 4 if "max_batched_tokens" in options else max(steps) == 1
    assert_same(cold, other)


def test_prompts_cut_to_the_pace_of_steps_are_whole(make: Make, smollm: LLM, backend: str) -> None:
    """600 tokens of prompts: what the first step leaves comes in the smallest pieces beside those that have begun."""
    if backend != "native":
        pytest.skip("chunks of any size are held to the whole above; this one is about bits")
    prompts = [" ".join([prompt] * 12) for prompt in PROMPTS[:6]]
    cold = [smollm.generate(prompt, GREEDY)[0] for prompt in prompts]
    paced = make(prefix_cache=False, step_target_ms=0.001).generate(prompts, GREEDY)
    steps = sum(c.timeline.prefill_steps for c in paced if c.timeline is not None)
    assert steps > len(prompts) + 1  # in steps of 512 one prompt is cut once
    assert [c.logprobs for c in cold] == [c.logprobs for c in paced]


def test_warm_is_cold_and_computes_less(smollm: LLM) -> None:
    """The same 500-token prompt twice, also at an exact multiple of the block size."""
    for tokens in (500, 31 * smollm.info.block_tokens):
        prompt = [100 + (7 * i + tokens) % 5000 for i in range(tokens)]
        before = smollm.stats.prefill_tokens_computed
        cold = smollm.generate([prompt], GREEDY)
        middle = smollm.stats.prefill_tokens_computed
        warm = smollm.generate([prompt], GREEDY)
        after = smollm.stats.prefill_tokens_computed
        assert cold[0].cached_tokens < 100
        assert tokens - smollm.info.block_tokens <= warm[0].cached_tokens < tokens
        assert middle - before >= tokens - 100
        assert 1 <= after - middle <= smollm.info.block_tokens
        assert_same(cold, warm)


def test_after_an_abort_in_mid_prefill_the_answer_is_the_cold_one(make: Make, smollm: LLM) -> None:
    prompt = [200 + (11 * i) % 3000 for i in range(400)]
    expected = smollm.generate([prompt], GREEDY)
    llm = make(max_batched_tokens=32, max_num_seqs=8)
    for _ in range(3):
        deltas = llm.stream([prompt, "x"], GREEDY)
        next(deltas)  # the short one has a token, the long one is in its prefill
        deltas.close()
    assert_same(expected, llm.generate([prompt], GREEDY))


def test_preempted_is_not(make: Make, smollm: LLM) -> None:
    """Fifty requests with a common prefix in a pool for a few of them: preempted, they hit the cache on their return."""
    shared = "Answer in the manner of a ship's log, tersely and in order. "
    prompts = [f"{shared}Entry {i}: we saw {SUBJECTS[i % len(SUBJECTS)]}" for i in range(50)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
    tiny = make(num_blocks=24, kv_bytes=None, max_model_len=64, max_num_seqs=16, max_batched_tokens=64)
    crowded = tiny.generate(prompts, params)
    stats = tiny.stats
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert stats.free_blocks == stats.total_blocks == 24
    assert_same(smollm.generate(prompts, params), crowded)


def test_overlapped_is_one_by_one(make: Make, alone: list[Completion]) -> None:
    assert_same(alone, make(overlap=False).generate(PROMPTS, GREEDY))


def test_without_a_prefix_cache_nothing_changes_and_nothing_is_hit(make: Make, alone: list[Completion]) -> None:
    llm = make(prefix_cache=False)
    assert_same(alone, llm.generate(PROMPTS, GREEDY))
    again = llm.generate(PROMPTS, GREEDY)
    assert_same(alone, again)
    assert {c.cached_tokens for c in again} == {0}
    assert llm.stats.prefix_hit_tokens == 0


def test_a_seed_is_a_requests_own(smollm: LLM) -> None:
    """Seeded answers do not depend on neighbours, seeded or not, nor on when these come and go."""
    seeded = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=20, seed=1234, ignore_eos=True)
    unseeded = SamplingParams(temperature=1.0, max_tokens=7, ignore_eos=True, n=3)
    expected = smollm.generate(PROMPTS[0], seeded)[0].token_ids
    neighbours = smollm.stream(PROMPTS[1:4], unseeded)
    next(neighbours)
    assert smollm.generate(PROMPTS[0], seeded)[0].token_ids == expected
    neighbours.close()
    assert smollm.generate([*PROMPTS, PROMPTS[0]], seeded)[-1].token_ids == expected
    drawn = {smollm.generate(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=20))[0].token_ids for _ in range(3)}
    assert len(drawn) == 3


def test_raw_logprobs_do_not_depend_on_how_the_token_is_drawn(smollm: LLM) -> None:
    cold = SamplingParams(temperature=0.1, top_k=1, max_tokens=1, logprobs=3)
    hot = SamplingParams(temperature=1.0, top_p=0.5, max_tokens=1, logprobs=3)
    a, b = (smollm.generate(PROMPTS[0], params)[0].logprobs[0] for params in (cold, hot))
    assert a.top_ids == b.top_ids
    assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=TOLERANCE)


def test_a_tiny_temperature_is_greedy(smollm: LLM, alone: list[Completion]) -> None:
    found = smollm.generate(PROMPTS[0], SamplingParams(temperature=1e-5, max_tokens=TOKENS, ignore_eos=True))[0]
    assert found.token_ids == alone[0].token_ids


MEMORY = """
import random, sys
import psutil
from headrace import LLM, SamplingParams
draw = random.Random(91)
prompts = [[draw.randrange(40_000) for _ in range(1 + i % 8)] for i in range(20)]
with LLM("smollm2-135m", backend=sys.argv[1], threads=1, num_blocks=64, max_model_len=64, prefix_cache=False) as llm:
    for _ in range(8):
        for prompt in prompts:
            assert len(llm.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1))[0].token_ids) == 2
        print(psutil.Process().memory_info().rss)
    assert llm.stats.free_blocks == llm.stats.total_blocks
"""


def test_memory_stays_flat_over_many_requests(backend: str) -> None:
    """The same requests again and again, one at a time so that every round has the same shapes: what a first time leaves
    behind (touched pages, kernels made for a shape) is there after the warm-up. In a process of its own, since other
    tests' engines come and go in this one; the least of the later rounds counts, since a leak is in every one of them."""
    done = subprocess.run([sys.executable, "-c", MEMORY, backend], capture_output=True, text=True, check=True)
    rounds = [int(line) for line in done.stdout.split()]
    assert min(rounds[-3:]) - rounds[2] < 4 * 2**20, rounds


def test_a_request_whose_steps_raise_fails_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the real executor, which is reset and computes everyone else again: their answers are those of a calm run."""
    llm = make(kv_bytes=64 * 2**20, max_model_len=128)
    calm = llm.generate(PROMPTS, GREEDY)
    executor = llm._engine._core.executor
    honest = executor._step
    marked: set[int] = set()

    def trip(plan: StepPlan, *given: Any) -> StepResult:
        marked.difference_update(plan.releases)
        marked.update(init.slot for init in plan.inits if 31337 in init.token_ids)
        if any(chunk.slot in marked and chunk.start > 8 for chunk in plan.chunks):
            raise RuntimeError("the kernel tripped")
        return honest(plan, *given)

    monkeypatch.setattr(executor, "_step", trip)
    bad = [31337] * 8
    answers = llm.generate([*PROMPTS[:3], bad, *PROMPTS[3:]], GREEDY)
    assert answers[3].finish_reason is FinishReason.ERROR
    assert "the kernel tripped" in (answers[3].error or "")
    assert_same(calm, [*answers[:3], *answers[4:]])
    assert_same(calm, llm.generate(PROMPTS, GREEDY))
    assert llm.stats.free_blocks == llm.stats.total_blocks


def test_a_row_of_nan_fails_alone_and_its_blocks_are_not_published(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(kv_bytes=64 * 2**20, max_model_len=128)
    bad = [31337] * 40
    prompts = [*PROMPTS[:3], bad, *PROMPTS[3:]]
    calm = make(kv_bytes=64 * 2**20, max_model_len=128).generate(prompts, GREEDY)
    executor = llm._engine._core.executor
    honest_step, steps = executor._step, executor._step.__self__
    computer = type(steps._decoder if hasattr(steps, "_decoder") else steps._compute)
    honest_logits = computer.logits
    marked: set[int] = set()
    poisoned: list[int] = []

    def step(plan: StepPlan, *given: Any) -> StepResult:
        marked.difference_update(plan.releases)
        marked.update(init.slot for init in plan.inits if 31337 in init.token_ids)
        sampling = [chunk for chunk in plan.chunks if chunk.sample]
        poisoned[:] = [i for i, chunk in enumerate(sampling) if chunk.slot in marked and chunk.start > 42]
        return honest_step(plan, *given)

    def logits(self: Any, *given: Any) -> Any:
        made = honest_logits(self, *given)
        for row in poisoned:
            made[row] = float("nan")
        return made

    monkeypatch.setattr(executor, "_step", step)
    monkeypatch.setattr(computer, "logits", logits)
    answers = llm.generate(prompts, GREEDY)
    assert answers[3].finish_reason is FinishReason.ERROR
    assert "finite" in (answers[3].error or "")
    assert 0 < len(answers[3].token_ids) < TOKENS
    assert_same([*calm[:3], *calm[4:]], [*answers[:3], *answers[4:]])
    monkeypatch.undo()
    again = llm.generate([bad], GREEDY)
    assert again[0].cached_tokens == 0
    assert_same([calm[3]], again)
    assert llm.stats.free_blocks == llm.stats.total_blocks
