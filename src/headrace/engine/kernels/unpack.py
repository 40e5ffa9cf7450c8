"""Codes of quantized weights to bf16, a register of four bytes at a time; what no instruction set offers is made of bit moves.

Each function takes bytes [..., n] and gives the values of n codes, scales left out. Of 4-bit codes a byte holds two: `HALF` 0
asks for the low ones, 1 for the high ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.engine.quant.tables import NF4

INT4, MXFP4, NF4_CODES, INT8, FP8 = (tl.constexpr(i) for i in range(5))
"""Kinds of codes; those of 4 bits come first."""


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


def _mxfp4(half: int) -> str:
    # Sign to bit 15, exponent and mantissa to bits 6-8: a bf16 too small by 2^126, subnormals included.
    lines = "".join(
        f"prmt.b32 t, $2, 0, {selector}; shl.b32 s, t, {12 - 4 * half}; shl.b32 t, t, {6 - 4 * half}; "
        f"and.b32 t, t, 0x01C001C0; lop3.b32 t, s, 0x80008000, t, 0xEA; fma.rn.bf16x2 {to}, t, grow, none;"
        for selector, to in _PAIRS
    )
    return f"""{{
        .reg .b32 s, t, grow, none;
        mov.b32 grow, 0x7E807E80;
        mov.b32 none, 0x80008000;
        {lines}
    }}"""


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
    # `_fp8` without its multiplication.
    lines = "".join(
        f"prmt.b32 s, $2, 0, {selector}; shr.b32 t, s, 4; and.b32 t, t, 0x07F007F0; lop3.b32 {to}, s, 0x80008000, t, 0xEA;"
        for selector, to in (("0x1404", "$0"), ("0x3424", "$1"))
    )
    return f"{{ .reg .b32 s, t; {lines} }}"


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


def _looked_up(tables: list[tuple[str, int]], inputs: int, signed: str, ends: str) -> str:
    """Values of the eight codes of a word by byte permutations, whose selectors' nibbles are the codes themselves.

    `tables`: of four codes the register to make, and the high word of eight bytes to choose from; the low words are
    the operands from `inputs` on. Three bits of a code choose, `signed` does what the fourth asks for.
    """
    lines = ""
    for i, (pick, take) in enumerate((("0x9D8C", "m"), ("0xBFAE", "n"))):
        found = "".join(f"prmt.b32 {to}, ${inputs + 4 * j}, {high:#x}, {take};" for j, (to, high) in enumerate(tables))
        lines += f"prmt.b32 f, w, v, {pick}; {found} {signed}"
        lines += "".join(
            f"prmt.b32 {'t' if ends else to}, lo, hi, {order};" + ends.format(to=to, by=by)
            for to, by, order in ((f"${i}", f"${5 + i}", "0x6240"), (f"${2 + i}", f"${7 + i}", "0x7351"))
        )
    return f"""{{
        .reg .b32 w, v, m, n, f, t, lo, hi, lo8, hi8, none;
        mov.b32 w, $4;
        mov.b32 none, 0x80008000;
        shl.b32 v, w, 4;
        and.b32 m, w, 0x77777777;
        shr.b32 n, m, 16;
        {lines}
    }}"""


def lookup_words() -> list[int]:
    """Words of tables that `nf4_both` (four) and `mxfp4_both` (two) get in registers. As constants the compiler would move each
    into a register again for every use."""
    low, high = _bf16_bytes()
    return [low[0], low[2], high[0], high[2], 0xC0800000, 0x3F3F3F00]


def _nf4_both() -> str:
    low, high = _bf16_bytes()
    tables = [("lo", low[1]), ("lo8", low[3]), ("hi", high[1]), ("hi8", high[3])]
    choose = "lop3.b32 lo, f, lo8, lo, 0xCA; lop3.b32 hi, f, hi8, hi, 0xCA;"
    return _looked_up(tables, 5, choose, "")


def _mxfp4_both() -> str:
    # 0, 0.5, 1, 1.5, 2, 3, 4, 6 as bf16; the sign goes to the highest bit of the high byte, the scale is multiplied.
    tables = [("lo", 0xC0804000), ("hi", 0x40404040)]
    return _looked_up(tables, 9, "lop3.b32 hi, f, 0x80808080, hi, 0xEA;", "fma.rn.bf16x2 {to}, t, {by}, none;")


_SHIFTED4_0, _SHIFTED4_1 = tl.constexpr(_shifted4(0)), tl.constexpr(_shifted4(1))
_NF4_BOTH, _MXFP4_BOTH = tl.constexpr(_nf4_both()), tl.constexpr(_mxfp4_both())
_NF4_OPERANDS, _MXFP4_OPERANDS = (tl.constexpr("=&r,=&r,=&r,=&r" + ",r" * n) for n in (17, 13))
_INT4_0, _INT4_1 = tl.constexpr(_int4(0)), tl.constexpr(_int4(1))
_MXFP4_0, _MXFP4_1 = tl.constexpr(_mxfp4(0)), tl.constexpr(_mxfp4(1))
_NF4_0, _NF4_1 = tl.constexpr(_nf4(0)), tl.constexpr(_nf4(1))
_INT8, _FP8, _FP8_TINY = tl.constexpr(_int8()), tl.constexpr(_fp8()), tl.constexpr(_fp8_tiny())


@triton.jit
def _asm(packed, CODE: tl.constexpr):
    return tl.inline_asm_elementwise(CODE, "=&r,=&r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def fp8_tiny(packed):
    """bf16 values of E4M3 bytes times 2^-120, subnormal numbers among them."""
    return _asm(packed, _FP8_TINY)


@triton.jit
def enlarged(pairs):
    """Words of two bf16 values, each times 2^64."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [pairs, 0x5F805F80, -0x7FFF8000],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


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
def nf4_both(packed, a, b, c, d):
    """bf16 values of the low codes of NF4 bytes, and of the high ones; a to d: `lookup_words`, int32 like `packed`."""
    return tl.inline_asm_elementwise(
        _NF4_BOTH, _NF4_OPERANDS, [packed, a, b, c, d], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
        pack=4,
    )  # fmt: skip


@triton.jit
def mxfp4_both(packed, by, by2, a, b):
    """bf16 values of the low codes of MXFP4 bytes times `by`, and of the high ones times `by2`, both bf16; a and b: the last
    `lookup_words`, int32; all like `packed`."""
    return tl.inline_asm_elementwise(
        _MXFP4_BOTH, _MXFP4_OPERANDS, [packed, by, by2, a, b], dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=4,
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
