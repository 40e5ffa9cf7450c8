"""Radians per token of rotary pairs, for every kind of scaling; torch-free."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from headrace.base.errors import UnsupportedModel
from headrace.spec.model import Rope


def frequencies(rope: Rope, max_model_len: int) -> tuple[npt.NDArray[np.float32], float]:
    """Radians per token of each rotary pair [dim / 2], and the factor on the rotated vectors.

    Linear: positions divided by the factor. llama3: long wavelengths divided, short ones kept, a ramp between (Llama 3.1
    report). yarn: NTK-by-parts (arXiv 2309.00071). longrope (arXiv 2402.13753): the long factors are used throughout if
    `max_model_len` exceeds the original context, else the short ones, so that a sequence's cached keys stay valid as it grows.
    """
    scaling = rope.scaling
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    base = np.float32(1.0) / np.power(np.float32(rope.theta), exponents, dtype=np.float32)
    if rope.freq_factors:
        base = base / np.asarray(rope.freq_factors, np.float32)
    match scaling.kind:
        case "none":
            return base, 1.0
        case "linear":
            return base / np.float32(scaling.factor), 1.0
        case "llama3":
            return _llama3(base, rope), 1.0
        case "yarn":
            return _yarn(base, rope)
        case "longrope":
            return _longrope(base, rope, max_model_len)
        case _:
            raise UnsupportedModel(f"rope scaling {scaling.kind!r} is not supported", field="rope_scaling")


def _llama3(base: npt.NDArray[np.float32], rope: Rope) -> npt.NDArray[np.float32]:
    s = rope.scaling
    turns = s.original_max_context * base / np.float32(2 * math.pi)
    smooth = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    return (((1 - smooth) / s.factor + smooth) * base).astype(np.float32)


def _yarn(base: npt.NDArray[np.float32], rope: Rope) -> tuple[npt.NDArray[np.float32], float]:
    s = rope.scaling

    def pair_turning(turns: float) -> float:
        """Index (in dimensions, not pairs) of the pair that turns `turns` times within the original context."""
        return rope.dim * math.log(s.original_max_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(s.beta_fast), pair_turning(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    blended = base * (1 - ramp) + base / s.factor * ramp
    return blended.astype(np.float32), _yarn_magnitude(rope)


def _yarn_magnitude(rope: Rope) -> float:
    s = rope.scaling
    if s.attention_factor is not None:
        return s.attention_factor

    def magnitude(scale: float) -> float:
        return 1.0 if s.factor <= 1 else 0.1 * scale * math.log(s.factor) + 1.0

    if s.mscale and s.mscale_all_dim:
        return magnitude(s.mscale) / magnitude(s.mscale_all_dim)
    return magnitude(1.0)


def _longrope(base: npt.NDArray[np.float32], rope: Rope, max_model_len: int) -> tuple[npt.NDArray[np.float32], float]:
    s = rope.scaling
    factors = np.asarray(s.long_factors if max_model_len > s.original_max_context else s.short_factors, np.float32)
    if len(factors) != len(base):
        raise UnsupportedModel(
            f"longrope has {len(factors)} factors for {len(base)} rotary pairs", field="rope_scaling.long_factor"
        )
    magnitude = s.attention_factor
    if magnitude is None:
        magnitude = 1.0 if s.factor <= 1 else math.sqrt(1 + math.log(s.factor) / math.log(s.original_max_context))
    return base / factors, magnitude
