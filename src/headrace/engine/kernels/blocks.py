"""Changes to the paged cache's bookkeeping and contents."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.engine.kernels.codes import INT8, PLAIN, even, geometry, joined, odd


@triton.jit(do_not_specialize=["count"])
def _scatter(table, pairs, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    where = tl.load(pairs + 2 * at, inside, 0)
    tl.store(table + where, tl.load(pairs + 2 * at + 1, inside, 0), inside)


def scatter(table: torch.Tensor, pairs: torch.Tensor) -> None:
    """table.flat[pairs[i, 0]] = pairs[i, 1]; int32, places distinct."""
    count = len(pairs)
    _scatter[(triton.cdiv(count, 256),)](table, pairs, count, BLOCK=256, num_warps=4)


@triton.jit
def _copy(pool, pairs, block_elements, layer_stride, BLOCK: tl.constexpr):
    source = tl.load(pairs + 2 * tl.program_id(0)).to(tl.int64)
    target = tl.load(pairs + 2 * tl.program_id(0) + 1).to(tl.int64)
    base = pool + tl.program_id(1).to(tl.int64) * layer_stride
    for e0 in range(0, block_elements, BLOCK):
        e = e0 + tl.arange(0, BLOCK)
        inside = e < block_elements
        tl.store(base + target * block_elements + e, tl.load(base + source * block_elements + e, inside), inside)


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy whole blocks of all layers; pool [layers, blocks, …], pairs [n, 2] int32 (source, target), targets distinct and
    no source a target."""
    elements = pool[0, 0].numel()
    _copy[(len(pairs), pool.shape[0])](pool, pairs, elements, pool.stride(0), BLOCK=2048, num_warps=8)


@triton.jit(do_not_specialize=["align"])
def _gather(
    kv, scales, tables, chunks, offsets, out, align, table_stride, block_stride, out_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr,
    CODE: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    start = tl.load(chunks + 4 * chunk + 1)
    n0 = tl.program_id(0) * BLOCK
    if n0 < tl.cdiv(start, align) * align:
        slot = tl.load(chunks + 4 * chunk).to(tl.int64)
        offset = tl.load(offsets + chunk).to(tl.int64)
        part = tl.program_id(2)  # keys of each head, then values
        n = n0 + tl.arange(0, BLOCK)
        d = tl.arange(0, D_P)[None, :]
        there = n < start
        page = tl.load(tables + slot * table_stride + n // BT, there, 0).to(tl.int64)
        token = part * BT + n % BT
        if CODE == PLAIN:
            at = page * block_stride + token * D
            values = tl.load(kv + at[:, None] + d, there[:, None] & (d < D), 0.0).to(out.dtype.element_ty)
        else:
            w = tl.arange(0, D_P // 2)[None, :]
            at = page * block_stride + token * (D // 2)
            words = tl.load(kv + at[:, None] + w, there[:, None] & (w < D // 2), 0)
            values = joined(even(words, CODE, tl.float32), odd(words, CODE, tl.float32))
            if CODE == INT8:
                values *= tl.load(scales + page * block_stride + token, there, 0.0).to(tl.float32)[:, None]
            values = values.to(out.dtype.element_ty)
        inside = n < tl.cdiv(start, align) * align
        tl.store(out + (offset + n)[:, None] * out_stride + part * D + d, values, inside[:, None] & (d < D))


def gather_rows(
    kv: torch.Tensor,
    tables: torch.Tensor,
    chunks: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    longest: int,
    *,
    align: int,
    scales: torch.Tensor | None = None,
) -> None:
    """Cached keys and values of each chunk, token by token: out [rows, 2 * kv_heads * dim] from row `offsets[i]` on.

    `kv`, `scales`: see `headrace.engine.kernels.codes.geometry`. `chunks` as `prefill_attention` takes them; what lies before
    their start is gathered (at most `longest` tokens). Each chunk's rows are filled up with zeros to a multiple of `align`.
    """
    code, kv_heads, block_tokens, dim = geometry(kv, scales)
    block = 64
    _gather[(triton.cdiv(triton.cdiv(longest, align) * align, block), len(chunks), 2 * kv_heads)](
        kv, kv if scales is None else scales, tables, chunks, offsets, out, align, tables.stride(0), kv.stride(0), out.stride(0),
        KV_HEADS=kv_heads, D=dim, D_P=triton.next_power_of_2(dim), BT=block_tokens, BLOCK=block, CODE=code,
        num_warps=4,
    )  # fmt: skip
