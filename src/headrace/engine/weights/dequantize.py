"""ggml's block formats to fp32, vectorized over blocks and cut into pieces that stay in the CPU's cache.

Layouts follow ggml's block structs. A block's values are computed with the same fp32 operations in the same order as
ggml's reference, so results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace.spec.ggml import GGMLType

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_PIECE_ELEMENTS = 1 << 16
"""Elements per piece: 256 KiB of fp32, small enough for a core's L2 with its temporaries."""

_H = np.dtype("<f2")
_Q4_0 = np.dtype([("d", _H), ("q", "u1", 16)])
_Q4_1 = np.dtype([("d", _H), ("m", _H), ("q", "u1", 16)])
_Q5_0 = np.dtype([("d", _H), ("high", "u1", 4), ("q", "u1", 16)])
_Q5_1 = np.dtype([("d", _H), ("m", _H), ("high", "u1", 4), ("q", "u1", 16)])
_Q8_0 = np.dtype([("d", _H), ("q", "i1", 32)])
_Q4_K = np.dtype([("d", _H), ("dmin", _H), ("scales", "u1", 12), ("q", "u1", (4, 32))])
_Q5_K = np.dtype([("d", _H), ("dmin", _H), ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", (4, 32))])
_Q6_K = np.dtype([("low", "u1", (2, 64)), ("high", "u1", (2, 32)), ("scales", "i1", 16), ("d", _H)])


def dequantize(raw: Bytes, kind: GGMLType, out: Floats) -> None:
    """Fill `out` (flat, fp32) from the stored bytes of a tensor of type `kind`. KeyError for a type not in `SUPPORTED`."""
    convert = _CONVERT[kind.name]
    blocks = raw.reshape(-1, kind.block_bytes)
    target = out.reshape(-1, kind.block_elements)
    step = max(1, _PIECE_ELEMENTS // kind.block_elements)
    for at in range(0, len(blocks), step):
        convert(blocks[at : at + step], target[at : at + step])


def _f32(raw: Bytes, out: Floats) -> None:
    out[:] = raw.view("<f4")


def _f16(raw: Bytes, out: Floats) -> None:
    out[:] = raw.view(_H)


def _bf16(raw: Bytes, out: Floats) -> None:
    np.left_shift(raw.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _scale(field: npt.NDArray[np.float16]) -> Floats:
    return field.astype(np.float32)[:, None]


def _nibbles(q: Bytes, out: Floats) -> None:
    """Low nibbles of 16 bytes are elements 0-15, high nibbles 16-31."""
    out[:, :16] = q & 15
    out[:, 16:] = q >> 4


def _q4_0(raw: Bytes, out: Floats) -> None:
    b = raw.view(_Q4_0)[:, 0]
    _nibbles(b["q"], out)
    out -= 8
    out *= _scale(b["d"])


def _q4_1(raw: Bytes, out: Floats) -> None:
    b = raw.view(_Q4_1)[:, 0]
    _nibbles(b["q"], out)
    out *= _scale(b["d"])
    out += _scale(b["m"])


def _fifth_bits(high: Bytes, out: Floats) -> None:
    """Bit j of the block's 32-bit field is bit 4 of element j."""
    out += np.unpackbits(high, axis=1, bitorder="little") << 4


def _q5_0(raw: Bytes, out: Floats) -> None:
    b = raw.view(_Q5_0)[:, 0]
    _nibbles(b["q"], out)
    _fifth_bits(b["high"], out)
    out -= 16
    out *= _scale(b["d"])


def _q5_1(raw: Bytes, out: Floats) -> None:
    b = raw.view(_Q5_1)[:, 0]
    _nibbles(b["q"], out)
    _fifth_bits(b["high"], out)
    out *= _scale(b["d"])
    out += _scale(b["m"])


def _q8_0(raw: Bytes, out: Floats) -> None:
    b = raw.view(_Q8_0)[:, 0]
    out[:] = b["q"]
    out *= _scale(b["d"])


def _sub_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight 6-bit scales and eight 6-bit minimums from 12 bytes, as fp32 [blocks, 8] each.

    Bytes 0-3 and 4-7 hold the first four scales and minimums in their low six bits; their top two bits complete the last
    four, whose low nibbles are bytes 8-11 (scale in the low half, minimum in the high).
    """
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=1)
    minimums = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _affine_k(b: npt.NDArray[np.void], out: Floats) -> None:
    """Scale the 8 sub-blocks of 32 quants that `out` holds: d * scale * q - dmin * minimum."""
    scales, minimums = _sub_scales(b["scales"])
    scales *= _scale(b["d"])
    minimums *= _scale(b["dmin"])
    view = out.reshape(-1, 8, 32)
    view *= scales[:, :, None]
    view -= minimums[:, :, None]


def _q4_k(raw: Bytes, out: Floats) -> None:
    b = raw.view(_Q4_K)[:, 0]
    view = out.reshape(-1, 4, 2, 32)
    view[:, :, 0] = b["q"] & 15
    view[:, :, 1] = b["q"] >> 4
    _affine_k(b, out)


def _q5_k(raw: Bytes, out: Floats) -> None:
    b = raw.view(_Q5_K)[:, 0]
    view = out.reshape(-1, 4, 2, 32)
    # Bit s of byte j of `high` is the fifth bit of element j of sub-block s.
    fifth = (b["high"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    fifth = fifth.reshape(-1, 4, 2, 32)
    view[:, :, 0] = b["q"] & 15 | fifth[:, :, 0]
    view[:, :, 1] = b["q"] >> 4 | fifth[:, :, 1]
    _affine_k(b, out)


def _q6_k(raw: Bytes, out: Floats) -> None:
    b = raw.view(_Q6_K)[:, 0]
    view = out.reshape(-1, 2, 4, 32)
    low, high = b["low"].reshape(-1, 2, 2, 32), b["high"]
    for quarter in range(4):
        nibble = low[:, :, quarter % 2] >> 4 * (quarter // 2) & 15
        view[:, :, quarter] = nibble | (high >> 2 * quarter & 3) << 4
    out -= 32
    scales = b["scales"].astype(np.float32) * _scale(b["d"])
    out.reshape(-1, 16, 16)[:] *= scales[:, :, None]


_CONVERT: dict[str, Callable[[Bytes, Floats], None]] = {
    "f32": _f32,
    "f16": _f16,
    "bf16": _bf16,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}

SUPPORTED = frozenset(_CONVERT)
"""Names of the ggml types that `dequantize` reads."""
