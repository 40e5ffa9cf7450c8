"""Keys and values in codes: how a vector becomes codes, and how attention makes numbers of them again.

A paged cache of codes of 8 bits is seen as 16-bit words, each two neighbouring dimensions of one token. Attention loads tiles of words and
makes two tiles of half as many dimensions from each, the even ones and the odd ones. So the bytes that a thread gets, for keys as
for values, already pair the way a tensor core wants its 16-bit operands, and one byte permutation and one conversion make a
pair; bytes loaded as bytes would have to be exchanged between threads for values. Scores are the sum of both halves' products.

Numbers are fp16, which holds every code of both formats exactly, and INT8 codes are multiplied as they are: a key's scale goes to
its scores, a value's to its weights. What is stored, and how it is rounded, is as in `headrace.engine.kv_formats`.

A word of INT4 is four neighbouring dimensions, and its tile becomes four tiles of a quarter of the dimensions. Keys of a group of
tokens share scale and minimum by dimension, which make numbers of them before they are multiplied; a value's scale goes to its
weight, and its minimum, the same for all dimensions, is added up beside (`headrace.engine.kernels.groups`).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs

from headrace.engine.kernels.launchers import power_of_2
from headrace.spec.precision import kv_precision

PLAIN, INT8, FP8, FP8_BITS, INT4 = (tl.constexpr(i) for i in range(5))
"""What a cache holds. FP8_BITS are the same bytes as FP8, read with integer arithmetic where there is no instruction for it."""
KEY_GROUP = tl.constexpr(kv_precision("int4").key_group)
"""Neighbouring tokens whose INT4 keys share scales; a block holds whole groups."""
VALUE_UNIT = tl.constexpr(64.0)
"""Weights times the scales of INT8 and INT4 values are kept in so small a unit that fp16 holds them, from scales of 1e-7 to 1,000."""
ASSEMBLY = tl.constexpr(not knobs.runtime.interpret)


@triton.jit
def even(words, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of the lower byte of every word, those of even dimensions."""
    if CODE == FP8:
        found = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x4420; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; }",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    elif CODE == FP8_BITS:
        found = from_fp8(words & 0xFF)
    elif ASSEMBLY:
        # A code raised by 128 under the exponent of 1024 is 1152 more than the code.
        found = tl.inline_asm_elementwise(
            "{ .reg .b32 t, c; mov.b32 c, 0x64806480; lop3.b32 t, $1, 0x00FF00FF, c, 0x6A; sub.f16x2 $0, t, c; }",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = words.to(tl.int8).to(tl.float16)
    return found.to(DTYPE)


@triton.jit
def odd(words, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of the upper byte of every word, those of odd dimensions."""
    if CODE == FP8:
        found = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x4431; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; }",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    elif CODE == FP8_BITS:
        found = from_fp8((words >> 8) & 0xFF)
    elif ASSEMBLY:
        found = tl.inline_asm_elementwise(
            "{ .reg .b32 t, c; mov.b32 c, 0x64806480; shr.b32 t, $1, 8; lop3.b32 t, t, 0x00FF00FF, c, 0x6A; "
            "sub.f16x2 $0, t, c; }",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = (words >> 8).to(tl.float16)
    return found.to(DTYPE)


@triton.jit
def from_fp8(bits):
    """E4M3 given as 16-bit integers below 256, in fp16: the same bits 7 places up mean 256 times less."""
    moved = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), moved * 256.0)


@triton.jit
def parts(x):
    """[rows, dims] as its even and its odd dimensions."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def joined(evens, odds):
    return tl.reshape(tl.join(evens, odds), [evens.shape[0], 2 * evens.shape[1]])


@triton.jit
def quarters(x):
    """[rows, dims] as four, whose dimensions leave 0, 1, 2 and 3 when divided by four."""
    evens, odds = parts(x)
    first, third = parts(evens)
    second, fourth = parts(odds)
    return first, second, third, fourth


@triton.jit
def whole(first, second, third, fourth):
    return joined(joined(first, third), joined(second, fourth))


@triton.jit
def nibbles(words, AT: tl.constexpr, LESS: tl.constexpr, DTYPE: tl.constexpr):
    """The codes of 4 bits at one of four places of every word, less LESS."""
    if ASSEMBLY:
        # Two words at a time, as the tensor cores want them. Codes at odd places stay there, 16 times as large.
        if AT < 2:
            moved = words
        else:
            moved = tl.inline_asm_elementwise(
                "shr.b32 $0, $1, 8;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
            )
        if AT % 2 == 1:
            bits = tl.inline_asm_elementwise(
                "{ .reg .b32 c; mov.b32 c, 0x64006400; lop3.b32 $0, $1, 0x00F000F0, c, 0xEA; }",
                "=r,r", [moved], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            bits = tl.inline_asm_elementwise(
                "{ .reg .b32 c; mov.b32 c, 0x64006400; lop3.b32 $0, $1, 0x000F000F, c, 0xEA; }",
                "=r,r", [moved], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        if AT % 2 == 1:
            return (bits * 0.0625 - (64.0 + LESS)).to(DTYPE)
        else:
            return (bits - (1024.0 + LESS)).to(DTYPE)
    else:
        # Under the exponent of 1024 a code is 1024 more than it is.
        bits = ((words >> (4 * AT)) & 15) | 0x6400
        return (bits.to(tl.float16, bitcast=True) - (1024.0 + LESS)).to(DTYPE)


@triton.jit
def packed(codes):
    """Codes of 4 bits (int32) [rows, dims] as words [rows, dims / 4]."""
    first, second, third, fourth = quarters(codes)
    return (first | (second << 4) | (third << 8) | (fourth << 12)).to(tl.int16)


@triton.jit
def halves(both):
    """int32 as two numbers of fp16, the lower half first: a scale and its minimum."""
    lower = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    upper = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return lower, upper


@triton.jit
def coded_along(x, inside, AXIS: tl.constexpr):
    """fp32 numbers as INT4 codes (int32), with fp16 scales and minima of those `inside` along AXIS; codes elsewhere mean nothing."""
    least = tl.min(tl.where(inside, x, float("inf")), AXIS).to(tl.float16)
    below = least.to(tl.float32)
    most = tl.max(tl.where(inside, x, float("-inf")), AXIS)
    scale = tl.div_rn(tl.maximum(most - below, 0.0), 15.0).to(tl.float16)
    step = scale.to(tl.float32)
    step = tl.expand_dims(tl.where(step == 0.0, 1.0, step), AXIS)
    # Rounded as in `coded`.
    near = (tl.div_rn(x - tl.expand_dims(below, AXIS), step) + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(near, 0.0), 15.0).to(tl.int32), scale, least


@triton.jit
def int8_scale(most, nan):
    """The scale (fp16) of INT8 codes of vectors whose largest magnitude is `most`; NaN where one of the numbers is (`nan` > 0)."""
    return tl.where(nan > 0, float("nan"), tl.div_rn(most, 127.0).to(tl.float16))


@triton.jit
def int8_codes(x, step):
    """The codes (int8) of fp32 numbers whose scale is `step` (fp32)."""
    # Added to so large a number and taken away again, a number is rounded to the nearest integer, ties to even.
    near = (tl.div_rn(x, tl.where(step == 0.0, 1.0, step)) + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(near, -127.0), 127.0).to(tl.int32).to(tl.int8)


@triton.jit
def fp8_codes(x):
    """The E4M3 codes (int8) of fp32 numbers: to the nearest, ties to even, saturated."""
    size = tl.abs(x)
    size = tl.where(size > 448.0, 448.0, size)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    tiny = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0.015625, tiny, normal)
    return (tl.where(x != x, 0x7F, code) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.int8)


@triton.jit
def coded(x, CODE: tl.constexpr):
    """fp32 vectors [rows, dims] as codes (int8), their scales (fp16 [rows]; INT8 only) and, in fp32, what these mean."""
    if CODE == INT8:
        scale = int8_scale(tl.max(tl.abs(x), 1), tl.max((x != x).to(tl.int32), 1))
        step = scale.to(tl.float32)[:, None]
        codes = int8_codes(x, step)
        return codes, scale, codes.to(tl.float32) * step
    else:
        codes = fp8_codes(x)
        meant = from_fp8(codes.to(tl.int16) & 0xFF).to(tl.float32)
        return codes, tl.zeros([x.shape[0]], tl.float16), meant


@triton.jit
def scales_of(scales, table, head_at, n0, low, stop, block_stride, BT: tl.constexpr, BLOCK_N: tl.constexpr):
    """fp32 scales of keys or values n0 (even) to n0 + BLOCK_N - 1, 0 before `low` and from `stop` on; `head_at`: where those of
    the head begin in a block.

    Loaded by twos: copies into shared memory that overlap with the work on other blocks take 4 bytes at least.
    """
    n = n0 + 2 * tl.arange(0, BLOCK_N // 2)
    there = (n + 1 >= low) & (n < stop)
    block = tl.load(table + n // BT, there, 0).to(tl.int64) * block_stride
    both = tl.load(scales.to(tl.pointer_type(tl.int32), bitcast=True) + (block + head_at + n % BT) // 2, there, 0)
    first, second = halves(both)
    first, second = tl.where(n >= low, first, 0.0), tl.where(n + 1 < stop, second, 0.0)
    found = tl.reshape(tl.join(first, second), [BLOCK_N])
    return found.to(tl.float32)


def geometry(kv: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, int, int, int]:
    """(code, KV heads, tokens of a block, head dimension) of one layer's blocks.

    `kv` [blocks, 2, kv_heads, block_tokens, dim] of numbers, or the same with dim / 2 words (int16) of codes. With `scales` [blocks,
    2, kv_heads, block_tokens], fp16, the codes are INT8, otherwise FP8. Of INT4 there are dim / 4 words, and `scales` is [blocks, …]:
    scale and minimum of values [kv_heads, block_tokens, 2], behind them those of keys [groups, kv_heads, dim, 2], groups being
    `KEY_GROUP` tokens. All lie in the same blocks: their first strides agree.
    """
    _, _, kv_heads, block_tokens, width = kv.shape
    if kv.dtype != torch.int16:
        return PLAIN.value, kv_heads, block_tokens, width
    if scales is not None and scales.dim() == 2:
        assert scales.stride(0) == kv.stride(0)
        assert block_tokens % KEY_GROUP.value == 0
        return INT4.value, kv_heads, block_tokens, 4 * width
    if scales is None:
        code = FP8 if kv.is_cuda and _reads_fp8(kv.device) else FP8_BITS
        return code.value, kv_heads, block_tokens, 2 * width
    assert scales.stride(0) == kv.stride(0)
    assert block_tokens % 2 == 0
    return INT8.value, kv_heads, block_tokens, 2 * width


def padded_dim(code: int, dim: int) -> int:
    """Dimensions of a tile: a power of two, of which tensor cores need 16 at a time, and codes come as two halves or four quarters."""
    return max(16 if code == PLAIN.value else 64 if code == INT4.value else 32, power_of_2(dim))


@cache
def _reads_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)
