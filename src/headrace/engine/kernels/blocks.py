"""Changes to the paged cache's bookkeeping and contents."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
