"""Coded keys and values in the native backend: the executor's scenarios, the torch backend's figures, and refusals."""

from __future__ import annotations

import random

import numpy as np
import pytest
from one_layer import SLOTS, Native, Shape, tables
from safetensors.torch import load_file, save_file
from test_models_logits import VOCAB, dense, tiny_model
from test_torch_executor import (  # noqa: F401
    POISON,
    SAMPLED,
    alone,
    prompts,
    test_a_chunk_that_does_not_sample_fails_too,
    test_a_released_slot_starts_clean,
    test_a_row_that_is_not_finite_fails_alone,
    test_batched_and_chunked_equal_alone_and_whole,
    test_blocks_of_a_failed_or_aborted_row_do_not_harm_their_next_owner,
    test_preempted_equals_not_preempted,
    test_prompt_logprobs_come_chunk_by_chunk,
    test_steps_may_be_submitted_before_earlier_ones_end,
)
from test_torch_executor import test_copied_blocks_continue_a_prefix_without_touching_it as copied_blocks
from test_torch_executor import test_drafts_change_nothing_but_the_number_of_steps as drafts
from torch_steps import Engine

from headrace.base.errors import InvalidInput
from headrace.engine.executors.native import BACKEND
from headrace.engine.native.memory import buffer
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

pytestmark = pytest.mark.usefixtures("native_engines")
CODED = ("fp8", "int4")
BLOCK = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models"), "llama")[1]


@pytest.fixture(params=CODED)
def engine(folder, native_engines, request):
    native_engines["kv"] = request.param
    made = Engine.of(str(folder), threads=2, block_tokens=BLOCK)
    yield made
    made.close()


@pytest.fixture(params=CODED)
def poisoned(folder, tmp_path, native_engines, request):
    """The model with one token whose embedding is not a number."""
    native_engines["kv"] = request.param
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    made = Engine.of(str(tmp_path), threads=2, num_blocks=24, block_tokens=BLOCK)
    yield made
    made.close()


def test_copies_and_drafts_change_nothing(folder, native_engines):
    """Not of int4: it never copies a part of a block for a prefix (`CacheLayout.whole_blocks`)."""
    native_engines["kv"] = "fp8"
    made = Engine.of(str(folder), threads=2)
    try:
        copied_blocks(made)
        drafts(made, {})
    finally:
        made.close()


def test_a_copy_of_a_part_of_a_group_goes_on_from_its_codes(folder, native_engines):
    """What no scheduler asks of int4 is answered all the same, within what the codes lose."""
    from headrace.control.step import BlockAppend, BlockCopy, Chunk, StepPlan

    native_engines["kv"] = "int4"
    made = Engine.of(str(folder), threads=2, block_tokens=BLOCK)
    try:
        prompt = list(range(5, 5 + 45))
        whole = made.add(prompt, prompt_logprobs=VOCAB, logprobs=VOCAB)
        made.generate([whole], 1)
        second = made.add(prompt, logprobs=VOCAB)
        fresh = made.free.pop()
        plan = made.plan([])
        appends = (BlockAppend(second.slot, 0, 0, (whole.owned[0], fresh)),)
        copies = (BlockCopy(whole.owned[1], fresh),)
        chunks = (Chunk(second.slot, len(prompt) - 1, 1, True),)
        row = made.executor.submit(StepPlan(7, plan.releases, plan.inits, appends, copies, chunks)).result().rows[0]
        apart = np.abs(dense(row.logprobs) - dense(whole.logprobs[:1]))
        assert 0 < apart.mean() < 0.3
    finally:
        made.close()


@pytest.mark.parametrize("kv", ["int8", *CODED])
def test_the_torch_backend_gives_the_same_distributions(folder, native_engines, kv):
    """Both round alike; a product that differs in its last bit may move a number to the next code, seldom enough."""
    from headrace.engine.executors.torch import BACKEND as TORCH

    given = [[random.Random(n).randrange(VOCAB) for _ in range(n)] for n in (3, 33, 70, 130)]
    found = []
    for backend in ("native", "torch"):
        if backend == "native":
            native_engines["kv"] = kv
            made = Engine.of(str(folder), threads=1, block_tokens=BLOCK)
        else:
            config = EngineConfig(model=str(folder), kv=kv, threads=1)
            made = Engine(TORCH.load(locate(str(folder)), config), block_tokens=BLOCK)
        try:
            sequences = [made.add(p, prompt_logprobs=VOCAB) for p in given]
            made.generate(sequences, 1)
            found.append([dense(s.prompt_logprobs) for s in sequences])
        finally:
            made.close()
    for ours, theirs in zip(*found, strict=True):
        assert np.abs(ours - theirs).mean() < 2e-3
        assert np.median(np.abs(ours - theirs)) < 1e-4


def test_batch_chunks_and_threads_change_no_bit(folder, native_engines):
    native_engines["kv"] = "int4"
    given = [[random.Random(n).randrange(VOCAB) for _ in range(n)] for n in (1, 31, 32, 33, 64, 130)]
    found = []
    for threads, chunk in ((1, 10**9), (2, 7), (3, 32)):
        made = Engine.of(str(folder), threads=threads, block_tokens=BLOCK)
        try:
            sequences = [made.add(p, prompt_logprobs=VOCAB) for p in given]
            for group in [[s] for s in sequences] if threads == 1 else [sequences]:
                made.generate(group, 4, chunk=chunk)
            found.append([(s.generated[:4], dense(s.prompt_logprobs).tolist()) for s in sequences if len(s.prompt) > 1])
        finally:
            made.close()
    assert found[0] == found[1] == found[2]


def test_blocks_that_cut_a_group_are_refused(folder):
    config = EngineConfig(model=str(folder), backend="native", kv="int4", block_tokens=16)
    with pytest.raises(InvalidInput, match="multiple of 32") as caught:
        BACKEND.load(locate(str(folder)), config)
    assert caught.value.field == "block_tokens"


def test_a_step_without_its_staging_is_refused():
    native = Native(Shape(kv="int4"))
    table = tables(native.s, 2, np.random.default_rng(0))
    native.step([(0, 0, np.arange(5))], table)
    tokens, starts, context = np.arange(3, dtype=np.int32), np.array([0, 2, 3], np.int32), np.zeros(2, np.int32)
    cos, sin = native.s.angles([0, 1, 0])
    given = [
        tokens,
        starts,
        context,
        np.ascontiguousarray(table)[None],
        [cos],
        [sin],
        tokens[:1],
        np.zeros(2, np.uint8),
    ]
    slots, restored = np.array([0, 1], np.int32), np.zeros(2, np.uint8)
    native.model.step(*given, slots, restored)
    for wrong, named in (
        ((), "slots"),
        ((np.array([0, 0], np.int32), restored), "slots"),
        ((np.array([0, SLOTS], np.int32), restored), "slots"),
        ((np.array([-1, 0], np.int32), restored), "slots"),
        ((slots[:1], restored), "slots"),
        ((slots, restored[:1]), "restored"),
    ):
        with pytest.raises(ValueError, match=named):
            native.model.step(*given, *wrong)
    with pytest.raises(ValueError, match="staging"):
        native.model.set_staging(buffer(64), 1)
    with pytest.raises(ValueError, match="4-bit"):
        Native(Shape()).model.set_staging(buffer(64), 1)
    with pytest.raises(ValueError, match="32"):
        native.model.set_kv(native.kv, 4, 1, 80, 16, 2, 16, 16, 1)


@pytest.mark.model
def test_the_loss_on_a_real_model_is_what_the_formats_promise(tmp_path):
    """KL divergence from fp32 keys and values, in nats per token; the bounds are two to three times what was measured."""
    from headrace.engine.quality.choices import built_in
    from headrace.engine.quality.measure import Settings, built_in_text, measure

    config = EngineConfig(model="smollm2-135m", backend="native", threads=2, options=(("activations", "fp32"),))
    settings = Settings(window=160, stride=100, tokens=160, prompts=1, prompt_tokens=16, agreement=2)
    formats = [("auto", kv) for kv in ("fp16", "int8", "fp8", "int4")]
    report = measure(
        config, formats, built_in_text(), "alice", built_in()[:1], settings, reference="native", scratch=tmp_path
    )
    found = [f.kl_nats.value for f in report.formats]
    for value, most in zip(found, (3e-6, 2.5e-3, 0.02, 0.04), strict=True):
        assert 0 < value < most, found
