"""Which sequences of a decode step share leading blocks, and how their rows are put into tiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MIN_ROWS = 4
MIN_SPARED_TOKENS = 8192
"""Cached tokens that need not be read again; below, the extra launches cost more than they spare."""


@dataclass(frozen=True, slots=True)
class Shared:
    """`order`: the rows, those that share next to each other. `firsts` [rows]: shared tokens of each ordered row.
    `tiles` [n, 3]: first row, end row, shared tokens."""

    order: npt.NDArray[np.int64]
    firsts: npt.NDArray[np.int32]
    tiles: npt.NDArray[np.int32]


def shared_prefixes(
    tables: npt.NDArray[np.int32], positions: npt.NDArray[np.int64], block_tokens: int, tile_rows: int, max_tiles: int
) -> Shared | None:
    """Groups of rows whose block tables `tables` [rows, blocks] begin alike; None if sharing spares too little.

    Only whole blocks before a row's own position count. Rows are grouped by their first block, and a group shares what all
    of its rows share.
    """
    rows = len(tables)
    if rows < MIN_ROWS:
        return None
    leaders, member_of, counts = np.unique(tables[:, 0], return_inverse=True, return_counts=True)
    if len(leaders) == rows or counts.max() < MIN_ROWS:
        return None
    firsts = np.zeros(rows, np.int32)
    groups: list[npt.NDArray[np.int64]] = []
    for group in np.flatnonzero((counts >= MIN_ROWS) & (leaders >= 0)).tolist():
        members = np.flatnonzero(member_of == group)
        most = int(positions[members].min()) // block_tokens
        same = (tables[members, :most] == tables[members[0], :most]).all(0)
        blocks = most if same.all() else int(np.argmin(same))
        if (len(members) - 1) * blocks * block_tokens >= MIN_SPARED_TOKENS:
            firsts[members] = blocks * block_tokens
            groups.append(members)
    tiles, ordered = [], []
    at = 0
    for members in groups:
        ends = list(range(at, at + len(members), tile_rows))
        tiles += [(b, min(b + tile_rows, at + len(members)), int(firsts[members[0]])) for b in ends]
        ordered.append(members)
        at += len(members)
    if not groups or len(tiles) > max_tiles:
        return None
    rest = np.flatnonzero(firsts == 0)
    order = np.concatenate([*ordered, rest])
    padded = np.zeros((max_tiles, 3), np.int32)
    padded[: len(tiles)] = tiles
    return Shared(order, firsts[order], padded)
