"""Rows of a decode step that the runner puts into another order than the plan's: the longest first, or those that share a prefix
next to each other. Ids, rules and log-probabilities stay with their sequences, and the prefix is really read once."""

from __future__ import annotations

import random

import kernel_device
import numpy as np
import pytest
from test_cuda_steps import engine
from test_models_logits import VOCAB, dense, reference, tiny_model

from headrace.control.step import BlockAppend, StepPlan
from headrace.engine.cuda import prefixes, runner

TOLERANCE = 1e-4 if not kernel_device.ON_GPU else 2e-3


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("rows"), "qwen2", num_hidden_layers=2)


@pytest.fixture
def sent(monkeypatch):
    """The arrays of each step that is sent to the device, of engines made by `watched`."""
    arrays: list[dict[str, np.ndarray]] = []

    def watched(runs):
        metadata = runs.executor.runner.metadata
        real = metadata.send
        monkeypatch.setattr(metadata, "send", lambda given: arrays.append(dict(given)) or real(given))
        return runs

    return watched, arrays


def test_the_longest_contexts_go_first(qwen, monkeypatch, sent):
    model, folder = qwen
    watched, arrays = sent
    monkeypatch.setattr(runner, "SORTED_ROWS", 2)
    runs = watched(engine(folder))
    rng = random.Random(2)
    rules = [{"logprobs": VOCAB}, {}, {"logprobs": VOCAB, "temperature": 0.9, "seed": 5}]
    sequences = [
        runs.add([rng.randrange(3, VOCAB) for _ in range(n)], **given)
        for n, given in zip((3, 14, 8), rules, strict=True)
    ]
    runs.step([(s, len(s.prompt)) for s in sequences])
    for _ in range(2):
        runs.step([(s, 1) for s in sequences])
    assert arrays[-1]["positions"][:3].tolist() == [15, 9, 4]
    assert arrays[-1]["slots"][:3].tolist() == [sequences[i].slot for i in (1, 2, 0)]
    for s, given in zip(sequences, rules, strict=True):
        assert not s.errors
        wanted = reference(model, s.tokens).numpy()[len(s.prompt) - 1 : -1]
        if "temperature" not in given:
            assert s.generated == wanted.argmax(-1).tolist()
        if "logprobs" in given:
            assert [e.token_id for e in s.logprobs] == s.generated
            assert np.abs(dense(s.logprobs) - wanted).max() < TOLERANCE
    # A draw depends on its own sequence alone.
    other = engine(folder)
    alone = other.add(sequences[2].prompt, **rules[2])
    other.generate([alone], 3)
    assert alone.generated[:3] == sequences[2].generated
    other.close()
    runs.close()


def test_sequences_that_share_a_prefix_are_read_together(qwen, monkeypatch, sent):
    model, folder = qwen
    watched, arrays = sent
    monkeypatch.setattr(prefixes, "MIN_SPARED_TOKENS", 16)
    runs = watched(engine(folder, max_num_seqs=8))
    common = [3 + i for i in range(16)]
    leader, stranger = runs.add([*common, 50]), runs.add([90 - i for i in range(20)])
    runs.step([(leader, 17), (stranger, 20)])
    shared = tuple(runs.executor.runner._slots.tables[0, leader.slot, :2].tolist())
    others = []
    for i in range(4):
        sequence = runs.add([*common, 60 + i])
        sequence.blocks, sequence.computed = 2, 16
        others.append(sequence)
    plan = runs.plan([(others[0], 1), (stranger, 1), *((s, 1) for s in others[1:])])
    appends = tuple(BlockAppend(s.slot, 0, 0, shared) for s in others)
    plan = StepPlan(plan.step_id, (), plan.inits, appends + plan.appends, (), plan.chunks)
    rows = runs.executor.submit(plan).result().rows
    assert arrays[-1]["firsts"][:5].tolist() == [16] * 4 + [0]
    assert arrays[-1]["slots"][:5].tolist() == [*(s.slot for s in others), stranger.slot]
    assert [row.slot for row in rows] == [c.slot for c in plan.chunks]
    for sequence, row in zip((others[0], stranger, *others[1:]), rows, strict=True):
        assert row.token_ids == (int(reference(model, sequence.tokens)[-1].argmax()),)
    runs.close()
