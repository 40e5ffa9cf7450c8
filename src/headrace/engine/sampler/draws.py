"""The random stream of a sequence: a pure function of (seed, index of the generated token)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row. Counter-based: no state, so batch mates, preemption and order cannot change a draw.

    Two rounds of the SplitMix64 finalizer (Steele, Lea, Flood, OOPSLA 2014), the index stepping by the golden ratio
    within the sequence that the mixed seed starts.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return (_mix(_mix(state)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
