"""Matrix products of few rows, with the work around them fused in.

A product of few rows M reads every weight once and does M multiply-adds with it: bandwidth is all. The rows are one padded
tensor-core tile; the inner dimension may be split among programs, whose last one to finish adds the parts.

RMS norm costs no kernel and nothing in the inner loop: its scale commutes with the product. Whoever writes the residual stream
x also writes x * gain for the norm that follows, and each of its programs the squares of its columns, summed; the product that
reads x * gain multiplies its result by 1 / rms. Other epilogues: bias, residual sum, act(gate) * up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.engine.kernels.activation import ACTIVATIONS, act
from headrace.engine.kernels.decode import arrived_last

MAX_ROWS = tl.constexpr(256)
"""Rows that a product takes at most; the distance of a tile's sums of squares from the next one's."""
PART_ROWS = 256
"""Padded rows times parts of the inner dimension, at most."""
SPECIALIZED_BYTES = 216 << 10
"""Shared memory for a warp-specialized program's ring; its barriers and sums across threads take some more."""
LARGEST_TILE = 128 * 256
"""Rows times outputs of a warp-specialized program's tile, at most."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """One way to run a product: output columns and inner elements per step, parts of the inner dimension, warps, stages.

    `tma`: operands come by bulk tensor copies (compute capability 9 and later; columns and inner must divide evenly).
    `rows`: the rows are padded to so many (0: the least power of two); one kernel then serves all numbers up to it.
    `direct`: quantized weights go to registers without shared memory, the inner dimension is split among the warps, and
    `stages` counts the steps that are loaded ahead (`headrace.engine.kernels.streamed`; `block_k` and `split_k` do not
    count). `registers`: a thread's at most, so that more programs are on a multiprocessor; 0: what the compiler takes.
    `block_m`: warp-specialized tiles (`headrace.engine.kernels.gemm_hopper`); each of `row_groups` times `column_groups`
    groups of four warps multiplies `block_m` rows by `block_n` outputs, `block_k` is 64, and the inner dimension is cut as
    evenness wants it, so that `split_k` and `num_warps` do not count.
    """

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    stages: int
    tma: bool = False
    rows: int = 0
    direct: bool = False
    registers: int = 0
    block_m: int = 0
    row_groups: int = 1
    column_groups: int = 1


@triton.jit
def prefetch(pointers):
    """Ask for the cache lines at `pointers` to be brought into the L2 cache; the result is nothing, and must be used."""
    return tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def shrink_of(squares, count, m, rows, inner, eps, BLOCK_M: tl.constexpr):
    """1 / rms of each row from the partial sums of squares [count, MAX_ROWS] that its writer left."""
    AT_ONCE: tl.constexpr = 64 if BLOCK_M <= 32 else 2048 // BLOCK_M
    total = tl.zeros([BLOCK_M], tl.float32)
    for t0 in range(0, count, AT_ONCE):
        t = t0 + tl.arange(0, AT_ONCE)
        inside = (t[:, None] < count) & (m[None, :] < rows)
        total += tl.sum(tl.load(squares + t[:, None] * MAX_ROWS + m[None, :], inside, 0.0), 0)
    return tl.rsqrt(total / inner + eps)[:, None]


@triton.jit(do_not_specialize=["rows", "eps", "scale", "count"])
def _skinny(
    x, w, weights, bias, squares, gain, residual, out, gained, squares_out, parts, counters,
    rows, columns, inner, count, eps, scale, x_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    NORM: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    GAIN: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = n < columns
    steps = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLIT_K)
    begin = part * steps * BLOCK_K
    stop = tl.minimum(begin + steps * BLOCK_K, inner)
    w_at = weights + n.to(tl.int64)[None, :] * inner
    w2_at = w_at + columns.to(tl.int64) * inner
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if EVEN:
            # The weights depend on no one: fetch the first of them while the kernel before this one ends.
            AHEAD: tl.constexpr = 8 if TMA else BLOCK_K // 64 * 2
            lines = tl.arange(0, AHEAD)[:, None] * 64
            within = (begin + lines < stop) & n_inside[None, :]
            prefetch(tl.where(within, w_at + begin + lines, w_at + begin))
            if PAIR:
                prefetch(tl.where(within, w2_at + begin + lines, w2_at + begin))
        tl.extra.cuda.gdc_wait()
    for k0 in tl.range(begin, stop, BLOCK_K, num_stages=STAGES):
        k = k0 + tl.arange(0, BLOCK_K)
        if TMA:
            a = x.load([0, k0])
            b = w.load([tile * BLOCK_N, k0]).T
        elif EVEN:
            a = tl.load(x + m[:, None] * x_stride + k[None, :], m[:, None] < rows, 0.0)
            b = tl.load(w_at + k[:, None])
        else:
            there = k < stop
            a = tl.load(x + m[:, None] * x_stride + k[None, :], (m[:, None] < rows) & there[None, :], 0.0)
            b = tl.load(w_at + k[:, None], n_inside[None, :] & there[:, None], 0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if PAIR:
            if TMA:
                b2 = w.load([columns + tile * BLOCK_N, k0]).T
            elif EVEN:
                b2 = tl.load(w2_at + k[:, None])
            else:
                there = k < stop
                b2 = tl.load(w2_at + k[:, None], n_inside[None, :] & there[:, None], 0.0)
            acc2 = tl.dot(a, b2, acc2, input_precision="ieee")
    inside = (m[:, None] < rows) & n_inside[None, :]
    last = True
    if SPLIT_K > 1:
        at = (part * BLOCK_M + m[:, None]) * (columns * (2 if PAIR else 1)) + n[None, :]
        tl.store(parts + at, acc, inside)
        if PAIR:
            tl.store(parts + at + columns, acc2, inside)
        tl.debug_barrier()
        last = arrived_last(counters + tile, SPLIT_K)
        if last:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for p in tl.static_range(SPLIT_K):
                at = (p * BLOCK_M + m[:, None]) * (columns * (2 if PAIR else 1)) + n[None, :]
                acc += tl.load(parts + at, inside, 0.0, cache_modifier=".cg")
                if PAIR:
                    acc2 += tl.load(parts + at + columns, inside, 0.0, cache_modifier=".cg")
    if last:
        if NORM:
            shrink = shrink_of(squares, count, m, rows, inner, eps, BLOCK_M)
            acc = acc * shrink
            acc2 = acc2 * shrink
        if BIAS:
            acc += tl.load(bias + n, n_inside, 0.0).to(tl.float32)[None, :]
            if PAIR:
                acc2 += tl.load(bias + columns + n, n_inside, 0.0).to(tl.float32)[None, :]
        if PAIR:
            acc = act(acc, ACT) * acc2
        target = m[:, None] * out_stride + n[None, :]
        if RESIDUAL:
            acc = acc * scale + tl.load(residual + target, inside, 0.0).to(tl.float32)
        rounded = acc.to(out.dtype.element_ty)
        tl.store(out + target, rounded, inside)
        if GAIN:
            wide = tl.where(inside, rounded.to(tl.float32), 0.0)
            tl.store(squares_out + tile * MAX_ROWS + m, tl.sum(wide * wide, 1), m < rows)
            wide = wide * tl.load(gain + n, n_inside, 0.0).to(tl.float32)[None, :]
            tl.store(gained + target, wide.to(out.dtype.element_ty), inside)


def unfit(config: GemmConfig, columns: int, inner: int, *, pair: bool) -> str | None:
    """Why a warp-specialized configuration (`block_m`) cannot run a product, or None."""
    c = config
    width, outputs, rows = columns * (2 if pair else 1), c.block_n * c.column_groups, c.block_m * c.row_groups
    if width % outputs:
        return f"{width} outputs are no multiple of {outputs}"
    if inner % 64:
        return f"an inner dimension of {inner} is no multiple of 64"
    if c.row_groups * c.column_groups > 3:
        return f"{c.row_groups * c.column_groups} groups of warps leave too few registers to each"
    if rows * outputs > LARGEST_TILE:
        return f"a tile of {rows} by {outputs} leaves no registers"
    if (shared := c.stages * (rows + outputs) * 128) > SPECIALIZED_BYTES:
        return f"{shared} bytes of shared memory are more than {SPECIALIZED_BYTES}"
    return None


def why_not_specialized(capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Why the warp-specialized products (`block_m`) cannot serve a model, or None."""
    if capability[0] != 9:
        return f"compute capability {capability[0]}.{capability[1]} has no warp-group products"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} is not bf16 or fp16"
    try:
        from headrace.engine.kernels import gemm_hopper  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"this Triton has no usable Gluon ({error})"
    return None


class GemmWorkspace:
    """Parts of split products and their arrival counters (always back at zero when a product ends).

    `programs`: how many of a warp-specialized kernel's are on the card at once (its multiprocessors), each with a part of
    a tile; 0: there are none.
    """

    def __init__(self, elements: int, tiles: int, device: torch.device, programs: int = 0) -> None:
        elements = max(elements, programs * LARGEST_TILE)
        self.programs = programs
        self.parts = torch.empty(elements, dtype=torch.float32, device=device)
        self.counters = torch.zeros(tiles, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.parts.nbytes + self.counters.nbytes


@dataclass(slots=True)
class Gained:
    """x * gain [rows, width] and the partial sums of squares of x, fp32 [tiles, MAX_ROWS]; `count` tiles of them are in use."""

    values: torch.Tensor
    squares: torch.Tensor
    count: int = 0


@dataclass(slots=True)
class Fused:
    """What is fused into a product: see `skinny_gemm`."""

    eps: float = 0.0
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    scale: float = 1.0
    pair: str | None = None
    gain: torch.Tensor | None = None
    gained: Gained | None = None
    pdl: bool = False

    def tensors(self, x: torch.Tensor | Gained, out: torch.Tensor, work: GemmWorkspace) -> tuple[torch.Tensor, ...]:
        """What launches are given from the bias to the counters."""
        some = work.parts
        values, squares = (out, some) if self.gained is None else (self.gained.values, self.gained.squares)
        return (
            some if self.bias is None else self.bias, x.squares if isinstance(x, Gained) else some,
            some if self.gain is None else self.gain, some if self.residual is None else self.residual,
            out, values, squares, work.parts, work.counters,
        )  # fmt: skip

    def numbers(self, x: torch.Tensor | Gained) -> tuple[int, float, float]:
        """How many tiles of x have sums of squares, and what is added to their mean; what the product is multiplied by."""
        return (x.count if isinstance(x, Gained) else 0), self.eps, self.scale

    def leaves(self, tiles: int) -> None:
        """Note that `gained` gets the squares of so many tiles."""
        if self.gained is not None:
            assert tiles * MAX_ROWS.value <= self.gained.squares.numel()
            self.gained.count = tiles

    def flags(self, x: torch.Tensor | Gained) -> dict[str, Any]:
        return {
            "NORM": isinstance(x, Gained), "PAIR": self.pair is not None, "ACT": ACTIVATIONS[self.pair or "silu"],
            "BIAS": self.bias is not None, "RESIDUAL": self.residual is not None, "GAIN": self.gained is not None,
            "PDL": self.pdl, **({"launch_pdl": True} if self.pdl else {}),
        }  # fmt: skip


def sizes(x: torch.Tensor | Gained, outputs: int, fused: Fused) -> tuple[torch.Tensor, int, int, int]:
    """What is multiplied, its rows, the columns of the result and the inner dimension."""
    source = x.values if isinstance(x, Gained) else x
    return source, len(source), outputs // (2 if fused.pair else 1), source.shape[1]


def rows_read(x: torch.Tensor, padded: int) -> int:
    """How many rows of x a bulk copy of `padded` rows is to read: all where memory goes on behind x, as in the step's buffers.

    Rows past a tensor's end cost the copy engine about 1 us each; what is read instead only reaches rows that are not stored.
    """
    there = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) // x.stride(0)
    return padded if there >= padded else x.shape[0]


def skinny_gemm(
    x: torch.Tensor | Gained,
    w: torch.Tensor,
    out: torch.Tensor,
    work: GemmWorkspace,
    config: GemmConfig,
    **given: Any,
) -> None:
    """out [rows, n] = x [rows, k] times the transpose of w [n, k], for at most `MAX_ROWS` rows.

    A `Gained` x is RMS-normalized (with `eps`) on the way. `pair`: w is [2 n, k] and out = act(x w1') * (x w2'). `residual`
    (like out; may be out itself): out = residual + scale * product. With `gain` [n], `gained` is written beside out. `given`:
    all these, the fields of `Fused`.
    """
    fused = Fused(**given)
    source, rows, columns, inner = sizes(x, w.shape[0], fused)
    c = config
    block_m = max(16, c.rows, triton.next_power_of_2(rows))
    tiles = triton.cdiv(columns, c.block_n)
    even = columns % c.block_n == 0 and inner % (c.block_k * c.split_k) == 0
    assert c.split_k == 1 or c.split_k * block_m * w.shape[0] <= work.parts.numel()
    assert c.split_k == 1 or tiles <= work.counters.numel()
    x_given, w_given = source, w
    if c.tma:
        assert even
        x_given = TensorDescriptor(
            source, [rows_read(source, block_m), inner], [source.stride(0), 1], [block_m, c.block_k]
        )
        w_given = TensorDescriptor.from_tensor(w, [c.block_n, c.block_k])
    fused.leaves(tiles)
    _skinny[(tiles, c.split_k)](
        x_given, w_given, w, *fused.tensors(x, out, work), rows, columns, inner, *fused.numbers(x), source.stride(0), out.stride(0),
        BLOCK_M=block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, SPLIT_K=c.split_k, EVEN=even, TMA=c.tma, STAGES=c.stages,
        num_warps=c.num_warps, **fused.flags(x),
    )  # fmt: skip


def fused_gemm(
    x: torch.Tensor | Gained, w: torch.Tensor, out: torch.Tensor, work: GemmWorkspace, config: GemmConfig, **more: Any
) -> None:
    """`skinny_gemm`, or its like with warp-specialized tiles where the configuration has `block_m`."""
    if config.block_m:
        from headrace.engine.kernels.gemm_hopper import hopper_gemm

        hopper_gemm(x, w, out, work, config, **more)
    else:
        skinny_gemm(x, w, out, work, config, **more)
