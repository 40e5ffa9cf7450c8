"""Chunked = whole, cached = cold, preempted = not, overlapped = not, batched = alone: the same work in every way."""

from __future__ import annotations

import itertools
import random

import pytest
from control_rig import VOCAB, HalfRight, Rig

ROOMY = {"blocks": 400, "max_num_seqs": 1, "max_batched_tokens": 200, "prefix_caching": False}


def work(seed):
    rng = random.Random(seed)
    base = [rng.randrange(VOCAB) for _ in range(40)]
    return [
        (
            (*base[: rng.randrange(30)], *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12)))),
            {"max_tokens": rng.randrange(1, 20), "ignore_eos": rng.random() < 0.5, "namespace": rng.choice("xxy")},
        )
        for _ in range(30)
    ]


def outcome(seed, **setting):
    rig = Rig(**setting)
    for tokens, options in work(seed):
        rig.submit(tokens, **options)
    rig.run()
    return [(rig.tokens[n], rig.finish[n].reason, rig.finish[n].stop_token_id) for n in rig.requests], rig


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("windows", [(None,), (None, 7), (9,), (3, 12)])
def test_no_setting_changes_an_answer(seed, windows):
    alone, _ = outcome(seed, windows=windows, **ROOMY)
    preemptions = hits = 0
    for depth, caching, chunk, blocks, draft in itertools.product((1, 2), (True, False), (6, 40), (16, 60), (0, 3)):
        setting = {"depth": depth, "prefix_caching": caching, "max_batched_tokens": chunk, "watermark": 0.0}
        drafter = HalfRight(draft) if draft else None
        answers, rig = outcome(seed, windows=windows, blocks=blocks * len(windows), drafter=drafter, **setting)
        assert answers == alone, setting
        preemptions += rig.scheduler.stats().preemptions
        hits += rig.scheduler.stats().prefix_hit_tokens
    assert hits > 0
    assert preemptions > 0 or None not in windows  # sliding groups alone leave room
