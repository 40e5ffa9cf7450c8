"""The whole CUDA path on tiny random models of each architecture: equal to transformers, alone, mixed, chunked and sampled.

Without a GPU the kernels run in Triton's interpreter in fp32; with one, in bf16 and through captured graphs as well.
"""

from __future__ import annotations

import random
from dataclasses import replace

import kernel_device
import numpy as np
import pytest
import torch
from test_models_logits import CASES, VOCAB, dense, reference, tiny_model
from torch_steps import Engine

from headrace.engine.executors.cuda import BACKEND
from headrace.engine.executors.torch import BACKEND as TORCH
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

ON_GPU = kernel_device.ON_GPU
DENSE = [name for name in CASES if "moe" not in name and name != "mixtral"]
QUICK = ["llama-tied-biased", "mistral-window", "gemma3", "phi3-longrope-partial"]
TOLERANCE = 1e-4 if not ON_GPU else 2e-3


def engine(folder, backend=BACKEND, **sizes) -> Engine:
    config = EngineConfig(
        model=str(folder), backend=backend.name, device="cuda" if ON_GPU and backend is BACKEND else "auto",
        weights="fp32", kv="fp32",
    )  # fmt: skip
    files = locate(str(folder))
    assert backend.unavailable(files, config) is None
    return Engine(backend.load(files, config), **{"num_blocks": 60, "max_num_seqs": 4, "max_model_len": 64} | sizes)


@pytest.mark.parametrize("name", DENSE if ON_GPU else QUICK)
def test_distributions_equal_transformers(tmp_path, name):
    model, folder = tiny_model(tmp_path, name)
    rng = random.Random(3)
    runs = engine(folder)
    long = runs.add([rng.randrange(3, VOCAB) for _ in range(21)], logprobs=VOCAB, prompt_logprobs=VOCAB)
    short = runs.add([rng.randrange(3, VOCAB) for _ in range(3)], logprobs=VOCAB)
    runs.step([(long, 9)])
    runs.step([(short, 3), (long, 11)])
    runs.step([(long, 1), (short, 1)])
    runs.step([(short, 1), (long, 1)])
    assert not long.errors
    assert not short.errors
    wanted = reference(model, long.tokens).numpy()
    assert np.abs(dense(long.prompt_logprobs) - wanted[:20]).max() < TOLERANCE
    assert np.abs(dense(long.logprobs) - wanted[20:-1]).max() < TOLERANCE
    wanted = reference(model, short.tokens).numpy()
    assert np.abs(dense(short.logprobs) - wanted[2:-1]).max() < TOLERANCE
    for sequence in (long, short):
        best = reference(model, sequence.tokens).argmax(-1).tolist()
        assert sequence.generated == best[len(sequence.prompt) - 1 : -1]
    runs.close()


@pytest.mark.parametrize("name", ["llama-mha", "qwen2"])
def test_products_that_add_to_the_residual_stream_change_nothing(tmp_path, name, monkeypatch):
    from headrace.engine.cuda import decoder

    model, folder = tiny_model(tmp_path, name)
    monkeypatch.setattr(decoder, "ADDED_ROWS", 1)
    runs = engine(folder)
    sequence = runs.add([random.Random(1).randrange(3, VOCAB) for _ in range(13)], logprobs=VOCAB)
    runs.step([(sequence, 7)])
    runs.step([(sequence, 6)])
    runs.step([(sequence, 1)])
    wanted = reference(model, sequence.tokens).numpy()
    assert np.abs(dense(sequence.logprobs) - wanted[12:-1]).max() < TOLERANCE
    runs.close()


def test_queries_that_nobody_reads_are_not_projected(tmp_path, monkeypatch):
    from headrace.engine.cuda import runner

    model, folder = tiny_model(tmp_path, "llama-mha")
    monkeypatch.setattr(runner, "LAST_TOKENS", 1)
    runs = engine(folder, max_model_len=256)
    of, spans = runs.executor.runner, []
    of._graphed = False  # captured steps project all of them
    real = of._decoder.run
    monkeypatch.setattr(of._decoder, "run", lambda s, *a, **k: (spans.append(s.last_rows), real(s, *a, **k))[1])
    rng = random.Random(4)
    first, second, third = (runs.add([rng.randrange(3, VOCAB) for _ in range(n)], logprobs=VOCAB) for n in (5, 131, 3))
    runs.step([(first, 5), (second, 131)])
    runs.step([(first, 1), (second, 1), (third, 3)])
    assert spans == [[(0, 5), (5 + 128, 5 + 131)], [(0, 2), (2, 5)]]  # tiles of 128
    for sequence in (first, second, third):
        wanted = reference(model, sequence.tokens).numpy()
        assert np.abs(dense(sequence.logprobs) - wanted[len(sequence.prompt) - 1 : -1]).max() < TOLERANCE
    runs.close()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("cuda"), "qwen2")


def test_overlapped_steps_take_ids_that_the_host_has_not_seen(qwen):
    model, folder = qwen
    runs = engine(folder)
    prompt = [5, 9, 77, 30]
    sequence = runs.add(prompt)
    first = runs.executor.submit(runs.plan([(sequence, 4)]))
    sequence.computed = 4
    sequence.generated.append(0)  # a placeholder: the device alone knows it
    second = runs.executor.submit(runs.plan([(sequence, 1)]))
    sequence.computed = 5
    sequence.generated.append(0)
    third = runs.executor.submit(runs.plan([(sequence, 1)]))
    tokens = list(prompt)
    for step in (first, second, third):
        (row,) = step.result().rows
        tokens += row.token_ids
    best = reference(model, tokens).argmax(-1).tolist()
    assert tokens[4:] == best[3:-1]
    runs.close()


def test_chunks_take_sampled_ids_that_the_host_has_not_seen(qwen):
    """As after a step that is computed anew from its first token."""
    model, folder = qwen
    runs = engine(folder)
    prompt = [5, 9, 77, 30]
    sequence = runs.add(prompt)
    first = runs.executor.submit(runs.plan([(sequence, 4)]))
    sequence.generated.append(0)  # a placeholder: the device alone knows it
    second = runs.executor.submit(runs.plan([(sequence, 5)]))
    tokens = list(prompt)
    for step in (first, second):
        (row,) = step.result().rows
        tokens += row.token_ids
    best = reference(model, tokens).argmax(-1).tolist()
    assert tokens[4:] == best[3:-1]
    assert tokens[4] != 0
    runs.close()


RULES = [
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "top_k": 7, "top_p": 0.8, "seed": 4},
    {"temperature": 1.0, "min_p": 0.2, "seed": 5, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "logit_bias": {7: 4.0, 9: -50.0}, "min_tokens": 3, "stop_token_ids": (11,), "logprobs": 3},
]


def test_sampling_equals_the_torch_executor(qwen):
    _, folder = qwen
    found = {}
    for backend in (BACKEND, TORCH):
        runs = engine(folder, backend, max_num_seqs=8)
        sequences = [runs.add([3 + i, 40, 9, 9], max_tokens=8, **rules) for i, rules in enumerate(RULES)]
        runs.generate(sequences, 4)
        assert not any(s.errors for s in sequences)
        found[backend.name] = [s.generated for s in sequences], [s.logprobs for s in sequences]
        runs.close()
    (texts, ours), (same, theirs) = found["cuda"], found["torch"]
    assert texts == same
    assert [len(of) for of in ours] == [0, 0, len(texts[2]), 0, len(texts[4])]
    for a, b in ((a, b) for of, wanted in zip(ours, theirs, strict=True) for a, b in zip(of, wanted, strict=True)):
        assert (a.token_id, a.rank, a.top_ids) == (b.token_id, b.rank, b.top_ids)
        assert np.abs(np.subtract([a.logprob, *a.top_logprobs], [b.logprob, *b.top_logprobs])).max() < TOLERANCE


def test_a_broken_row_fails_alone_and_slots_are_clean_afterwards(qwen):
    model, folder = qwen
    runs = engine(folder)
    good, bad = runs.add([5, 6, 7]), runs.add([8, VOCAB + 5, 3])
    runs.step([(good, 3), (bad, 3)])
    assert bad.errors == ["token ids must be between 0 and 159"]
    nothing = runs.add([4, 4], logit_bias=dict.fromkeys(range(VOCAB), float("-inf")))
    runs.step([(nothing, 2), (good, 1)])
    assert nothing.errors == ["every token is excluded by logit_bias, min_tokens or the grammar"]
    runs.remove(bad)
    runs.free_slots.insert(0, runs.free_slots.pop())
    again = runs.add([9, 8, 7])
    assert again.slot == bad.slot
    runs.step([(again, 3), (good, 1)])
    for sequence in (good, again):
        best = reference(model, sequence.tokens).argmax(-1).tolist()
        assert sequence.generated == best[len(sequence.prompt) - 1 : -1]
    runs.close()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_every_kind_of_step_has_kernels_to_compile(tmp_path, name):
    from headrace.engine.cuda.decoder import DeviceStep

    _, folder = tiny_model(tmp_path, name)
    runs = engine(folder)
    decoder = runs.executor.runner._decoder
    blank = torch.full((16,), -1, dtype=torch.int32, device=decoder.x.device)
    alone = decoder.compile_jobs(DeviceStep(blank[:2], blank[:2], blank[:2], 2))
    mixed = DeviceStep(blank[:4], blank[:4], blank[:4], 2, blank[:4].view(1, 4), blank[:2].view(1, 2), 64)
    assert len(alone) > 3
    # Of kinds of layers that differ in their window alone, each has kernels of its own.
    mixers = [layer.mixer for layer in locate(str(folder)).spec().layers]
    kinds = len(set(mixers))
    assert {mixers[i] for i in decoder._some} == set(mixers)
    assert decoder._some[-1] == len(mixers) - 1
    assert len(decoder.compile_jobs(mixed, others=False)) == 3 * kinds
    assert len(decoder.decode_jobs(mixed)) == kinds
    runs.close()


def versions_launched(monkeypatch) -> list[tuple]:
    """What is launched from now on; none of it runs. Versions as Triton tells them apart: by constants, types, alignment, and
    integers that are 1 or multiples of 16."""
    from triton.runtime.interpreter import InterpretedFunction

    launched = []

    def version(value, told=True):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        return ("one" if value == 1 else value % 16 == 0) if told and type(value) is int else type(value)

    def launch(kernel, *given, grid, warmup, **named):
        fixed = {k: v if isinstance(v, int | str) else version(v) for k, v in named.items()}
        untold = kernel.kwargs["do_not_specialize"] or ()
        values = [version(v, name not in untold) for v, name in zip(given, kernel.arg_names, strict=False)]
        launched.append((kernel.fn.__name__, *values, *sorted(fixed.items())))

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    return launched


@pytest.mark.skipif(ON_GPU, reason="launches are read where the interpreter takes them")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("prompts", [False, True])
def test_layers_that_warm_up_launch_every_version_of_a_kernel(tmp_path, name, prompts, monkeypatch):
    from headrace.engine.cuda.decoder import DeviceStep

    runs = engine(tiny_model(tmp_path, name, num_hidden_layers=13)[1])
    decoder = runs.executor.runner._decoder
    layers = decoder._weights.layers
    for i, norm in ((6, "mlp_norm"), (8, "attn_norm")):
        here = getattr(layers[i], norm)
        setattr(layers[i], norm, torch.cat([here[:1], here])[1:])  # begins 4 bytes behind a multiple of 16
    decoder._some = decoder._one_of_each_kind()
    assert len(decoder._some) < 13
    blank = torch.full((16,), -1, dtype=torch.int32, device=decoder.x.device)
    step = DeviceStep(blank[:4], blank[:4], torch.zeros_like(blank[:4]), 4)
    if prompts:
        step.decode_rows, step.chunks, step.tiles, step.tile_rows = 2, blank[:4].view(1, 4), blank[:2].view(1, 2), 64
        step.picked = torch.zeros_like(blank[:3])
    launched = versions_launched(monkeypatch)

    def versions(**given):
        launched.clear()
        decoder.run(step, decoder.last_ids[:4], **given)
        return len(launched), set(launched)

    (all_launches, whole), (few_launches, some) = versions(), versions(some_layers=True)
    assert few_launches < all_launches
    assert whole
    assert some == whole
    runs.close()


@pytest.mark.skipif(ON_GPU, reason="launches are read where the interpreter takes them")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_steps_launch_what_was_compiled_at_the_start(tmp_path, name, monkeypatch):
    from headrace.engine.cuda.products import Products

    chosen = Products.config
    runs = engine(tiny_model(tmp_path, name)[1], max_num_seqs=8, num_blocks=120)

    # As in a card's table, up to 4 rows take one kernel and more another.
    def config(self, rows, w, **more):
        found = chosen(self, rows, w, **more)
        return found and replace(found, rows=16 if rows <= 4 else 32)

    monkeypatch.setattr(Products, "config", config)
    runner = runs.executor.runner
    with monkeypatch.context() as only:
        for call in ("set_device", "synchronize"):
            only.setattr(torch.cuda, call, lambda device: None)
        only.setattr("headrace.engine.cuda.runner.separate_launchers", lambda: False)  # so that one thread launches all
        compiled = versions_launched(only)
        runner._compile(runner._one_group)
    launched = versions_launched(monkeypatch)
    first, *others = [runs.add(list(range(3, 9 + k))) for k in range(5)]
    runs.step([(first, 6)])
    runs.step([(first, 1), *((s, len(s.tokens)) for s in others)])
    runs.step([(s, 1) for s in (first, *others)])
    assert set(launched) - set(compiled) == set()
    runs.close()


def test_shared_prefixes_are_found_and_change_nothing(qwen, monkeypatch):
    from headrace.engine.cuda import prefixes

    model, folder = qwen
    monkeypatch.setattr(prefixes, "MIN_SPARED_TOKENS", 16)
    runs = engine(folder, max_num_seqs=6)
    assert runs.executor.runner._one_group
    common = [3 + i for i in range(16)]
    leader = runs.add([*common, 50])
    runs.step([(leader, 17)])
    others = []
    for i in range(4):
        sequence = runs.add([*common, 60 + i])
        sequence.blocks, sequence.computed = 2, 16
        others.append(sequence)
    # Their tables begin with the leader's two full blocks.
    from headrace.control.step import BlockAppend, StepPlan

    shared = tuple(runs.executor.runner._slots.tables[0, leader.slot, :2].tolist())
    plan = runs.plan([(s, 1) for s in others])
    appends = tuple(BlockAppend(s.slot, 0, 0, shared) for s in others)
    plan = StepPlan(plan.step_id, (), plan.inits, appends + plan.appends, (), plan.chunks)
    tables = np.stack([np.array([*shared, 9, -1])] * 4 + [np.array([30, 31, 32, -1])])
    assert prefixes.shared_prefixes(tables, np.array([17, 18, 17, 20, 20]), 8, 2, 12).firsts.tolist() == [16] * 4 + [0]
    result = runs.executor.submit(plan).result()
    for sequence, row in zip(others, result.rows, strict=True):
        assert row.token_ids == (int(reference(model, sequence.prompt)[-1].argmax()),)
    runs.close()


@pytest.mark.skipif(not ON_GPU, reason="graphs need a GPU")
def test_graphs_change_nothing(qwen):
    _, folder = qwen
    texts = []
    for graphs in ("0", "1"):
        config = EngineConfig(
            model=str(folder), backend="cuda", device="cuda", weights="bf16", options=(("graphs", graphs),)
        )
        runs = Engine(BACKEND.load(locate(str(folder)), config), num_blocks=200, max_num_seqs=16, max_model_len=128)
        sequences = [runs.add([3 + i, 40 + i, 9], max_tokens=40) for i in range(9)]
        runs.generate(sequences, 30)
        texts.append([s.generated for s in sequences])
        runs.close()
    assert texts[0] == texts[1]


def test_prefix_groups_are_counted_in_whole_blocks():
    from headrace.engine.cuda.prefixes import shared_prefixes

    tables = np.array([[1, 2, 3, 4], [9, 9, 9, 9], [1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 3, 4]])
    found = shared_prefixes(tables, np.full(5, 4000), 1000, 3, 10)
    assert found is None or found.firsts.max() <= 3000
    found = shared_prefixes(np.repeat(tables, 1, 0), np.array([3999] * 5), 1000, 3, 10)
    assert found.order.tolist() == [0, 2, 3, 4, 1]
    assert found.firsts.tolist() == [3000] * 4 + [0]
    assert found.tiles[:3].tolist() == [[0, 3, 3000], [3, 4, 3000], [0, 0, 0]]
    assert shared_prefixes(tables, np.array([900] * 5), 1000, 3, 10) is None
    assert torch.cuda.is_available() == ON_GPU
