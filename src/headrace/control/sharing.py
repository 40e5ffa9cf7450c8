"""Computing a shared prefix once: whom a waiting request should wait for."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.control.node import common_tokens
from headrace.control.sequence import Sequence, State

MAX_HOLDS = 16
"""How often one request may be held back for another before it is admitted regardless."""


def is_held(sequence: Sequence) -> bool:
    """Whether the producer that `sequence` waits for is still on its way; if not, the hold is over."""
    if sequence.held_for is None:
        return False
    producer, incarnation, target = sequence.held_for
    if producer.state is State.RUNNING and producer.incarnation == incarnation and producer.computed < target:
        return True
    sequence.held_for = None
    return False


def hold_for(sequence: Sequence, hit_tokens: int, producers: Iterable[Sequence], least_gain: int, share: float) -> bool:
    """Hold `sequence` back if a running request is about to publish clearly more of its prefix than the cache has.

    Only running requests are waited for, they never wait for anyone, and whoever is preempted or ends stops being
    waited for; so no cycle can form. A more urgent request does not wait for a less urgent one.
    """
    if sequence.holds >= MAX_HOLDS:
        return False
    wanted = len(sequence.token_ids) - 1
    least = hit_tokens + max(least_gain, int(share * (wanted - hit_tokens)))
    if least > wanted:
        return False
    probe = sequence.encoded[: least * 4]
    best: Sequence | None = None
    target = 0
    for producer in producers:
        # Most requests share little: one comparison of the least useful prefix settles it.
        if producer.request.namespace != sequence.request.namespace or not producer.encoded.startswith(probe):
            continue
        if producer.request.priority > sequence.request.priority:
            continue
        shared = min(common_tokens(producer.encoded, sequence.encoded), wanted)
        if shared > target and producer.computed < shared:
            best, target = producer, shared
    if best is None:
        return False
    sequence.held_for = (best, best.incarnation, target)
    sequence.holds += 1
    return True
