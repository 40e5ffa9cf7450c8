"""Token embeddings, where the ids of sequences that decode never leave the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _embed(ids, slots, last_ids, table, out, scale, width, PDL: tl.constexpr, BLOCK: tl.constexpr):
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
    tl.store(out + row.to(tl.int64) * width + at, values.to(out.dtype.element_ty), inside)


def embed(
    ids: torch.Tensor,
    slots: torch.Tensor,
    last_ids: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    pdl: bool = False,
) -> None:
    """out[i] = scale * table[ids[i]], with last_ids[slots[i]] in place of a negative id. int32 ids; out [rows, width]."""
    width = table.shape[1]
    _embed[(len(ids),)](
        ids, slots, last_ids, table, out, scale, width, PDL=pdl, BLOCK=triton.next_power_of_2(width), num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
