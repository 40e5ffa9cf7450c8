"""A quantized matrix as arrays, without torch: what readers of checkpoints hand to formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class QuantArrays:
    """Matrix (or stack of matrices) [..., out, in] in the layout of format `form` (`headrace.engine.quant.formats`).

    8-bit floats are given as their bytes. `rounded` is true where a scale had to be rounded to the format's type.
    """

    form: str
    shape: tuple[int, ...]
    arrays: Mapping[str, npt.NDArray[np.generic]]
    rounded: bool = False


def pack_pairs(codes: Codes) -> Codes:
    """4-bit codes [rows, columns] to bytes [rows, ceil(columns / 2)]: an even column is the low half."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), np.uint8)], axis=-1)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_words(words: npt.NDArray[np.int32], bits: int) -> Codes:
    """Codes of `bits` from 32-bit words [..., n] → [..., n · 32 / bits], lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(*words.shape[:-1], -1)
