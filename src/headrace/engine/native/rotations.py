"""Cosines and sines of a step's positions, from tables that grow with the longest position seen."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.engine.frequencies import frequencies
from headrace.spec.model import Rope

Floats = npt.NDArray[np.float32]
_FIRST = 1024


class Rotations:
    """One rope's cos and sin [positions, dim / 2], its magnitude folded in; angles are taken in fp32, as models are trained."""

    def __init__(self, rope: Rope, max_model_len: int) -> None:
        self._radians, self._magnitude = frequencies(rope, max_model_len)
        self._most = max_model_len + 1
        self._cos = self._sin = np.empty((0, len(self._radians)), np.float32)

    def at(self, positions: npt.NDArray[np.int64], last: int) -> tuple[Floats, Floats]:
        """Of each of `positions`, of which `last` is the largest."""
        if last >= len(self._cos):
            self._grow(last + 1)
        return self._cos[positions], self._sin[positions]

    def _grow(self, needed: int) -> None:
        count = min(max(needed, 2 * len(self._cos), _FIRST), max(self._most, needed))
        angles = np.arange(count, dtype=np.float32)[:, None] * self._radians[None, :]
        magnitude = np.float32(self._magnitude)
        self._cos, self._sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude
