"""The CUDA path with keys and values of 8 and of 4 bits, on tiny random models: the loss is that of the torch backend with the same format,
and batches, chunks, copies, shared prefixes, preemption and overlap change no answer beyond a step between two codes.

Without a GPU the kernels run in Triton's interpreter, which is slow: one model, few tokens.
"""

from __future__ import annotations

import random

import kernel_device
import numpy as np
import pytest
import torch
from test_cuda_steps import test_shared_prefixes_are_found_and_change_nothing as shared_prefixes
from test_models_logits import VOCAB, dense, random_schedule, reference, tiny_model
from test_torch_executor import test_copied_blocks_continue_a_prefix_without_touching_it as copied_blocks
from torch_steps import Engine

from headrace.control.step import BlockAppend, BlockCopy, Chunk, StepPlan
from headrace.engine.cuda import runner
from headrace.engine.cuda.bulk_decode import BulkDecode
from headrace.engine.executors.cuda import BACKEND
from headrace.engine.executors.torch import BACKEND as TORCH
from headrace.engine.kernels.table import GemmTable
from headrace.spec.accounting import default_block_tokens
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

ON_GPU = kernel_device.ON_GPU
EIGHT_BITS = ("fp8", "int8")
CODED = (*EIGHT_BITS, "int4")
LOSS = {"int8": 0.025, "fp8": 0.12, "int4": 0.25}
"""Largest mean difference of log-probabilities from transformers; as for the torch backend."""
ROUNDED = {"fp8": 0.1, "int8": 0.02, "int4": 0.1}
"""Largest difference between two ways to the same tokens: sums in another order put a number here and there into the next code."""


def engine(folder, kv: str, backend=BACKEND, weights: str = "fp32", **sizes) -> Engine:
    options = sizes.pop("options", ())
    config = EngineConfig(
        model=str(folder), backend=backend.name, device="cuda" if ON_GPU and backend is BACKEND else "auto",
        weights=weights, kv=kv, options=options,
    )  # fmt: skip
    files = locate(str(folder))
    assert backend.unavailable(files, config) is None
    return Engine(
        backend.load(files, config),
        **{"num_blocks": 400 if ON_GPU else 80, "max_num_seqs": 8, "max_model_len": 96}
        | ({"block_tokens": default_block_tokens(kv)} if kv == "int4" else {})
        | sizes,
    )


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("cuda"), "qwen2")


@pytest.mark.parametrize("kv", CODED)
@pytest.mark.parametrize(
    "name", ["llama-tied-biased", "mistral-window", "qwen3", "gemma2", "gemma3"] if ON_GPU else ["gemma3"]
)
def test_any_schedule_equals_the_torch_backend_with_the_same_format(tmp_path, name, kv):
    model, folder = tiny_model(tmp_path, name)
    rng = random.Random(name)
    short = (2, 35) if kv == "int4" else (2, 13)
    given = [[rng.randrange(VOCAB) for _ in range(n)] for n in ((2, 9, 33, 64, 70) if ON_GPU else short)]
    count = 10 if ON_GPU else 1
    runs = engine(folder, kv)
    items = {i.name: i for i in runs.model.memory()}
    for item in ("kv_pool", *(["kv_staging"] if kv == "int4" else [])):
        assert items[item].predicted_bytes == items[item].actual_bytes > 0
    found = [runs.add(p, prompt_logprobs=VOCAB, logprobs=VOCAB) for p in given]
    random_schedule(runs, found, random.Random(2), count)
    runs.close()
    whole = engine(folder, kv, TORCH)
    for sequence in found:
        assert not sequence.errors
        tokens = sequence.tokens
        same = whole.add(tokens, prompt_logprobs=VOCAB)
        whole.generate([same], 1)
        whole.remove(same)
        ours = dense(sequence.prompt_logprobs + sequence.logprobs)
        theirs = dense(same.prompt_logprobs)[: len(ours)]
        apart = np.abs(ours[: len(theirs)] - theirs)
        assert apart.max() < ROUNDED[kv]
        assert apart.mean() < ROUNDED[kv] / 10
        expected = reference(model, tokens).numpy()[: len(ours)]
        assert 0 < np.abs(ours - expected[: len(ours)]).mean() < LOSS[kv]
    whole.close()


@pytest.mark.parametrize("kv", EIGHT_BITS if ON_GPU else ["int8"])
def test_shared_prefixes_change_nothing(qwen, kv, monkeypatch):
    """The same scene as with plain keys and values; its answers are clear enough for codes."""
    monkeypatch.setattr("test_cuda_steps.engine", lambda folder, **sizes: engine(folder, kv, **sizes))
    shared_prefixes(qwen, monkeypatch)


def test_prefixes_of_whole_groups_are_shared(qwen, monkeypatch):
    """Four sequences that begin with a block of another's, and read it together, against the same text computed whole."""
    from headrace.engine.cuda import prefixes

    monkeypatch.setattr(prefixes, "MIN_SPARED_TOKENS", 16)
    prompts = [[3 + i for i in range(32)] + [60 + j, 70] for j in range(4)]
    runs = engine(qwen[1], "int4", max_num_seqs=6)
    assert "KV int4: attention of decode steps is cut by a guess, as none was tuned for this card" in runs.model.notes()
    leader = runs.add(prompts[0])
    runs.step([(leader, 33)])
    shared = tuple(runs.executor.runner._slots.tables[0, leader.slot, :1].tolist())
    found = []
    for prompt in prompts:
        sequence = runs.add(prompt, logprobs=VOCAB)
        sequence.blocks, sequence.computed = 1, 32
        found.append(sequence)
    plan = runs.plan([(s, 1) for s in found])
    appends = tuple(BlockAppend(s.slot, 0, 0, shared) for s in found)
    runs.executor.submit(StepPlan(plan.step_id, (), plan.inits, appends + plan.appends, (), plan.chunks)).result()
    for sequence in found:
        sequence.computed = 33
    runs.generate(found, 2 if ON_GPU else 1)
    runs.close()
    whole = engine(qwen[1], "int4", TORCH)
    for sequence in found:
        same = whole.add(sequence.tokens, prompt_logprobs=VOCAB)
        whole.generate([same], 1)
        whole.remove(same)
        ours, theirs = dense(sequence.logprobs), dense(same.prompt_logprobs)[33:]
        assert np.abs(ours - theirs[: len(ours)]).max() < ROUNDED["int4"]
    whole.close()


def test_who_goes_on_in_a_copied_group_sees_its_codes_as_in_the_torch_backend(qwen):
    """No scheduler copies an unfinished group, but a plan may."""
    prompt = [3 + i for i in range(36)]
    seen, staged = [], []
    for backend in (BACKEND, TORCH):
        runs = engine(qwen[1], "int4", backend, max_num_seqs=3)
        first = runs.add(prompt)
        runs.step([(first, 36)])
        second = runs.add(prompt, logprobs=VOCAB)
        fresh = runs.free.pop()
        appends = (BlockAppend(second.slot, 0, 0, (first.owned[0], fresh)),)
        copies, chunks = (BlockCopy(first.owned[1], fresh),), (Chunk(second.slot, 35, 1, True),)
        inits = runs.plan([]).inits
        (row,) = runs.executor.submit(StepPlan(2, (), inits, appends, copies, chunks)).result().rows
        seen.append(dense(row.logprobs))
        if backend is BACKEND:
            keys = runs.executor.runner._decoder.staged.layers.transpose(2, 3)
        else:
            keys = runs.executor._step.__self__._compute.pool._staged
        # The torch backend keeps the two of a rotated pair together: an order of its own.
        staged.append(np.sort(keys[:, second.slot, :4].float().cpu().numpy(), -1))
        runs.close()
    assert np.abs(seen[0] - seen[1]).max() < ROUNDED["int4"]
    # A key here and there is in the next code.
    assert (np.abs(staged[0] - staged[1]) < 5e-3).mean() > 0.95


def test_what_a_layer_launches_with_staged_keys(qwen, monkeypatch):
    """In a start on a GPU each kernel is compiled by a job of its own, those of decode attention apart."""
    from headrace.engine.cuda import decoder as module

    runs = engine(qwen[1], "int4", max_num_seqs=3)
    decoder = runs.executor.runner._decoder
    blank = torch.full((16,), -1, dtype=torch.int32, device=decoder.x.device)
    mixed = module.DeviceStep(blank[:4], blank[:4], blank[:4], 2, blank[:4].view(1, 4), blank[:2].view(1, 2), 64)
    launched = []
    for name in ("rope_cache", "code_groups", "decode_attention", "prefill_groups", "stage_keys"):
        monkeypatch.setattr(module, name, lambda *given, n=name, **named: launched.append(n))
    for job in decoder.compile_jobs(mixed, others=False):
        job()
    assert launched == ["rope_cache", "code_groups", "decode_attention", "prefill_groups", "stage_keys"]
    launched.clear()
    for job in decoder.decode_jobs(mixed):
        job()
    assert launched == ["decode_attention"]
    runs.close()


def test_formats_are_offered_by_name():
    assert BACKEND.formats().kv == ("bf16", "fp16", "fp32", "fp8", "int8", "int4")


GPU = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: too long in the interpreter, or graphs")


def answers(runs: Engine, given, count: int, schedule=None, **rules):
    sequences = [runs.add(p, prompt_logprobs=VOCAB, logprobs=VOCAB, **rules) for p in given]
    if schedule is None:
        runs.generate(sequences, count)
    else:
        schedule(runs, sequences)
    for s in sequences:
        assert not s.errors
        runs.remove(s)
    return sequences


def assert_near(one, other, kv):
    """Up to where two texts part, as they may at a near-tie, their log-probabilities agree."""
    for a, b in zip(one, other, strict=True):
        same = next(
            (i for i, (x, y) in enumerate(zip(a.generated, b.generated, strict=False)) if x != y), len(a.generated)
        )
        ours, theirs = (dense(s.prompt_logprobs + s.logprobs[: same + 1]) for s in (a, b))
        n = min(len(ours), len(theirs))
        apart = np.abs(ours[:n] - theirs[:n])
        assert apart.max() < ROUNDED[kv]
        assert apart.mean() < ROUNDED[kv] / 10


@GPU
@pytest.mark.parametrize("kv", CODED)
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_batch_mates_chunks_and_preemption_change_nothing(qwen, kv, weights, monkeypatch):
    if weights == "bf16":  # products of other row counts round otherwise in 8 bits of mantissa
        monkeypatch.setitem(ROUNDED, kv, 0.35)
    rng = random.Random(5)
    given = [[rng.randrange(VOCAB) for _ in range(n)] for n in (2, 5, 17, 40, 61, 66, 70)]
    runs = engine(qwen[1], kv, weights=weights)
    alone = [answers(runs, [p], 12)[0] for p in given]
    assert_near(alone, answers(runs, given, 12), kv)
    assert_near(alone, answers(runs, given, 12, lambda r, s: random_schedule(r, s, random.Random(1), 12)), kv)
    for sequence in alone:  # preempted after six tokens: computed again with them, in chunks
        again = runs.add(sequence.prompt, generated=sequence.generated[:6], prompt_logprobs=VOCAB)
        runs.generate([again], 12, chunk=7)
        runs.remove(again)
        apart = np.abs(dense(again.prompt_logprobs) - dense(sequence.prompt_logprobs))
        assert apart.max() < ROUNDED[kv]
    runs.close()


@pytest.mark.skipif(
    not ON_GPU or torch.cuda.get_device_capability()[0] != 9, reason="needs a GPU of compute capability 9"
)
@pytest.mark.parametrize("kv", EIGHT_BITS)
def test_bulk_copies_and_plain_loads_find_the_same(tmp_path, kv, monkeypatch):
    """Decode steps as graphs and beside prompts; and both are as near to the torch backend."""
    monkeypatch.setitem(ROUNDED, kv, 0.35)
    monkeypatch.setattr(runner, "graph_sizes", lambda most: [1, most])
    monkeypatch.setattr(runner.Runner, "_mixed_sizes", lambda _: [])
    sizes = {
        "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    folder = tiny_model(tmp_path, "llama", **sizes)[1]
    rng = random.Random(8)
    given = [[rng.randrange(VOCAB) for _ in range(n)] for n in (3, 15, 16, 40, 61, 130)]
    found = []
    for serves in (True, False):
        if not serves:
            monkeypatch.setattr(BulkDecode, "serves", lambda *_: False)
        runs = engine(folder, kv, weights="bf16", block_tokens=16, max_model_len=256)
        assert runs.executor.runner._decoder.bulk.serves(0) is serves
        found.append(
            answers(runs, given, 40)
            + answers(runs, given, 12, lambda r, s: random_schedule(r, s, random.Random(1), 12))
        )
        runs.close()
    assert_near(*found, kv)
    whole = engine(folder, kv, TORCH, weights="bf16", block_tokens=16, max_model_len=256)
    errors = []
    for answered in found:
        apart = []
        for sequence in answered[: len(given)]:
            same = whole.add(sequence.tokens, prompt_logprobs=VOCAB)
            whole.generate([same], 1)
            whole.remove(same)
            ours = dense(sequence.prompt_logprobs + sequence.logprobs)
            theirs = dense(same.prompt_logprobs)
            count = min(len(ours), len(theirs))
            apart.append(np.abs(ours[:count] - theirs[:count]).ravel())
        errors.append(np.concatenate(apart).mean())
    whole.close()
    print(f"{kv}: mean distance from the torch backend {errors[0]:.5f} by bulk copies, {errors[1]:.5f} by plain loads")
    assert errors[0] < 1.2 * errors[1]


def test_notes_say_whether_four_bits_were_tuned_on_the_card(qwen, monkeypatch):
    asked = []
    monkeypatch.setattr(GemmTable, "has_decode", lambda _, dim, kv: (asked.append((dim, kv)), True)[1])
    runs = engine(qwen[1], "int4", max_num_seqs=2)
    assert "KV int4: attention of decode steps is cut as measured on this card" in runs.model.notes()
    assert asked == [(runs.executor.runner._decoder._mixers[0].head_dim, "int4")]
    monkeypatch.undo()
    measured, elsewhere = GemmTable("NVIDIA H200", 132), GemmTable("NVIDIA L4", 58)
    assert measured.has_decode(128, "int4")
    assert not measured.has_decode(64, "int4")
    assert not elsewhere.has_decode(128, "int4")
    runs.close()


@GPU
@pytest.mark.parametrize("kv", EIGHT_BITS)
def test_copied_blocks_continue_a_prefix_without_touching_it(qwen, kv):
    runs = engine(qwen[1], kv, max_model_len=128)
    copied_blocks(runs)
    runs.close()


@GPU
@pytest.mark.parametrize("kv", CODED)
def test_graphs_change_nothing(qwen, kv):
    rng = random.Random(6)
    given = [[rng.randrange(VOCAB) for _ in range(n)] for n in (3, 5, 9, 40, 61)]
    found = []
    for graphs in ("0", "1"):
        runs = engine(qwen[1], kv, options=(("graphs", graphs),))
        found.append(answers(runs, given, 20))
        runs.close()
    assert_near(*found, kv)  # products of padded and unpadded rows are rounded otherwise


@GPU
@pytest.mark.parametrize("kv", CODED)
def test_overlapped_steps_take_ids_that_the_host_has_not_seen(qwen, kv):
    rng = random.Random(7)
    given = [[rng.randrange(VOCAB) for _ in range(n)] for n in (3, 12, 30)]
    runs = engine(qwen[1], kv)
    expected = [s.generated for s in answers(runs, given, 4)]
    sequences = [runs.add(p) for p in given]
    handles = []
    for _ in range(4):
        work = [(s, s.known - s.computed) for s in sequences]
        handles.append(runs.executor.submit(runs.plan(work)))
        for s, count in work:
            s.computed += count
            s.generated.append(0)
    results = [h.result() for h in handles]
    assert [[r.rows[i].token_ids[0] for r in results] for i in range(3)] == expected
    runs.close()
    torch.cuda.synchronize()


def test_formats_with_codes_have_entries_of_their_own_in_the_kernel_table(monkeypatch, tmp_path):
    from headrace.engine.kernels.table import GemmTable

    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))
    table = GemmTable("NVIDIA H200", 132)
    plain = table.decode(64, 128)
    assert table.decode(64, 128, "bf16") == plain
    for kv in EIGHT_BITS:
        assert table.decode(64, 128, kv).keys() == plain.keys()
        assert table.decode(64, 128, kv) != plain
    assert table.decode(64, 80, "fp8") is None
