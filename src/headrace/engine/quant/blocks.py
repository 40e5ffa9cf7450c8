"""Quantized matrices as ggml blocks, where that loses nothing: what the native backend packs."""

from __future__ import annotations

from math import prod

import numpy as np

from headrace.engine.quant.arrays import QuantArrays
from headrace.engine.weights.source import Stored
from headrace.spec.packing import BLOCK_KINDS
from headrace.spec.precision import precision

_BLOCK = 32


def as_blocks(found: QuantArrays) -> Stored:
    """A matrix of symmetric groups in blocks of 32 inputs, each with the fp16 scale of its group; KeyError for other formats.

    A block of Q4_0 is (code - 8) times its scale, with inputs 0-15 in the low halves of 16 bytes and 16-31 in the high; one of
    Q8_0 is a signed code times its scale. The inputs must be a multiple of 32.
    """
    kind = BLOCK_KINDS[found.form]
    rows, columns = prod(found.shape[:-1]), found.shape[-1]
    count = columns // _BLOCK
    codes = np.asarray(found.arrays["codes"]).reshape(rows, -1)
    if kind == "q4_0":
        pairs = codes.reshape(rows, count, _BLOCK // 2)
        ordered = np.stack([pairs & 15, pairs >> 4], -1).reshape(rows, count, _BLOCK)
        payload = ordered[..., : _BLOCK // 2] | ordered[..., _BLOCK // 2 :] << 4
    else:
        payload = (codes ^ np.uint8(128)).reshape(rows, count, _BLOCK)  # code - 128 as a signed byte
    scales = np.asarray(found.arrays["scales"], np.float16).reshape(rows, -1)
    scales = np.repeat(scales, precision(found.form).group_size // _BLOCK, axis=1)[:, :count]
    raw = np.ascontiguousarray(scales[..., None]).view(np.uint8).reshape(rows, count, 2)
    return Stored(kind, np.concatenate([raw, payload], axis=-1).reshape(rows, -1), columns)
