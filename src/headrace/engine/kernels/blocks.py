"""Changes to the paged cache's bookkeeping and contents."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.engine.kernels.codes import INT4, INT8, PLAIN, even, geometry, joined, odd
from headrace.engine.kernels.launchers import power_of_2


@triton.jit(do_not_specialize=["count"])
def _scatter(table, pairs, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    where = tl.load(pairs + 2 * at, inside, 0)
    tl.store(table + where, tl.load(pairs + 2 * at + 1, inside, 0), inside)


def scatter(table: torch.Tensor, pairs: torch.Tensor) -> None:
    """table.flat[pairs[i, 0]] = pairs[i, 1]; int32, places distinct."""
    count = len(pairs)
    _scatter[(-(-count // 256),)](table, pairs, count, BLOCK=256, num_warps=4)


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


@triton.jit(do_not_specialize=["count"])
def _gather(
    kv, scales, tables, chunks, offsets, total, out, count, table_stride, block_stride, out_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr,
    CODE: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 * KV_HEADS  # keys of each head, then values
    CHUNKS: tl.constexpr = 64
    c = tl.arange(0, CHUNKS)
    d = tl.arange(0, D_P)[None, :]
    for piece in range(tl.program_id(0), tl.load(total) // BLOCK * PARTS, tl.num_programs(0)):
        row0 = piece // PARTS * BLOCK
        part = piece % PARTS
        chunk = -1
        for c0 in range(0, count, CHUNKS):
            chunk += tl.sum((tl.load(offsets + c0 + c, c0 + c < count, row0 + 1) <= row0).to(tl.int32), 0)
        slot = tl.load(chunks + 4 * chunk).to(tl.int64)
        n = row0 - tl.load(offsets + chunk) + tl.arange(0, BLOCK)
        there = n < tl.load(chunks + 4 * chunk + 1)
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
        row = row0.to(tl.int64) + tl.arange(0, BLOCK)
        tl.store(out + row[:, None] * out_stride + part * D + d, values, tl.broadcast_to(d < D, [BLOCK, D_P]))


def gather_rows(
    kv: torch.Tensor,
    tables: torch.Tensor,
    chunks: torch.Tensor,
    offsets: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    *,
    programs: int,
    scales: torch.Tensor | None = None,
) -> None:
    """Cached keys and values of each chunk, token by token: out [rows, 2 * kv_heads * dim] from row `offsets[i]` on.

    `kv`, `scales`: see `headrace.engine.kernels.codes.geometry`. `chunks` as `prefill_attention` takes them; what lies before
    their start is gathered. `offsets` ascend in multiples of 64, the first is 0; `total` [1] int32: rows in all. What
    a chunk leaves of its rows is filled with zeros. `programs`: the card's multiprocessors, or some multiple.
    """
    code, kv_heads, block_tokens, dim = geometry(kv, scales)
    assert code != INT4.value
    _gather[(programs,)](
        kv, kv if scales is None else scales, tables, chunks, offsets, total, out, len(chunks),
        tables.stride(0), kv.stride(0), out.stride(0),
        KV_HEADS=kv_heads, D=dim, D_P=power_of_2(dim), BT=block_tokens, BLOCK=64, CODE=code,
        num_warps=4,
    )  # fmt: skip
