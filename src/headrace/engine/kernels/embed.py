"""Token embeddings, where the ids of sequences that decode never leave the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.engine.kernels.gemm import Gained


@triton.jit
def _embed(
    ids, slots, last_ids, table, out, gain, gained, squares, scale, width,
    GAIN: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.load(ids + row)
    slot = tl.load(slots + row)
    if token < 0:
        token = tl.load(last_ids + tl.maximum(slot, 0))
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(table + token.to(tl.int64) * width + at, inside, 0.0).to(tl.float32) * scale
    rounded = values.to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * width + at, rounded, inside)
    if GAIN:
        wide = rounded.to(tl.float32)
        tl.store(squares + row, tl.sum(wide * wide, 0))
        wide = wide * tl.load(gain + at, inside, 0.0).to(tl.float32)
        tl.store(gained + row.to(tl.int64) * width + at, wide.to(out.dtype.element_ty), inside)


def embed(
    ids: torch.Tensor,
    slots: torch.Tensor,
    last_ids: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    gain: torch.Tensor | None = None,
    gained: Gained | None = None,
    pdl: bool = False,
) -> None:
    """out[i] = scale * table[ids[i]], with last_ids[slots[i]] in place of a negative id. int32 ids; out [rows, width].

    With `gain`, `gained` is written beside out, for the product that normalizes it.
    """
    width = table.shape[1]
    if gained is not None:
        gained.count = 1
    _embed[(len(ids),)](
        ids, slots, last_ids, table, out, out if gain is None else gain, out if gained is None else gained.values,
        out if gained is None else gained.squares, scale, width, GAIN=gained is not None, PDL=pdl,
        BLOCK=triton.next_power_of_2(width), num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
