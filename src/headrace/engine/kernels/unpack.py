"""Codes of quantized weights to bf16, a register of four bytes at a time; what no instruction set offers is made of bit moves.

Each function takes bytes [..., n] and gives the values of n codes, scales left out. Of 4-bit codes four bytes hold two times four:
`HALF` 0 asks for the first four, 1 for the others. INT4 and NF4 have the first in the bytes' low halves. Of MXFP4 the bits of
codes 0 and 1, 2 and 3, and so on lie at the same places of a word's halves, and where they are moved by few instructions
to where bf16 has them (`MXFP4_BITS`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.engine.quant.tables import NF4

INT4, MXFP4, NF4_CODES, INT8, FP8 = (tl.constexpr(i) for i in range(5))
"""Kinds of codes; those of 4 bits come first."""
MXFP4_BITS = ((15, 6), (12, 3), (14, 0), (13, 9))
"""Of four codes in half a word, where the sign is and where the three bits of the magnitude begin."""


def _bf16_bytes() -> tuple[list[int], list[int]]:
    """The values of NF4 rounded to bf16: low and high bytes of the 16 entries, four to a word."""
    bits = [int(v) for v in ((NF4.view("uint32").astype("uint64") + 0x7FFF + ((NF4.view("uint32") >> 16) & 1)) >> 16)]
    words = lambda shift: [sum((bits[4 * w + i] >> shift & 255) << 8 * i for i in range(4)) for w in range(4)]  # noqa: E731
    return words(0), words(8)


def _nf4(half: int) -> str:
    low, high = _bf16_bytes()
    # A selector's nibble addresses eight bytes with three bits; the fourth bit then chooses between two such tables.
    return f"""{{
        .reg .b32 w, m, f, a, b, lo, hi;
        {"mov.b32 w, $2;" if half == 0 else "shr.b32 w, $2, 4;"}
        and.b32 m, w, 0x07070707;
        shr.b32 a, m, 4;
        or.b32 m, m, a;
        prmt.b32 m, m, 0, 0x4420;
        shl.b32 f, w, 4;
        prmt.b32 f, f, 0, 0xBA98;
        prmt.b32 a, {low[0]}, {low[1]}, m;
        prmt.b32 b, {low[2]}, {low[3]}, m;
        lop3.b32 lo, f, b, a, 0xCA;
        prmt.b32 a, {high[0]}, {high[1]}, m;
        prmt.b32 b, {high[2]}, {high[3]}, m;
        lop3.b32 hi, f, b, a, 0xCA;
        prmt.b32 $0, lo, hi, 0x5140;
        prmt.b32 $1, lo, hi, 0x7362;
    }}"""


_PAIRS = (("0x4140", "$0"), ("0x4342", "$1"))
"""Two bytes of four into the low bytes of a register's halves, and where their values go."""


def _int4(half: int) -> str:
    # A code in the mantissa of 128 is 128 + code; less 136 it is the signed code.
    lines = "".join(
        f"prmt.b32 t, w, 0, {selector}; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 {to}, t, one, less;"
        for selector, to in _PAIRS
    )
    return f"""{{
        .reg .b32 w, t, one, less;
        mov.b32 one, 0x3F803F80;
        mov.b32 less, 0xC308C308;
        shr.b32 w, $2, {4 * half};
        {lines}
    }}"""


def _mxfp4(half: int, after: str) -> str:
    # Sign to bit 15, exponent and mantissa to bits 6-8: a bf16 too small by 2^126, subnormals included. Multiplying moves
    # left: that keeps work from the units that shift and choose bits.
    lines = ""
    for i, (sign, size) in enumerate(MXFP4_BITS[2 * half : 2 * half + 2]):
        moved = "w" if size == 6 else "t"
        if size != 6:
            lines += "shr.b32 t, w, 3;" if size > 6 else f"mul.lo.u32 t, w, {1 << 6 - size};"
        if sign - size == 9:
            lines += f"and.b32 t, {moved}, 0x81C081C0;"
        else:
            lines += f"mul.lo.u32 s, w, {1 << 15 - sign}; and.b32 t, t, 0x01C001C0; lop3.b32 t, s, 0x80008000, t, 0xEA;"
        lines += after.format(to=f"${i}", by=f"${3 + i}") if after else f"mov.b32 ${i}, t;"
    return f"""{{
        .reg .b32 w, s, t, grow, none;
        mov.b32 w, $2;
        mov.b32 grow, 0x7E807E80;
        mov.b32 none, 0x80008000;
        {lines}
    }}"""


_GROWN = "fma.rn.bf16x2 {to}, t, grow, none;"
_SCALED = "fma.rn.bf16x2 t, t, grow, none; fma.rn.bf16x2 {to}, t, {by}, none;"


def _int8() -> str:
    # Seven bits in the mantissa of 128; the sign bit makes a 256 of the 128 that is taken away.
    lines = "".join(
        f"prmt.b32 t, $2, 0, {selector}; lop3.b32 c, t, 0x007F007F, 0x43004300, 0xEA;"
        f"lop3.b32 t, t, 0x00800080, 0x43004300, 0xEA; fma.rn.bf16x2 {to}, t, minus, c;"
        for selector, to in _PAIRS
    )
    return f"""{{
        .reg .b32 t, c, minus;
        mov.b32 minus, 0xBF80BF80;
        {lines}
    }}"""


def _fp8_tiny() -> str:
    # As `_fp8` without its multiplication, of bytes 0 and 2, then of 1 and 3, whose bits need not be brought together first.
    return """{
        .reg .b32 s, t;
        shl.b32 s, $2, 8;
        shl.b32 t, $2, 4;
        and.b32 t, t, 0x07F007F0;
        lop3.b32 $0, s, 0x80008000, t, 0xEA;
        shr.b32 t, $2, 4;
        and.b32 t, t, 0x07F007F0;
        lop3.b32 $1, $2, 0x80008000, t, 0xEA;
    }"""


def _fp8() -> str:
    # Exponent and mantissa four bits down: a bf16 too small by 2^120, subnormals included.
    lines = "".join(
        f"prmt.b32 s, $2, 0, {selector}; shr.b32 t, s, 4; and.b32 t, t, 0x07F007F0;"
        f"lop3.b32 t, s, 0x80008000, t, 0xEA; fma.rn.bf16x2 {to}, t, grow, none;"
        for selector, to in (("0x1404", "$0"), ("0x3424", "$1"))
    )
    return f"""{{
        .reg .b32 s, t, grow, none;
        mov.b32 grow, 0x7B807B80;
        mov.b32 none, 0x80008000;
        {lines}
    }}"""


def _shifted4(half: int) -> str:
    # As `_int4`, with what a zero point and the 128 take off in registers of their own.
    lines = "".join(
        f"prmt.b32 t, w, 0, {selector}; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 {to}, t, one, {less};"
        for (selector, to), less in zip(_PAIRS, ("$3", "$4"), strict=True)
    )
    return f"""{{
        .reg .b32 w, t, one;
        mov.b32 one, 0x3F803F80;
        shr.b32 w, $2, {4 * half};
        {lines}
    }}"""


def byte_words() -> torch.Tensor:
    """The bits of 256 words as fp32: what the low code of a byte of NF4 means, as bf16, and above it what the high one means."""
    values, byte = torch.from_numpy(NF4), torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], 1).bfloat16().view(torch.float32).view(-1)


def _looked_up(apart: bool) -> str:
    found = "".join(f"prmt.b32 {r}, $4, 0, 0x444{i}; mad.lo.u32 {r}, {r}, 128, $5; " for i, r in enumerate("abcd"))
    found += "".join(f"ld.shared.b32 {r if apart else f'${i}'}, [{r}]; " for i, r in enumerate("abcd"))
    if apart:
        found += "prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, c, d, 0x5410; "
        found += "prmt.b32 $2, a, b, 0x7632; prmt.b32 $3, c, d, 0x7632; "
    return f"{{ .reg .u32 a, b, c, d; {found} }}"


_LOOKED_UP, _LOOKED_UP_APART = tl.constexpr(_looked_up(False)), tl.constexpr(_looked_up(True))
_SHIFTED4_0, _SHIFTED4_1 = tl.constexpr(_shifted4(0)), tl.constexpr(_shifted4(1))
_INT4_0, _INT4_1 = tl.constexpr(_int4(0)), tl.constexpr(_int4(1))
_MXFP4_0, _MXFP4_1 = (tl.constexpr(_mxfp4(half, _GROWN)) for half in (0, 1))
_MXFP4_TINY_0, _MXFP4_TINY_1 = (tl.constexpr(_mxfp4(half, "")) for half in (0, 1))
_MXFP4_SCALED_0, _MXFP4_SCALED_1 = (tl.constexpr(_mxfp4(half, _SCALED)) for half in (0, 1))
_NF4_0, _NF4_1 = tl.constexpr(_nf4(0)), tl.constexpr(_nf4(1))
_INT8, _FP8, _FP8_TINY = tl.constexpr(_int8()), tl.constexpr(_fp8()), tl.constexpr(_fp8_tiny())


_INT4_PAIR_0 = tl.constexpr(
    "{ .reg .b32 t; lop3.b32 t, $1, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, $2, $3; }"
)
_INT4_PAIR_1 = tl.constexpr(
    "{ .reg .b32 t; shr.b32 t, $1, 4; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, t, $2, $3; }"
)
_MXFP4_PAIR_0 = tl.constexpr(
    "{ .reg .b32 t; shf.l.wrap.b32 t, $1, $1, $2; and.b32 t, t, 0x81C081C0; "
    "fma.rn.bf16x2 t, t, $5, $6; fma.rn.bf16x2 $0, t, $4, $6; }"
)
_MXFP4_PAIR_1 = tl.constexpr(
    "{ .reg .b32 s, t; shf.l.wrap.b32 t, $1, $1, $2; and.b32 t, t, 0x01C001C0; shf.l.wrap.b32 s, $1, $1, $3; "
    "lop3.b32 t, s, 0x80008000, t, 0xEA; fma.rn.bf16x2 t, t, $5, $6; fma.rn.bf16x2 $0, t, $4, $6; }"
)


@triton.jit
def _asm(packed, CODE: tl.constexpr):
    return tl.inline_asm_elementwise(CODE, "=&r,=&r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def fp8_tiny(packed):
    """bf16 values of E4M3 bytes times 2^-120, subnormal numbers among them; of four bytes in the order 0, 2, 1, 3."""
    return _asm(packed, _FP8_TINY)


@triton.jit
def mxfp4_tiny(packed, HALF: tl.constexpr):
    """bf16 values of MXFP4 bytes times 2^-126, subnormal numbers among them."""
    return _asm(packed, _MXFP4_TINY_0 if HALF == 0 else _MXFP4_TINY_1)


@triton.jit
def enlarged(pairs):
    """Words of two bf16 values, each times 2^64."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [pairs, 0x5F805F80, -0x7FFF8000], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def enlarged_apart(pairs):
    """Of words of two bf16 values the low ones and the high ones, each times 2^64."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t, grow, none; mov.b32 grow, 0x5F805F80; mov.b32 none, 0x80008000; "
        "prmt.b32 t, $2, $3, 0x5410; fma.rn.bf16x2 $0, t, grow, none; "
        "prmt.b32 t, $2, $3, 0x7632; fma.rn.bf16x2 $1, t, grow, none; }",
        "=&r,=&r,r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def unpacked(packed, KIND: tl.constexpr, HALF: tl.constexpr):
    """bf16 values of bytes."""
    if KIND == INT8:
        return _asm(packed, _INT8)
    elif KIND == FP8:
        return _asm(packed, _FP8)
    elif KIND == INT4:
        return _asm(packed, _INT4_0 if HALF == 0 else _INT4_1)
    elif KIND == MXFP4:
        return _asm(packed, _MXFP4_0 if HALF == 0 else _MXFP4_1)
    else:
        return _asm(packed, _NF4_0 if HALF == 0 else _NF4_1)


@triton.jit
def _asm2(packed, by, CODE: tl.constexpr):
    return tl.inline_asm_elementwise(CODE, "=&r,=&r,r,r,r", [packed, by], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def shifted4(packed, less, HALF: tl.constexpr):
    """bf16 values of INT4 bytes: 128 + the unsigned code + `less`, bf16 like `packed`, which is -128 and a zero point off."""
    return _asm2(packed, less, _SHIFTED4_0 if HALF == 0 else _SHIFTED4_1)


@triton.jit
def mxfp4_scaled(packed, by, HALF: tl.constexpr):
    """bf16 values of MXFP4 bytes times `by`, bf16 like `packed`."""
    return _asm2(packed, by, _MXFP4_SCALED_0 if HALF == 0 else _MXFP4_SCALED_1)


@triton.jit
def table_place(anything):
    """Where in shared memory this kernel has room for a table of 256 words, each once in every bank: to be called once in it."""
    return tl.inline_asm_elementwise(
        "{ .shared .align 128 .b8 values[32768]; mov.u32 $0, values; }", "=r,r", [anything], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def table_filled(place, word):
    """Store `word` four times at `place`."""
    return tl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {$2, $2, $2, $2}; mov.u32 $0, 0;", "=r,r,r", [place, word], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def table_bank(place):
    """Where the calling lane's copy begins. In order with `table_filled` and barriers, so that what reads from there is too."""
    return tl.inline_asm_elementwise(
        "{ .reg .u32 l; mov.u32 l, %laneid; mad.lo.u32 $0, l, 4, $1; }", "=r,r", [place], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def looked_up(packed, table):
    """Values of both codes of bytes, of the first two of four bytes and of the last two; `table` (int32 like `packed`) as of
    `table_bank`, 128 bytes from word to word. bf16, the low code's value before the high one's."""
    return tl.inline_asm_elementwise(
        _LOOKED_UP, "=&r,=&r,=&r,=&r,r,r,r,r,r", [packed, table], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )


@triton.jit
def looked_up_apart(packed, table):
    """The same, of the low codes and of the high ones."""
    return tl.inline_asm_elementwise(
        _LOOKED_UP_APART, "=&r,=&r,=&r,=&r,r,r,r,r,r", [packed, table], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
        pack=4,
    )  # fmt: skip


@triton.jit
def spread(words, even, odd):
    """Two words' bytes chosen by the selectors `even` and `odd`, from a word and from zero, as bf16."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $4, 0, $6; prmt.b32 $1, $4, 0, $8; prmt.b32 $2, $5, 0, $6; prmt.b32 $3, $5, 0, $8;",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r", [words, even, odd], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip


# Pairs: words (int32) of two neighbouring inputs' bf16 values. They are made of words of two bytes, the rest zeros.


@triton.jit
def spread_bytes(words):
    """The two low bytes as the low bytes of the word's halves."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x4140;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def int4_pairs(spread, HALF: tl.constexpr):
    """The signed codes of the low (`HALF` 0) or the high (1) halves of `spread_bytes`."""
    return tl.inline_asm_elementwise(
        _INT4_PAIR_0 if HALF == 0 else _INT4_PAIR_1, "=r,r,r,r", [spread, 0x3F803F80, -0x3CF73CF8], dtype=tl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def shifted_pairs(spread, less, HALF: tl.constexpr):
    """The same of unsigned codes: 128 + code + `less`, a pair."""
    return tl.inline_asm_elementwise(
        _INT4_PAIR_0 if HALF == 0 else _INT4_PAIR_1, "=r,r,r,r", [spread, 0x3F803F80, less], dtype=tl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def int8_pairs(spread):
    """The signed codes of `spread_bytes`."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t, c; lop3.b32 c, $1, 0x007F007F, 0x43004300, 0xEA; lop3.b32 t, $1, 0x00800080, 0x43004300, 0xEA; "
        "fma.rn.bf16x2 $0, t, $2, c; }",
        "=r,r,r", [spread, -0x407F4080], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def nf4_pairs(words, HALF: tl.constexpr):
    """The values of NF4 of the low or the high halves of words (int16) of two bytes."""
    return tl.inline_asm_elementwise(
        _NF4_0 if HALF == 0 else _NF4_1, "=&r,=&r,r", [words], dtype=tl.int32, is_pure=True, pack=2
    )  # fmt: skip


@triton.jit
def mxfp4_pairs(words, size, sign, by, HALF: tl.constexpr):
    """Of words of MXFP4 bytes a pair of the word's first (`HALF` 0) or second half, times `by`: the one that turning left by
    `size` and `sign` brings to its place (of the first half they are the same)."""
    return tl.inline_asm_elementwise(
        _MXFP4_PAIR_0 if HALF == 0 else _MXFP4_PAIR_1, "=r,r,r,r,r,r,r", [words, size, sign, by, 0x7E807E80, -0x7FFF8000],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def scaled_pairs(pairs, large, small):
    """Pairs times the sum of two factors."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; fma.rn.bf16x2 t, $1, $3, $4; fma.rn.bf16x2 $0, $1, $2, t; }", "=r,r,r,r,r",
        [pairs, large, small, -0x7FFF8000], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def valued(code, table, KIND: tl.constexpr):
    """fp32 values of codes of their own (int32, unsigned) in plain arithmetic; `table` holds NF4's values from its 257th
    entry on."""
    if KIND == INT4:
        return (code - 8).to(tl.float32)
    elif KIND == INT8:
        return tl.where(code >= 128, code - 256, code).to(tl.float32)
    elif KIND == FP8:
        exponent, mantissa = (code >> 3) & 15, (code & 7).to(tl.float32)
        size = tl.where(
            exponent == 0, mantissa * 0.001953125, (1 + mantissa * 0.125) * tl.exp2((exponent - 7).to(tl.float32))
        )
        return tl.where(code >= 128, -size, size)
    elif KIND == MXFP4:
        exponent, mantissa = (code >> 1) & 3, (code & 1).to(tl.float32)
        size = tl.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * (1 << exponent).to(tl.float32) * 0.5)
        return tl.where(code >= 8, -size, size)
    else:
        return tl.load(table + 256 + code)
