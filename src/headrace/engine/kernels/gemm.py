"""Matrix products of few rows, with the work around them fused in.

A product of M <= 64 rows reads every weight once and does M multiply-adds with it: bandwidth is all. The rows are one padded
tensor-core tile; the inner dimension may be split among programs, whose last one to finish adds the parts. Prologue: the RMS
norm of the input (its scale commutes with the product, so the sum of squares is gathered while the rows stream by).
Epilogues: bias, residual sum, act(gate) * up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.engine.kernels.activation import ACTIVATIONS, act


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """One way to run a product: output columns and inner elements per step, parts of the inner dimension, warps, stages."""

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    stages: int


@triton.jit(do_not_specialize=["rows", "eps", "scale"])
def _skinny(
    x, w, bias, norm, residual, out, parts, squares, counters, rows, columns, inner, eps, scale, x_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    NORM: tl.constexpr, PAIR: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = n < columns
    steps = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLIT_K)
    begin = part * steps * BLOCK_K
    stop = tl.minimum(begin + steps * BLOCK_K, inner)
    w_at = w + n.to(tl.int64)[None, :] * inner
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for k0 in tl.range(begin, stop, BLOCK_K, num_stages=STAGES):
        k = k0 + tl.arange(0, BLOCK_K)
        if EVEN:
            a = tl.load(x + m[:, None] * x_stride + k[None, :], m[:, None] < rows, 0.0)
            b = tl.load(w_at + k[:, None], eviction_policy="evict_first")
        else:
            there = k < stop
            a = tl.load(x + m[:, None] * x_stride + k[None, :], (m[:, None] < rows) & there[None, :], 0.0)
            b = tl.load(w_at + k[:, None], n_inside[None, :] & there[:, None], 0.0)
        if NORM:
            wide = a.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            gain = tl.load(norm + k, k < inner, 0.0).to(tl.float32)
            a = (wide * gain[None, :]).to(a.dtype)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if PAIR:
            if EVEN:
                b2 = tl.load(w_at + columns.to(tl.int64) * inner + k[:, None], eviction_policy="evict_first")
            else:
                there = k < stop
                b2 = tl.load(
                    w_at + columns.to(tl.int64) * inner + k[:, None], n_inside[None, :] & there[:, None], 0.0
                )
            acc2 = tl.dot(a, b2, acc2, input_precision="ieee")
    last = True
    if SPLIT_K > 1:
        at = (part * BLOCK_M + m[:, None]) * (columns * (2 if PAIR else 1)) + n[None, :]
        inside = (m[:, None] < rows) & n_inside[None, :]
        tl.store(parts + at, acc, inside)
        if PAIR:
            tl.store(parts + at + columns, acc2, inside)
        if NORM:
            tl.store(squares + (tile * SPLIT_K + part) * BLOCK_M + m, square)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            tl.debug_barrier()
            tl.store(counters + tile, 0)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            square = tl.zeros([BLOCK_M], tl.float32)
            for p in tl.static_range(SPLIT_K):
                at = (p * BLOCK_M + m[:, None]) * (columns * (2 if PAIR else 1)) + n[None, :]
                acc += tl.load(parts + at, inside, 0.0, cache_modifier=".cg")
                if PAIR:
                    acc2 += tl.load(parts + at + columns, inside, 0.0, cache_modifier=".cg")
                if NORM:
                    square += tl.load(squares + (tile * SPLIT_K + p) * BLOCK_M + m, cache_modifier=".cg")
    if last:
        if NORM:
            shrink = tl.rsqrt(square / inner + eps)[:, None]
            acc = acc * shrink
            acc2 = acc2 * shrink
        if BIAS:
            acc += tl.load(bias + n, n_inside, 0.0).to(tl.float32)[None, :]
            if PAIR:
                acc2 += tl.load(bias + columns + n, n_inside, 0.0).to(tl.float32)[None, :]
        if PAIR:
            acc = act(acc, KIND) * acc2
        target = m[:, None] * out_stride + n[None, :]
        inside = (m[:, None] < rows) & n_inside[None, :]
        if RESIDUAL:
            acc = acc * scale + tl.load(residual + target, inside, 0.0).to(tl.float32)
        tl.store(out + target, acc.to(out.dtype.element_ty), inside)


class GemmWorkspace:
    """Parts of split products and their arrival counters (always back at zero when a product ends)."""

    def __init__(self, elements: int, tiles: int, device: torch.device) -> None:
        self.parts = torch.empty(elements, dtype=torch.float32, device=device)
        self.squares = torch.empty(tiles * 16 * 64, dtype=torch.float32, device=device)
        self.counters = torch.zeros(tiles, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.parts.nbytes + self.squares.nbytes + self.counters.nbytes


def skinny_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    work: GemmWorkspace,
    config: GemmConfig,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    pair: str | None = None,
    pdl: bool = False,
) -> None:
    """out [rows, n] = x [rows, k] times the transpose of w [n, k], for at most 64 rows.

    `norm` [k]: x is RMS-normalized first. `pair`: w is [2 n, k] and out = act(x w1') * (x w2'). `residual` (like out; may be
    out itself): out = residual + scale * product.
    """
    rows, inner = x.shape
    columns = w.shape[0] // (2 if pair else 1)
    block_m = max(16, triton.next_power_of_2(rows))
    c = config
    tiles = triton.cdiv(columns, c.block_n)
    even = columns % c.block_n == 0 and inner % (c.block_k * c.split_k) == 0
    assert c.split_k == 1 or c.split_k * block_m * w.shape[0] <= work.parts.numel()
    assert c.split_k == 1 or tiles <= work.counters.numel()
    assert c.split_k <= 16
    some = work.parts
    _skinny[(tiles, c.split_k)](
        x, w, some if bias is None else bias, some if norm is None else norm, some if residual is None else residual,
        out, work.parts, work.squares, work.counters, rows, columns, inner, eps, scale, x.stride(0), out.stride(0),
        BLOCK_M=block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, SPLIT_K=c.split_k, NORM=norm is not None,
        PAIR=pair is not None, KIND=ACTIVATIONS[pair or "silu"], BIAS=bias is not None, RESIDUAL=residual is not None,
        EVEN=even, PDL=pdl, STAGES=c.stages, num_warps=c.num_warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
