"""Contract of every registered policy: liveness, budget, no leak, and the same answers."""

from __future__ import annotations

import itertools
import random

import pytest
from control_rig import VOCAB, Rig

from headrace.control.policies import ADMISSION, EVICTION, ORDER

COMBINATIONS = list(itertools.product(ORDER.names(), EVICTION.names(), ADMISSION.names()))


def test_the_known_policies_are_found():
    assert {"fcfs", "priority", "prefix-aware"} <= set(ORDER.names())
    assert {"lru", "lfu"} <= set(EVICTION.names())
    assert {"reserve", "eager"} <= set(ADMISSION.names())


@pytest.mark.parametrize(("order", "eviction", "admission"), COMBINATIONS)
@pytest.mark.parametrize("windows", [(None,), (None, 5)])
def test_every_request_ends_and_everything_is_given_back(order, eviction, admission, windows):
    rng = random.Random(repr((order, eviction, admission)))
    rig = Rig(order=order, eviction=eviction, admission=admission, windows=windows, blocks=12 * len(windows), depth=2)
    base = [rng.randrange(VOCAB) for _ in range(20)]
    for _ in range(40):
        tokens = [*base[: rng.randrange(20)], *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 8)))]
        rig.submit(tokens, priority=rng.randrange(3), max_tokens=rng.randrange(1, 14), namespace=rng.choice("ab"))
        if rng.random() < 0.5:
            rig.step()
    rig.run()  # the rig compares every answer with the definition
    assert rig.scheduler.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("eviction", EVICTION.names())
def test_an_eviction_key_never_falls_with_use(eviction):
    policy = EVICTION.get(eviction)()
    for used, hits in itertools.product(range(5), range(5)):
        assert policy.key(used, hits) <= policy.key(used + 1, hits)
        assert policy.key(used, hits) <= policy.key(used + 1, hits + 1)


@pytest.mark.parametrize("admission", ADMISSION.names())
def test_admission_never_minds_more_room_or_less_need(admission):
    admits = ADMISSION.get(admission)().admits
    names = ("whole_blocks", "first_blocks", "promised_blocks", "free_blocks", "watermark_blocks")
    rng = random.Random(3)
    for _ in range(500):
        case = {name: rng.randrange(8) for name in names}
        case["first_blocks"] = min(case["first_blocks"], case["whole_blocks"])
        if admits(**case):
            assert admits(**{**case, "free_blocks": case["free_blocks"] + 1})
            assert admits(**{**case, "watermark_blocks": 0, "promised_blocks": 0})
            assert case["first_blocks"] <= case["free_blocks"]
