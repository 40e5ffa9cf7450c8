"""Where one request's time went, in whole microseconds, so that the parts add up to the total exactly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from headrace.control.api import Timeline

_PARTS = ("tokenize", "queue", "prefill", "preempted", "decode", "stream")


def explain(received_s: float, arrival_s: float, timeline: Timeline, finished_s: float) -> dict[str, Any]:
    """The account of one sequence.

    tokenize: from the body's arrival to submission · queue, prefill, preempted, decode: the engine's `Timeline` ·
    stream: the rest until `finished_s`, spent on detokenizing, waiting for sibling choices and writing.
    Instants are rounded once and parts are their differences; a part never is negative.
    """
    marks = [received_s, arrival_s]
    for part in (timeline.queue_s, timeline.prefill_s, timeline.preempted_s, timeline.decode_s):
        marks.append(marks[-1] + max(part, 0.0))
    marks.append(finished_s)
    instants: list[int] = []
    for mark in marks:
        instant = round((mark - received_s) * 1e6)
        instants.append(max(instant, instants[-1]) if instants else instant)
    parts = {name: after - before for name, (before, after) in zip(_PARTS, pairwise(instants), strict=True)}
    return {
        "total_us": instants[-1] - instants[0],
        "parts_us": parts,
        "prefix_hit_tokens": timeline.prefix_hit_tokens,
        "prefix_miss_tokens": timeline.prefix_miss_tokens,
        "prefill_steps": timeline.prefill_steps,
        "decode_steps": timeline.decode_steps,
        "preemptions": timeline.preemptions,
    }


def explain_all(accounts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The account of a request: that of its only sequence, else one per choice beside the longest total."""
    if len(accounts) == 1:
        return accounts[0]
    return {"total_us": max(a["total_us"] for a in accounts), "choices": list(accounts)}
