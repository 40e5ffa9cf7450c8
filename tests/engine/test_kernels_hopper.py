"""The warp-specialized kernel of long prompts against the formula, on Hopper cards only: nothing else runs it."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_device import DEVICE, ON_GPU, TOLERANCE, gap, randn

from headrace.engine.kernels.blocks import gather_rows

HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
TILE = 128


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def paged(keys, values, bt, seed=0):
    """Blocks in random order, those of nobody full of NaN, and the block tables of sequences [n, kv_heads, dim]."""
    count = sum(-(-len(k) // bt) for k in keys) + 3
    free = list(range(count))
    random.Random(seed).shuffle(free)
    _, heads, dim = keys[0].shape
    kv = torch.full((count, 2, heads, bt, dim), float("nan"), dtype=keys[0].dtype, device=DEVICE)
    tables = torch.full((len(keys), max(-(-len(k) // bt) for k in keys) + 1), -1, dtype=torch.int32)
    for i, pair in enumerate(zip(keys, values, strict=True)):
        for b in range(-(-len(pair[0]) // bt)):
            tables[i, b] = block = free.pop()
            for which, rows in enumerate(pair):
                part = rows[b * bt : (b + 1) * bt]
                kv[block, which, :, : len(part)] = part.transpose(0, 1)
    return kv, tables.to(DEVICE)


def test_gathered_rows_are_the_cached_ones_then_zeros():
    starts, bt, dim, kv_heads = [37, 0, 130], 8, 24, 2
    keys = [randn(max(s, 1), kv_heads, dim, dtype=torch.float16, seed=i) for i, s in enumerate(starts)]
    values = [randn(max(s, 1), kv_heads, dim, dtype=torch.float16, seed=9 + i) for i, s in enumerate(starts)]
    kv, tables = paged(keys, values, bt)
    chunks = ints([[i, s, 5, 5 * i] for i, s in enumerate(starts)])
    out = torch.full((448, 2 * kv_heads * dim), 7.0, dtype=torch.float16, device=DEVICE)
    gather_rows(kv, tables, chunks, ints([0, 128, 128]), ints([384]), out, programs=7)
    assert torch.equal(out[:37], torch.cat([keys[0].flatten(1), values[0].flatten(1)], 1))
    assert not out[37:128].any()
    assert torch.equal(out[128:258], torch.cat([keys[2].flatten(1), values[2].flatten(1)], 1))
    assert not out[258:384].any()
    assert (out[384:] == 7.0).all()


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (3, 3, 64), (32, 8, 128)])
def test_long_prompts(dtype, heads, kv_heads, dim):
    from headrace.engine.kernels.prefill_hopper import Parts, prefill_hopper

    rng = random.Random(heads)
    for case in range(7):
        lengths = [rng.choice([1, 64, 127, 128, 129, 300, 700]) for _ in range(rng.randint(1, 5))]
        # In the last three all have cached keys, enough to be cut into parts.
        starts = [rng.choice([0, 0, 1, 128, 200, 1000] if case < 4 else [385, 512, 1000, 1100]) for _ in lengths]
        ends = [s + n for s, n in zip(starts, lengths, strict=True)]
        keys, values = (
            [randn(n, kv_heads, dim, dtype=dtype, seed=case + 7 * i + j) for i, n in enumerate(ends)] for j in (1, 2)
        )
        queries = [randn(n, heads, dim, dtype=dtype, seed=case + 7 * i) for i, n in enumerate(lengths)]
        kv, tables = paged(
            [k[: max(s, 1)] for k, s in zip(keys, starts, strict=True)],
            [v[: max(s, 1)] for v, s in zip(values, starts, strict=True)],
            16,
        )
        # Rows between the chunks belong to nobody, and hold no numbers.
        firsts, total = [], 0
        for n in lengths:
            firsts.append(total)
            total += n + 3
        qkv = torch.full((total, (heads + 2 * kv_heads) * dim), float("nan"), dtype=dtype, device=DEVICE)
        for first, n, s, q, k, v in zip(firsts, lengths, starts, queries, keys, values, strict=True):
            qkv[first : first + n] = torch.cat([q.flatten(1), k[s:].flatten(1), v[s:].flatten(1)], 1)
        chunks = ints([[i, s, n, f] for i, (s, n, f) in enumerate(zip(starts, lengths, firsts, strict=True))])
        padded = [-(-s // TILE) * TILE for s in starts]
        offsets = [sum(padded[:i]) for i in range(len(padded))]
        cached = torch.full((max(sum(padded), TILE), 2 * kv_heads * dim), float("nan"), dtype=dtype, device=DEVICE)
        if max(starts):
            gather_rows(kv, tables, chunks, ints(offsets), ints([sum(padded)]), cached, programs=264)
        tiles = [(s + m, i, m) for i, (s, n) in enumerate(zip(starts, lengths, strict=True)) for m in range(0, n, TILE)]
        tiles = ints([[i, m] for _, i, m in sorted(tiles, reverse=True)])
        out = torch.full((total, heads * dim), 5.0, dtype=dtype, device=DEVICE)
        for programs, parts in ((132, 0), (3, 0), (132, 1), (132, 2), (132, 3), (7, 4)):
            # Parts of nothing are not asked for.
            if parts > 1 and min(starts) <= (parts - 1) * TILE:
                continue
            planned = {}
            if parts:
                # Of a list with room for more, the device's own numbers count.
                work = Parts(2 * heads * (len(tiles) + 1) * parts, dim, DEVICE)
                planned = {"counts": ints([len(tiles), parts]), "work": work}
            room = torch.cat([tiles, ints([[10**6, 10**6]])]) if parts else tiles
            prefill_hopper(
                qkv, out, cached, chunks, room, ints(offsets), heads, kv_heads, scale=dim**-0.5, programs=programs,
                **planned,
            )  # fmt: skip
            for first, n, s, q, k, v in zip(firsts, lengths, starts, queries, keys, values, strict=True):
                group = heads // kv_heads
                k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
                scores = torch.einsum("mhd,nhd->hmn", q.double(), k) * dim**-0.5
                seen = torch.arange(s + n, device=DEVICE)[None] <= s + torch.arange(n, device=DEVICE)[:, None]
                wanted = torch.einsum("hmn,nhd->mhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
                assert gap(out[first : first + n], wanted.flatten(1)) < TOLERANCE[dtype], (
                    starts,
                    lengths,
                    programs,
                    parts,
                )
                assert (out[first + n : first + n + 3] == 5.0).all()
            out.fill_(5.0)
