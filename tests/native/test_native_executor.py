"""What every executor promises, by the native one: the torch executor's scenarios, run again."""

from __future__ import annotations

import random

import headrace_native
import pytest
from safetensors.torch import load_file, save_file
from test_models_logits import VOCAB, random_schedule, tiny_model
from test_torch_executor import (  # noqa: F401
    POISON,
    SAMPLED,
    alone,
    prompts,
    test_a_chunk_that_does_not_sample_fails_too,
    test_a_chunk_that_does_not_sample_gives_no_token,
    test_a_released_slot_starts_clean,
    test_a_row_that_is_not_finite_fails_alone,
    test_a_step_that_raises_tells_whoever_waits_and_the_executor_goes_on,
    test_an_empty_plan_and_times,
    test_batched_and_chunked_equal_alone_and_whole,
    test_blocks_behind_a_window_are_never_read,
    test_blocks_of_a_failed_or_aborted_row_do_not_harm_their_next_owner,
    test_close_ends_the_thread,
    test_copied_blocks_continue_a_prefix_without_touching_it,
    test_drafts_change_nothing_but_the_number_of_steps,
    test_ids_out_of_range_fail_that_row_alone,
    test_preempted_equals_not_preempted,
    test_prompt_logprobs_come_chunk_by_chunk,
    test_steps_may_be_submitted_before_earlier_ones_end,
)
from torch_steps import Engine

from headrace.base.errors import InvalidInput
from headrace.control.step import BlockAppend, BlockCopy, Chunk, StepPlan
from headrace.engine.executors.native import BACKEND
from headrace.engine.sampler.rows import NOT_FINITE
from headrace.spec.accounting import default_block_tokens
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

pytestmark = pytest.mark.usefixtures("native_engines")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models"), "llama")[1]


@pytest.fixture(params=["exact", "int8"])
def engine(folder, native_engines, request):
    weights = "auto"
    if request.param == "int8":
        native_engines["options"], native_engines["kv"], weights = (), "int8", "int8"
    made = Engine.of(str(folder), threads=2, weights=weights)
    yield made
    made.close()


@pytest.fixture
def poisoned(folder, tmp_path, native_engines):
    """The model with one token whose embedding is not a number."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    made = Engine.of(str(tmp_path), threads=2, num_blocks=24)
    yield made
    made.close()


def test_a_copied_block_s_tail_is_not_trusted(poisoned):
    """The copy was taken from a sequence that wrote NaN behind the shared part."""
    prompt = list(range(5, 5 + 27))
    expected = alone(poisoned, prompt, 4)
    source = poisoned.add([*prompt[:-1], POISON, POISON])
    poisoned.step([(source, len(prompt) - 1)])
    assert poisoned.step([(source, 2)]).rows[0].error == NOT_FINITE
    target = poisoned.add(prompt)
    plan = poisoned.plan([])
    fresh = poisoned.free.pop()
    appends = (BlockAppend(target.slot, 0, 0, (source.owned[0], fresh)),)
    copies = (BlockCopy(source.owned[1], fresh),)
    chunks = (Chunk(target.slot, len(prompt) - 1, 1, True),)
    row = poisoned.executor.submit(StepPlan(1, plan.releases, plan.inits, appends, copies, chunks)).result().rows[0]
    assert row.error is None
    target.generated.extend(row.token_ids)
    target.computed, target.blocks = len(prompt), 2
    poisoned.generate([target], 4)
    assert target.generated == expected


@pytest.mark.parametrize("weights", ["auto", "int8", "int4", "fp16", "bf16", "fp32"])
@pytest.mark.parametrize("kv", ["fp16", "bf16", "int8", "fp8", "int4", "fp32"])
def test_predicted_bytes_are_the_real_ones(folder, weights, kv):
    made = Engine.of(str(folder), weights=weights, kv=kv, threads=1, block_tokens=default_block_tokens(kv))
    items = {i.name: i for i in made.model.memory()}
    assert set(items) == {"weights", "kv_pool", *(["kv_staging"] if kv == "int4" else [])}
    for item in items.values():
        assert item.predicted_bytes == item.actual_bytes > 0
    made.close()


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("weights", "fp8", "weights"),
        ("kv", "fp64", "kv"),
        ("attention", "sdpa", "attention"),
        ("block_tokens", 24, "block_tokens"),
        ("options", (("speed", "fast"),), "options"),
        ("options", (("kernels", "sse"),), "options.kernels"),
        ("options", (("activations", "int4"),), "options.activations"),
        ("options", (("pin", "4096"),), "options.pin"),
    ],
)
def test_an_option_it_cannot_honour_is_refused_by_name(folder, field, value, named):
    config = EngineConfig(model=str(folder), backend="native", **{field: value})
    with pytest.raises(InvalidInput) as caught:
        BACKEND.load(locate(str(folder)), config)
    assert caught.value.field == named
    assert caught.value.remedy


def test_dummy_weights_give_the_same_model_twice(folder):
    found = []
    for _ in range(2):
        made = Engine.of(str(folder), load_format="dummy", threads=1)
        sequence = made.add([1, 2, 3])
        made.generate([sequence], 5)
        found.append(sequence.generated)
        made.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("kernels", "activations", "kv"),
    [(k, "int8", "bf16" if k == "avx512-bf16" else "fp16") for k in headrace_native.kernels()]
    + [("auto", "fp32", "fp16")],
)
def test_keys_are_bf16_where_an_instruction_multiplies_them(folder, kernels, activations, kv):
    options = (("kernels", kernels), ("activations", activations))
    config = EngineConfig(model=str(folder), backend="native", options=options)
    assert BACKEND.load(locate(str(folder)), config).kv_precision == kv


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("mode", "kv"), [("int8", "fp16"), ("int8", "bf16"), ("fp32", "fp16")])
def test_batch_chunks_and_threads_change_no_bit(folder, mode, kv, threads, native_engines):
    """Whole distributions, compared for equality: alone, in any batch, in any chunks, on any number of threads."""
    native_engines["options"] = (("activations", mode),)
    native_engines["kv"] = kv
    rng = random.Random(5)
    given = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 5, 16, 17, 40, 63, 64, 130)]

    def distributions(engine, schedule):
        sequences = [engine.add(p, prompt_logprobs=VOCAB, logprobs=VOCAB) for p in given]
        schedule(engine, sequences)
        found = []
        for s in sequences:
            assert not s.errors
            entries = (s.prompt_logprobs + s.logprobs)[: len(s.prompt) + 3]
            found.append((s.generated[:4], [(e.top_ids, e.top_logprobs) for e in entries]))
            engine.remove(s)
        return found

    def one_by_one(engine, sequences):
        for s in sequences:
            engine.generate([s], 4)

    alone_on_one = Engine.of(str(folder), threads=1, weights="int8")
    expected = distributions(alone_on_one, one_by_one)
    alone_on_one.close()
    made = Engine.of(str(folder), threads=threads, weights="int8", num_blocks=600)
    try:
        assert distributions(made, lambda e, s: e.generate(s, 4)) == expected
        for seed in range(3):
            schedule = lambda e, s, seed=seed: random_schedule(e, s, random.Random(seed), 4)  # noqa: E731
            assert distributions(made, schedule) == expected
    finally:
        made.close()


def test_a_value_that_the_cache_cannot_hold_fails_that_row_alone(folder, tmp_path, native_engines):
    """Keys beyond fp16's range would be stored as infinity and read by whoever shares the prefix."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1e6
    save_file(tensors, tmp_path / "model.safetensors")
    native_engines["kv"] = "fp16"
    made = Engine.of(str(tmp_path), threads=1)
    sequence = made.add([1, 2, 3])
    assert made.step([(sequence, 3)]).rows[0].error == NOT_FINITE
    made.close()
    native_engines["kv"] = "fp32"
    made = Engine.of(str(tmp_path), threads=1)
    sequence = made.add([1, 2, 3])
    assert made.step([(sequence, 3)]).rows[0].error is None
    made.close()
