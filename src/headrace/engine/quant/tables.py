"""Tables of values that code books look up, fp32."""

from __future__ import annotations

import numpy as np

NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
"""Quantiles of a normal distribution: constants of the format (QLoRA, arXiv:2305.14314, appendix E)."""


def _spaced(count: int) -> np.ndarray:
    """`count` values from 0.1 to 1 in steps of fp32 counted from the nearer end, each rounded once: the published table is
    made of these roundings."""
    begin, end = np.float32(0.1), np.float32(1)
    step = np.float64((end - begin) / np.float32(count - 1))
    at = np.arange(count)
    return np.where(at < count // 2, np.float64(begin) + step * at, 1.0 - step * at[::-1]).astype(np.float32)


def _dynamic() -> np.ndarray:
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = _spaced((1 << exponent) + 1)
        middles = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (exponent - 6))
        values += [*middles.tolist(), *(-middles).tolist()]
    return np.array(sorted(values), np.float32)


DYNAMIC = _dynamic()
"""The 256 values of 8-bit dynamic quantization (arXiv:2110.02861), ascending: a sign, a power of ten and a linear fraction in
the bits that are left; each value is the middle of its interval. Zero and one complete the table."""
