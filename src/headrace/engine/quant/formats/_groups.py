"""Rows cut into groups of equal size; the last group of a row may be shorter."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.base.units import ceil_div


def grouped(values: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, columns] → [rows, groups, size], the last group filled up with zeros."""
    rows, columns = values.shape
    count = ceil_div(columns, size)
    if columns % size:
        values = F.pad(values, (0, count * size - columns))
    return values.view(rows, count, size)


def flattened(groups: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of `grouped`."""
    return groups.flatten(1)[:, :columns]
