"""What every executor promises, with coded keys and values: the torch executor's scenarios, run again with each format."""

from __future__ import annotations

import random

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from test_models_logits import VOCAB, dense, random_schedule, reference, tiny_model
from test_torch_executor import (  # noqa: F401
    POISON,
    SAMPLED,
    alone,
    prompts,
    test_a_chunk_that_does_not_sample_fails_too,
    test_a_released_slot_starts_clean,
    test_a_row_that_is_not_finite_fails_alone,
    test_a_step_that_raises_tells_whoever_waits_and_the_executor_goes_on,
    test_batched_and_chunked_equal_alone_and_whole,
    test_blocks_of_a_failed_or_aborted_row_do_not_harm_their_next_owner,
    test_preempted_equals_not_preempted,
    test_steps_may_be_submitted_before_earlier_ones_end,
)
from test_torch_executor import test_copied_blocks_continue_a_prefix_without_touching_it as copied_blocks
from test_torch_executor import test_drafts_change_nothing_but_the_number_of_steps as drafts
from torch_steps import Engine

from headrace.base.errors import InvalidInput
from headrace.engine.executors.torch import BACKEND
from headrace.spec.accounting import default_block_tokens
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

CODED = ("fp8", "int8", "int4")
LOSS = {"fp16": 0.001, "bf16": 0.008, "int8": 0.025, "fp8": 0.12, "int4": 0.25}
"""Largest mean difference of log-probabilities from the unquantized cache, on a random model (which, unlike a trained one, has
no structure that survives rounding)."""

ROUNDED = {"fp16": 0.002, "bf16": 0.01, "fp8": 0.1, "int8": 0.02, "int4": 0.1}
"""Largest difference between two schedules: products that differ in their last bit put a number here and there into the next
code."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models"), "llama")[1]


def engine_of(folder, kv: str, **sizes) -> Engine:
    return Engine.of(str(folder), threads=1, kv=kv, block_tokens=default_block_tokens(kv), **sizes)


@pytest.fixture(params=CODED)
def engine(folder, request):
    made = engine_of(folder, request.param)
    yield made
    made.close()


@pytest.fixture(params=CODED)
def poisoned(folder, tmp_path, request):
    """The model with one token whose embedding is not a number."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    made = engine_of(tmp_path, request.param, num_blocks=24)
    yield made
    made.close()


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_copies_and_drafts_change_nothing(folder, kv):
    """Not of int4: it never copies a part of a block for a prefix (`CacheLayout.whole_blocks`)."""
    made = engine_of(folder, kv)
    try:
        copied_blocks(made)
        drafts(made, {})
    finally:
        made.close()


@pytest.mark.parametrize("kv", ["fp16", "bf16", *CODED])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gemma3"])
def test_the_loss_is_within_the_stated_bound_in_any_schedule(tmp_path, name, kv):
    model, folder = tiny_model(tmp_path, name)
    made = engine_of(folder, kv)
    try:
        rng = random.Random(name)
        given = [[rng.randrange(VOCAB) for _ in range(n)] for n in (2, 9, 33, 64, 70)]
        found = []
        for schedule in (lambda s: made.generate(s, 10), lambda s: random_schedule(made, s, random.Random(2), 10)):
            sequences = [made.add(p, prompt_logprobs=VOCAB, logprobs=VOCAB) for p in given]
            schedule(sequences)
            for s in sequences:
                assert not s.errors
                made.remove(s)
            found.append(sequences)
        for one, other in zip(*found, strict=True):
            assert one.generated[:10] == other.generated[:10]
            apart = np.abs(dense(one.prompt_logprobs) - dense(other.prompt_logprobs))
            assert apart.max() < ROUNDED[kv]
            assert apart.mean() < ROUNDED[kv] / 10
            ours = dense(one.prompt_logprobs + one.logprobs)
            expected = reference(model, one.tokens).numpy()[: len(ours)]
            assert 0 < np.abs(ours - expected).mean() < LOSS[kv]
    finally:
        made.close()


@pytest.mark.parametrize("kv", CODED)
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_predicted_bytes_are_the_real_ones(folder, weights, kv):
    made = Engine.of(str(folder), weights=weights, kv=kv, threads=1, block_tokens=default_block_tokens(kv))
    items = {i.name: i for i in made.model.memory()}
    assert set(items) == {"weights", "kv_pool", *(["kv_staging"] if kv == "int4" else [])}
    for item in items.values():
        assert item.predicted_bytes == item.actual_bytes > 0
    made.close()


def test_half_precision_weights_with_a_coded_cache(folder, engine):
    """bf16 keys and values are coded from what they are."""
    kv = engine.model.kv_precision
    made = Engine.of(str(folder), weights="bf16", kv=kv, threads=1, block_tokens=default_block_tokens(kv))
    try:
        prompt = prompts(1, seed=3)[0]
        found = made.add(prompt, prompt_logprobs=VOCAB)
        made.generate([found], 1)
        exact = engine.add(prompt, prompt_logprobs=VOCAB)
        engine.generate([exact], 1)
        assert np.abs(dense(found.prompt_logprobs) - dense(exact.prompt_logprobs)).mean() < 0.2
    finally:
        made.close()


def test_an_attention_that_cannot_read_the_cache_is_refused(folder):
    config = EngineConfig(model=str(folder), backend="torch", kv="int4", attention="sdpa")
    with pytest.raises(InvalidInput, match="attention of its own") as caught:
        BACKEND.load(locate(str(folder)), config)
    assert caught.value.field == "attention"


def test_the_pool_of_an_engine_has_blocks_that_hold_whole_groups(folder):
    from headrace.engine.launch import launch

    core = launch(
        EngineConfig(model=str(folder), backend="torch", kv="int4", threads=1, max_model_len=128, num_blocks=16)
    )
    core.executor.close()
    assert core.info.block_tokens == 32
    assert core.info.kv_precision == "int4"
    with pytest.raises(InvalidInput, match="block_tokens"):
        launch(EngineConfig(model=str(folder), backend="torch", kv="int4", block_tokens=16, max_model_len=128))


def test_auto_passes_over_a_backend_without_the_format(folder):
    from headrace.engine.launch import choose_backend

    backend, notes = choose_backend(EngineConfig(model=str(folder), kv="int8", weights="nf4"), locate(str(folder)))
    assert backend.name == "torch"
    assert any("native" in note for note in notes)
