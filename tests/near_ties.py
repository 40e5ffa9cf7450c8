"""Greedy answers may part only where the two best tokens are a near-tie; every one that did is listed at the end of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TIE = 1e-3
"""Largest difference of two logits (or log-probabilities of one row) that counts as a tie."""

LISTED: list[dict[str, Any]] = []
"""The ties at which answers parted in this session, in order."""


def assert_tie(where: str, one: Any, other: Any, *rows: Mapping[Any, float]) -> None:
    """`one` and `other` were chosen for the same place; each of `rows` gives token → logit as one of the runs saw it.

    In every row they must be the two best and within `TIE`; then the place is listed with both logits of each row.
    """
    for row in rows:
        first, second = sorted(row, key=row.__getitem__, reverse=True)[:2]
        assert {one, other} == {first, second}, f"{where}: {one!r} and {other!r} are not the two best of {dict(row)}"
        gap = row[first] - row[second]
        assert gap < TIE, f"{where}: {one!r} against {other!r}, {gap} apart"
    LISTED.append({"where": where, "tokens": [one, other], "logits": [[row[one], row[other]] for row in rows]})


def summary() -> list[str]:
    """One line for each tie."""
    return [
        f"{tie['where']}: {tie['tokens'][0]!r} against {tie['tokens'][1]!r}, "
        + "; ".join(f"{a:.6f} and {b:.6f}" for a, b in tie["logits"])
        for tie in LISTED
    ]
