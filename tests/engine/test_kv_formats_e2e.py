"""The engine's metamorphic tests with coded keys and values: batches, chunks, prefix hits, preemptions and aborts change no
answer, whatever the format. On a tiny random model, so that all formats can be run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from test_e2e_metamorphic import (  # noqa: F401
    GREEDY,
    SUBJECTS,
    alone,
    assert_same,
    test_batched_is_alone,
    test_chunked_is_whole,
    test_overlapped_is_one_by_one,
    test_streamed_is_whole,
    test_without_a_prefix_cache_nothing_changes_and_nothing_is_hit,
)
from test_models_logits import tiny_model

from headrace import LLM, SamplingParams
from headrace.text.tokenizer import Tokenizer

pytestmark: list[pytest.MarkDecorator] = []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A vocabulary of bytes; the windows of half of its layers are shorter than the prompts."""
    changes = {"vocab_size": 256, "max_position_embeddings": 1024, "sliding_window": 40}
    _, path = tiny_model(tmp_path_factory.mktemp("models"), "gemma3", **changes)
    (path / "tokenizer.json").write_text(Tokenizer.of_bytes()._backend.to_str())
    return str(path)


@pytest.fixture(scope="module", params=["fp8", "int8", "int4"])
def kv(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is rounded otherwise may move a number across the border of two codes; one step of one of them is seen
    in the log-probabilities."""
    monkeypatch.setattr("test_e2e_metamorphic.TOLERANCE", 0.02)


@pytest.fixture(scope="module")
def smollm(folder: str, kv: str) -> Iterator[LLM]:
    """Under the name that the borrowed tests know."""
    with LLM(folder, backend="torch", kv=kv, threads=1, max_model_len=768, kv_bytes=64 * 2**20) as llm:
        yield llm


@pytest.fixture
def make(folder: str, kv: str) -> Iterator[Callable[..., LLM]]:
    with ExitStack() as stack:

        def build(**options: Any) -> LLM:
            options = {"max_model_len": 768, "kv_bytes": 64 * 2**20, **options}
            return stack.enter_context(LLM(folder, backend="torch", kv=kv, threads=1, **options))

        yield build


def ids(count: int, seed: int) -> list[int]:
    return [3 + (7 * i * i + seed) % 250 for i in range(count)]


def test_warm_is_cold_and_computes_less(smollm: LLM) -> None:
    for tokens in (300, 8 * smollm.info.block_tokens):
        prompt = ids(tokens, tokens)
        cold = smollm.generate([prompt], GREEDY)
        middle = smollm.stats.prefill_tokens_computed
        warm = smollm.generate([prompt], GREEDY)
        assert cold[0].cached_tokens < 100
        assert tokens - smollm.info.block_tokens <= warm[0].cached_tokens < tokens
        assert smollm.stats.prefill_tokens_computed - middle <= smollm.info.block_tokens
        assert_same(cold, warm)


def test_after_an_abort_in_mid_prefill_the_answer_is_the_cold_one(make: Callable[..., LLM], smollm: LLM) -> None:
    prompt = ids(400, 1)
    expected = smollm.generate([prompt], GREEDY)
    llm = make(max_batched_tokens=32, max_num_seqs=8)
    for _ in range(3):
        deltas = llm.stream([prompt, "x"], GREEDY)
        next(deltas)
        deltas.close()
    assert_same(expected, llm.generate([prompt], GREEDY))


def test_preempted_is_not(make: Callable[..., LLM], smollm: LLM) -> None:
    """Requests with a common prefix, in a pool for a few of them."""
    shared = "Answer in the manner of a ship's log, tersely and in order. "
    prompts = [f"{shared}Entry {i}: we saw {SUBJECTS[i % len(SUBJECTS)]}" for i in range(24)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=2)
    groups = smollm.info.num_blocks * smollm.info.block_tokens // smollm.info.pool_tokens
    blocks = groups * (24 * 16 // smollm.info.block_tokens * 2)
    tiny = make(num_blocks=blocks, kv_bytes=None, max_model_len=160, max_num_seqs=16, max_batched_tokens=64)
    crowded = tiny.generate(prompts, params)
    assert tiny.stats.preemptions > 0
    assert tiny.stats.prefix_hit_tokens > 0
    assert tiny.stats.free_blocks == tiny.stats.total_blocks == blocks
    assert_same(smollm.generate(prompts, params), crowded)


def test_prefixes_are_shared_by_whole_blocks_where_a_part_would_change(smollm: LLM, kv: str) -> None:
    first, size = ids(200, 5), smollm.info.block_tokens
    smollm.generate([first], GREEDY)
    other = smollm.generate([[*first[: size + 9], *ids(50, 77)]], GREEDY)[0]
    assert other.cached_tokens == (size if kv == "int4" else size + 9)
