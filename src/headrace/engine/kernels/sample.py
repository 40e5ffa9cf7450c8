"""From logits to token ids on the device: the greedy choice, and one draw after temperature, top-k, top-p and min-p.

Nothing is sorted. A weight exp((logit - max) / T) lies in (0, 1], and the bits of positive floats order as the floats do, so
the least weight that top-k keeps (fewer than k weights above it) and the least that top-p keeps (less than p of the mass above
it) are each found by 30 halvings of the bit range, every one a pass over a row that stays in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _greedy(
    logits, ids, bad, last_ids, slots, vocab, stride, CHECK: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for v0 in range(0, vocab, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + v, v < vocab, float("-inf")).to(tl.float32)
        if CHECK:
            wrong += ((v < vocab) & ((tl.abs(x) < float("inf")) == 0)).to(tl.int32)
        better = x > top
        where = tl.where(better, v, where)
        top = tl.where(better, x, top)
    best = tl.max(top, 0)
    chosen = tl.min(tl.where(top == best, where, 2147483647), 0)
    broken = best == float("-inf")
    if CHECK:
        broken = tl.sum(wrong, 0) > 0
    chosen = tl.where(broken | (chosen >= vocab), 0, chosen)
    tl.store(ids + row, chosen)
    tl.store(bad + row, broken.to(tl.int32))
    slot = tl.load(slots + row)
    tl.store(last_ids + tl.maximum(slot, 0), chosen, slot >= 0)


def greedy(
    logits: torch.Tensor,
    ids: torch.Tensor,
    bad: torch.Tensor,
    last_ids: torch.Tensor,
    slots: torch.Tensor,
    *,
    masked: bool = False,
    pdl: bool = False,
) -> None:
    """ids[i] = the first largest entry of row i; last_ids[slots[i]] gets it too (slot -1: nowhere).

    bad[i] is 1 where a row has an entry that is not finite, or, if rows are `masked` with -inf, nothing but -inf; the id is
    then 0.
    """
    rows, vocab = logits.shape
    block = min(8192, triton.next_power_of_2(vocab))
    _greedy[(rows,)](
        logits, ids, bad, last_ids, slots, vocab, logits.stride(0), CHECK=not masked, PDL=pdl, BLOCK=block,
        num_warps=16 if block >= 4096 else 4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def _least(logits, top, heat, floor, limit, vocab, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The least weight w >= floor with less than `limit` of mass (or fewer than `limit` tokens) above w."""
    low = -1  # too little: at least the limit lies above
    high = 1065353216  # the bits of 1.0: nothing lies above
    for _ in range(31):
        if high - low > 1:
            middle = low + (high - low) // 2
            bar = tl.cast(middle, tl.float32, bitcast=True)
            above = tl.zeros([BLOCK], tl.float32)
            for v0 in range(0, vocab, BLOCK):
                v = v0 + tl.arange(0, BLOCK)
                x = tl.load(logits + v, v < vocab, float("-inf")).to(tl.float32)
                weight = tl.exp((x - top) / heat)
                counted = (weight > bar) & (weight >= floor)
                above += tl.where(counted, weight if MASS else 1.0, 0.0)
            enough = tl.sum(above, 0) < limit
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle)
    return tl.cast(high, tl.float32, bitcast=True)


@triton.jit
def _draw(
    logits, ids, last_ids, slots, rows, rules, vocab, stride, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    heat = tl.load(rules + 5 * i)
    top_p = tl.load(rules + 5 * i + 1)
    min_p = tl.load(rules + 5 * i + 2)
    uniform = tl.load(rules + 5 * i + 3)
    top_k = tl.load(rules + 5 * i + 4)
    logits += row * stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for v0 in range(0, vocab, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(logits + v, v < vocab, float("-inf")).to(tl.float32))
    top = tl.max(best, 0)
    floor = min_p
    if top_k > 0:
        floor = tl.maximum(floor, _least(logits, top, heat, 0.0, top_k, vocab, False, BLOCK))
    if top_p < 1.0:
        # Mass is that of what top-k left; min-p does not change it.
        ranked = tl.where(top_k > 0, floor, 0.0)
        mass = tl.zeros([BLOCK], tl.float32)
        for v0 in range(0, vocab, BLOCK):
            v = v0 + tl.arange(0, BLOCK)
            x = tl.load(logits + v, v < vocab, float("-inf")).to(tl.float32)
            weight = tl.exp((x - top) / heat)
            mass += tl.where(weight >= ranked, weight, 0.0)
        limit = top_p * tl.sum(mass, 0)
        floor = tl.maximum(floor, _least(logits, top, heat, ranked, limit, vocab, True, BLOCK))
    kept = tl.zeros([BLOCK], tl.float64)
    for v0 in range(0, vocab, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        weight = tl.exp((tl.load(logits + v, v < vocab, float("-inf")).to(tl.float32) - top) / heat)
        kept += tl.where(weight >= floor, weight, 0.0).to(tl.float64)
    target = tl.sum(kept, 0) * uniform.to(tl.float64)
    before = tl.sum(tl.zeros([BLOCK], tl.float64), 0)
    passed = tl.sum(tl.zeros([BLOCK], tl.int32), 0)
    last = passed
    for v0 in range(0, vocab, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        weight = tl.exp((tl.load(logits + v, v < vocab, float("-inf")).to(tl.float32) - top) / heat)
        weight = tl.where(weight >= floor, weight, 0.0).to(tl.float64)
        reached = before + tl.cumsum(weight, 0)
        passed += tl.sum(((reached <= target) & (v < vocab)).to(tl.int32), 0)
        before += tl.sum(weight, 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, v, 0), 0))
    # Rounding can put the target past the end: the last token with any weight is then meant.
    chosen = tl.minimum(passed, last)
    tl.store(ids + row, chosen)
    slot = tl.load(slots + row)
    tl.store(last_ids + tl.maximum(slot, 0), chosen, slot >= 0)


def draw(
    logits: torch.Tensor,
    ids: torch.Tensor,
    last_ids: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    rules: torch.Tensor,
) -> None:
    """Draw one token for each of `rows` (int32 indices into logits, ids and slots) and store it as `greedy` does.

    `rules` fp32 [n, 5]: temperature, top_p (1: off), min_p, a uniform number in [0, 1), top_k (0: off). Kept are the top_k
    largest and those tied with the last of them; of these the likeliest until top_p of their mass is reached, likewise; of
    these what has at least min_p of the likeliest one's probability. The draw inverts the cumulative distribution in the
    order of the vocabulary. Rows must be finite or -inf.
    """
    vocab = logits.shape[1]
    block = min(4096, triton.next_power_of_2(vocab))
    _draw[(len(rows),)](
        logits, ids, last_ids, slots, rows, rules, vocab, logits.stride(0), BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
    )  # fmt: skip
