"""What an executor promises, on a tiny random model: order, isolation of rows, drafts, copies, windows, memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models_logits import VOCAB, dense, random_schedule, reference, tiny_model
from torch_steps import Engine

from headrace.base.errors import InvalidInput
from headrace.control.step import BlockAppend, BlockCopy, Chunk, StepPlan
from headrace.engine.executors.torch import BACKEND
from headrace.engine.memory import available_bytes
from headrace.engine.sampler.sampler import NOT_FINITE
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

POISON = 77
SAMPLED = {"temperature": 1.0, "seed": 11, "top_p": 0.9, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models"), "llama")[1]


@pytest.fixture
def engine(folder):
    made = Engine.of(str(folder), threads=1)
    yield made
    made.close()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB - 1) % POISON for _ in range(rng.randint(1, 60))] for _ in range(count)]


def alone(engine: Engine, prompt, tokens: int, **sampling) -> list[int]:
    sequence = engine.add(prompt, **sampling)
    engine.generate([sequence], tokens)
    engine.remove(sequence)
    return sequence.generated


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_batched_and_chunked_equal_alone_and_whole(engine, sampling):
    given = prompts(12)
    expected = [alone(engine, p, 15, **sampling) for p in given]
    together = [engine.add(p, **sampling) for p in given]
    engine.generate(together, 15)
    assert [s.generated for s in together] == expected
    for s in together:
        engine.remove(s)
    mixed = [engine.add(p, **sampling) for p in given]
    random_schedule(engine, mixed, random.Random(1), 15)
    assert [s.generated[:15] for s in mixed] == expected


def test_preempted_equals_not_preempted(engine):
    prompt = prompts(1)[0]
    expected = alone(engine, prompt, 20, **SAMPLED)
    first = engine.add(prompt, **SAMPLED)
    engine.generate([first], 8)
    engine.remove(first)
    again = engine.add(prompt, generated=first.generated, **SAMPLED)
    engine.generate([again], 20, chunk=7)
    assert again.generated == expected


def test_steps_may_be_submitted_before_earlier_ones_end(engine):
    given = prompts(5)
    expected = [alone(engine, p, 10, **SAMPLED) for p in given]
    sequences = [engine.add(p, **SAMPLED) for p in given]
    handles = []
    for _ in range(10):
        work = [(s, s.known - s.computed) for s in sequences]
        handles.append(engine.executor.submit(engine.plan(work)))
        for s, count in work:
            s.computed += count
            s.generated.append(-1)  # known to the executor alone
    results = [h.result() for h in handles]
    assert all(h.done() for h in handles)
    found = [[r.rows[i].token_ids[0] for r in results] for i in range(5)]
    assert found == expected


def test_a_chunk_that_does_not_sample_gives_no_token(engine):
    sequence = engine.add(range(20))
    row = engine.step([(sequence, 7)]).rows[0]
    assert row.token_ids == ()
    assert row.error is None


def test_an_empty_plan_and_times(engine):
    result = engine.step([])
    assert result.rows == ()
    sequence = engine.add([1, 2, 3])
    result = engine.step([(sequence, 3)])
    assert 0 < result.compute_s <= result.total_s


def test_prompt_logprobs_come_chunk_by_chunk(engine):
    prompt = prompts(1, seed=5)[0] * 3
    whole = engine.add(prompt, prompt_logprobs=3)
    engine.generate([whole], 1)
    parts = engine.add(prompt, prompt_logprobs=3)
    counts = []
    while not parts.generated:
        before = len(parts.prompt_logprobs)
        engine.step([(parts, min(13, parts.known - parts.computed))])
        counts.append(len(parts.prompt_logprobs) - before)
    assert counts[0] == 13
    assert [e.token_id for e in parts.prompt_logprobs] == prompt[1:]
    np.testing.assert_allclose(
        [e.logprob for e in parts.prompt_logprobs], [e.logprob for e in whole.prompt_logprobs], atol=1e-4
    )


# ---------------------------------------------------------------------------------------------------- isolation


@pytest.fixture
def poisoned(folder, tmp_path):
    """The model with one token whose embedding is not a number."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    made = Engine.of(str(tmp_path), threads=1, num_blocks=24)
    yield made
    made.close()


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_row_that_is_not_finite_fails_alone(poisoned, sampling):
    good = prompts(2, seed=3)
    expected = [alone(poisoned, p, 6, **sampling) for p in good]
    sequences = [
        poisoned.add(good[0], **sampling),
        poisoned.add([5, POISON, 6], **sampling),
        poisoned.add(good[1], **sampling),
    ]
    result = poisoned.step([(s, s.known) for s in sequences])
    assert [r.error for r in result.rows] == [None, NOT_FINITE, None]
    assert result.rows[1].token_ids == ()
    survivors = [sequences[0], sequences[2]]
    poisoned.generate(survivors, 6)
    assert [s.generated for s in survivors] == expected


def test_a_chunk_that_does_not_sample_fails_too(poisoned):
    """Otherwise its blocks, also those before the bad token, would be published to others with the same prefix."""
    bad, good = poisoned.add([1, 2, 3, POISON, 4, 5, 6]), poisoned.add([1, 2, 3, 9, 4, 5, 6])
    result = poisoned.step([(bad, 5), (good, 5)])
    assert [r.error for r in result.rows] == [NOT_FINITE, None]
    assert [r.token_ids for r in result.rows] == [(), ()]


def test_blocks_of_a_failed_or_aborted_row_do_not_harm_their_next_owner(poisoned):
    """Every block of the pool is left full of NaN, by a row that failed and by one aborted before it sampled."""
    good = prompts(4, seed=4)
    expected = [alone(poisoned, p, 12) for p in good]
    for sampled in (True, False):
        victim = poisoned.add([POISON] * (23 * 8))
        poisoned.step([(victim, victim.known if sampled else victim.known - 1)])
        poisoned.remove(victim)
        for prompt, tokens in zip(good, expected, strict=True):
            assert alone(poisoned, prompt, 12) == tokens
        later = [poisoned.add(p) for p in good[:2]]
        random_schedule(poisoned, later, random.Random(2), 12)
        assert [s.generated[:12] for s in later] == expected[:2]
        for s in later:
            poisoned.remove(s)


def test_ids_out_of_range_fail_that_row_alone(engine):
    expected = alone(engine, [1, 2, 3], 3)
    bad = [engine.add([5, VOCAB, 6]), engine.add([-1]), engine.add([4], logit_bias={VOCAB: 1.0})]
    good = engine.add([1, 2, 3])
    result = engine.step([(s, s.known) for s in (*bad, good)])
    for row in result.rows[:3]:
        assert "between 0 and" in row.error
        assert row.token_ids == ()
    engine.generate([good], 3)
    assert good.generated == expected


def test_a_released_slot_starts_clean(engine):
    first = engine.add([1, 2, 3], logit_bias={9: 100.0}, logprobs=2)
    engine.generate([first], 2)
    assert first.generated == [9, 9]
    engine.remove(first)
    engine.free_slots = [first.slot]
    second = engine.add([1, 2, 3])
    engine.generate([second], 2)
    assert second.generated != [9, 9]
    assert second.logprobs == []


def test_a_step_that_raises_tells_whoever_waits_and_the_executor_goes_on(engine):
    broken = StepPlan(99, chunks=(Chunk(10**6, 0, 1, True),))
    with pytest.raises(IndexError):
        engine.executor.submit(broken).result()
    assert len(alone(engine, [1, 2], 2)) == 2


def test_close_ends_the_thread(folder):
    made = Engine.of(str(folder), threads=1)
    sequence = made.add([1, 2, 3])
    handle = made.executor.submit(made.plan([(sequence, 3)]))
    made.close()
    assert handle.done()
    with pytest.raises(RuntimeError):
        made.executor.submit(StepPlan(1))
    made.close()


# ------------------------------------------------------------------------------------- copies, windows, drafts


def test_copied_blocks_continue_a_prefix_without_touching_it(engine):
    prompt = prompts(1, seed=8)[0] + list(range(13))
    expected = alone(engine, prompt, 10)
    first = engine.add(prompt)
    engine.generate([first], 3)
    block_tokens = engine.layout.block_tokens
    shared = len(prompt) // block_tokens
    second = engine.add(prompt)
    second.computed = len(prompt) - 1
    fresh = engine.free.pop()
    engine.copies = [BlockCopy(first.owned[shared], fresh)]
    plan = engine.plan([])
    appends = (BlockAppend(second.slot, 0, 0, (*first.owned[:shared], fresh)),)
    chunks = (Chunk(second.slot, len(prompt) - 1, 1, True),)
    result = engine.executor.submit(StepPlan(1, plan.releases, plan.inits, appends, plan.copies, chunks)).result()
    second.generated.extend(result.rows[0].token_ids)
    second.computed += 1
    second.blocks, second.owned = shared + 1, [fresh]
    engine.generate([first, second], 10)
    assert first.generated == second.generated == expected


def test_a_copied_block_s_tail_is_not_trusted(poisoned):
    """The copy was taken from a sequence that wrote NaN behind the shared part."""
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
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


def test_blocks_behind_a_window_are_never_read(tmp_path):
    """They are taken away and given to another sequence, which overwrites them."""
    model, folder = tiny_model(tmp_path, "mistral-window")
    made = Engine.of(str(folder), threads=1)
    prompt = prompts(1, seed=9)[0][:20] + list(range(30))
    sequence = made.add(prompt, logprobs=VOCAB)
    made.generate([sequence], 4)
    window, block_tokens = 12, made.layout.block_tokens
    gone = (sequence.computed + 1 - window) // block_tokens
    taken = sequence.owned[:gone]
    made.executor.submit(StepPlan(0, appends=(BlockAppend(sequence.slot, 0, 0, (-1,) * gone),))).result()
    made.free.extend(taken)
    other = made.add([3] * (gone * block_tokens))
    made.step([(other, other.known)])
    assert set(taken) <= set(other.owned)
    made.generate([sequence], 10)
    expected = reference(model, sequence.tokens).numpy()[-11:-1]
    np.testing.assert_allclose(dense(sequence.logprobs), expected, atol=1e-4)
    made.close()


@pytest.mark.parametrize(
    "sampling", [{}, SAMPLED, {"min_tokens": 9, "frequency_penalty": 0.5}], ids=["greedy", "sampled", "rules"]
)
def test_drafts_change_nothing_but_the_number_of_steps(engine, sampling):
    prompt = prompts(1, seed=6)[0]
    expected = alone(engine, prompt, 24, logprobs=2, **sampling)
    rng = random.Random(3)
    sequence = engine.add(prompt, logprobs=2, **sampling)
    bystander = engine.add(prompt, **sampling)
    steps = 0
    while len(sequence.generated) < 24:
        known = len(sequence.generated)
        right = expected[known : known + rng.randint(0, 4)] if known else []
        drafts = tuple(t if rng.random() < 0.7 else (t + 1) % VOCAB for t in right)
        work = [(sequence, sequence.known - sequence.computed)]
        if len(bystander.generated) < 24:
            work.append((bystander, bystander.known - bystander.computed))
        engine.step(work, {sequence.slot: drafts} if drafts else None)
        steps += 1
    assert sequence.generated[:24] == expected
    assert len(sequence.logprobs) == len(sequence.generated)
    assert bystander.generated == expected[: len(bystander.generated)]
    assert steps < 24


# ------------------------------------------------------------------------------------------ memory and options


@pytest.mark.parametrize(("weights", "kv"), [("auto", "auto"), ("fp32", "bf16"), ("bf16", "fp16")])
def test_predicted_bytes_are_the_real_ones(folder, weights, kv):
    made = Engine.of(str(folder), weights=weights, kv=kv, threads=1)
    items = {i.name: i for i in made.model.memory()}
    assert set(items) == {"weights", "kv_pool"}
    for item in items.values():
        assert item.predicted_bytes == item.actual_bytes > 0
    made.close()


@pytest.mark.parametrize("name", ["llama-tied-biased", "gemma3", "mixtral", "qwen3_moe", "phi3"])
def test_predicted_bytes_of_other_shapes(tmp_path, name):
    made = Engine.of(str(tiny_model(tmp_path, name)[1]), threads=1)
    for item in made.model.memory():
        assert item.predicted_bytes == item.actual_bytes > 0
    made.close()


def test_a_half_precision_cache_stays_close(folder):
    prompt = prompts(1, seed=2)[0] + list(range(40))
    found = []
    for kv in ("fp32", "fp16", "bf16"):
        made = Engine.of(str(folder), kv=kv, threads=1)
        sequence = made.add(prompt, prompt_logprobs=VOCAB)
        for _ in range(4):
            made.step([(sequence, 10)])
        found.append(dense(sequence.prompt_logprobs))
        made.close()
    assert 0 < np.abs(found[1] - found[0]).max() < 0.02
    assert 0 < np.abs(found[2] - found[0]).max() < 0.2


def test_bf16_weights_stay_close(folder):
    model_logits = []
    for weights in ("fp32", "bf16"):
        made = Engine.of(str(folder), weights=weights, threads=1)
        sequence = made.add(prompts(1, seed=2)[0], prompt_logprobs=VOCAB)
        made.generate([sequence], 1)
        model_logits.append(np.exp(dense(sequence.prompt_logprobs)))
        made.close()
    assert 0 < np.abs(model_logits[0] - model_logits[1]).sum(-1).mean() < 0.25


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_the_attention_backend_can_be_chosen(folder, engine, attention):
    expected = [alone(engine, p, 8) for p in prompts(3)]
    made = Engine.of(str(folder), attention=attention, threads=1)
    assert any(attention in note for note in made.model.notes())
    assert [alone(made, p, 8) for p in prompts(3)] == expected
    made.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [("weights", "int3"), ("kv", "int3"), ("attention", "magic"), ("options", (("colour", "red"),))],
)
def test_what_is_not_supported_is_refused_by_name(folder, field, value):
    config = EngineConfig(model=str(folder), **{field: value})
    with pytest.raises(InvalidInput) as caught:
        BACKEND.load(locate(str(folder)), config)
    assert caught.value.field == field


def test_a_device_that_is_not_served_is_a_reason(folder):
    reason = BACKEND.unavailable(locate(str(folder)), EngineConfig(model=str(folder), device="cuda"))
    assert "cuda" in reason


def test_the_profile_adds_up(folder):
    made = Engine.of(str(folder), options=(("profile", "1"),), threads=1)
    sequence = made.add(range(50))
    result = made.step([(sequence, 50)])
    profile = made.model.profile
    assert profile.gemm_s > 0
    assert profile.attention_s > 0
    assert profile.gemm_s + profile.attention_s < result.total_s
    made.close()


def test_the_budget_is_what_is_left(folder):
    model = Engine.of(str(folder), threads=1).model
    half, whole = (model.kv_budget_bytes(f, 8, 64) for f in (0.5, 1.0))
    assert half < whole < available_bytes() * 1.2
    assert model.kv_budget_bytes(0.0, 8, 64) < 0
    assert model.kv_budget_bytes(0.5, 8, 4096) < half


def test_available_memory_respects_the_control_group(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable:    5000 kB\n")
    assert available_bytes(tmp_path) == 5000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    for path, limit in (("a/b", "max"), ("a", "3000000")):
        folder = tmp_path / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("2000000")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 400000\n")
    assert available_bytes(tmp_path) == 3000000 - 2000000 + 400000


def test_loading_a_model_imports_no_compiler(folder):
    """Start-up stays lean: torch's compiler stack alone takes longer to import than the model to load."""
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from headrace.engine.executors.torch import BACKEND\n"
        "assert 'torch' not in sys.modules\n"
        "from headrace.spec.locate import locate\n"
        "from headrace.spec.config import EngineConfig\n"
        f"BACKEND.load(locate({str(folder)!r}), EngineConfig(model={str(folder)!r}))\n"
        "assert 'torch' in sys.modules\n"
        "assert 'transformers' not in sys.modules\n"
        "heavy = [m for m in ('torch._inductor', 'sympy', 'torch._dynamo') if m in sys.modules]\n"
        "import torch; bare = set(sys.modules)\n"
        "print(heavy)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "torch._inductor" not in found.stdout


def test_torch_tensors_are_not_needed_to_talk_to_it(engine):
    """Results are plain messages."""
    sequence = engine.add([1, 2, 3], logprobs=1)
    row = engine.step([(sequence, 3)]).rows[0]
    assert isinstance(row.token_ids[0], int)
    assert not isinstance(row.logprobs[0].logprob, torch.Tensor)
