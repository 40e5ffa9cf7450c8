"""Random weights for a geometry: the same for the same seed and tensor name, of a scale that keeps activations finite."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from headrace.engine.weights.source import Floats, Stored


class DummySource:
    """Any tensor that is asked for exists: matrices are normal with deviation 0.02, norms are 1, biases 0.

    It has no names of its own; `read_as` is told the shape that the model wants.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def names(self) -> Iterable[str]:
        return ()

    def shape(self, name: str) -> tuple[int, ...]:
        raise LookupError(name)

    def read(self, name: str) -> Floats:
        raise LookupError(name)

    def read_as(self, name: str, shape: tuple[int, ...]) -> Floats:
        if len(shape) == 1:
            return np.full(shape, 1.0 if "norm" in name else 0.0, np.float32)
        rng = np.random.Generator(np.random.SFC64((self._seed, zlib.crc32(name.encode()))))
        out = rng.standard_normal(shape, np.float32)
        out *= 0.02
        return out

    def stored(self, name: str) -> Stored:
        raise LookupError(name)

    def rows(self, name: str) -> None:
        return None
