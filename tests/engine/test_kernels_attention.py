"""Attention kernels against the formula in fp64 on random shapes: pages, splits, windows, sinks, soft caps, shared prefixes."""

from __future__ import annotations

import math
import random

import pytest
import torch
from kernel_device import DEVICE, DTYPES, ON_GPU, TOLERANCE, gap, randn

from headrace.engine.kernels.decode import DecodeWorkspace, decode_attention
from headrace.engine.kernels.prefill import PrefillWorkspace, prefill_attention
from headrace.engine.kernels.rope import rope_cache


def attended(q, keys, values, *, scale, window, softcap, sinks):
    """q [heads, d] at the last of keys [n, kv_heads, d]; one query, everything in fp64."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    if window is not None:
        keys, values = keys[-window:], values[-window:]
    scores = torch.einsum("hd,nhd->hn", q.double(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], 1)
    return torch.einsum("hn,nhd->hd", scores.softmax(1)[:, : len(keys)], values)


class Scene:
    """Sequences with scattered blocks and filled caches; blocks that nobody owns hold NaN."""

    def __init__(self, contexts, heads, kv_heads, dim, bt, dtype, *, seed=0, shared=0):
        rng = random.Random(seed)
        self.heads, self.kv_heads, self.dim, self.bt = heads, kv_heads, dim, bt
        most = max(-(-n // bt) for n in contexts) + 1
        count = sum(-(-n // bt) + 1 for n in contexts) + 3
        free = list(range(count))
        rng.shuffle(free)
        self.kv = torch.full((count, 2, kv_heads, bt, dim), float("nan"), dtype=dtype, device=DEVICE)
        tables = torch.full((len(contexts), most), -1, dtype=torch.int32)
        self.keys, self.values = [], []
        common = [free.pop() for _ in range(shared // bt)]
        for i, n in enumerate(contexts):
            k, v = (randn(n, kv_heads, dim, dtype=dtype, seed=seed + 10 * i + j) for j in (1, 2))
            if i and shared:
                k[:shared], v[:shared] = self.keys[0][:shared], self.values[0][:shared]
            self.keys.append(k)
            self.values.append(v)
            for b in range(-(-n // bt)):
                tables[i, b] = block = common[b] if b < len(common) else free.pop()
                part = slice(b * bt, min(n, (b + 1) * bt))
                self.kv[block, 0, :, : part.stop - part.start] = k[part].transpose(0, 1)
                self.kv[block, 1, :, : part.stop - part.start] = v[part].transpose(0, 1)
        self.tables = tables.to(DEVICE)

    def rows(self, queries, keys, values):
        return torch.cat([queries.flatten(1), keys.flatten(1), values.flatten(1)], 1).contiguous()


OPTIONS = [
    {},
    {"window": 5},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 9, "softcap": 2.0, "sinks": True},
]
SHAPES = [(4, 2, 16, 4), (3, 1, 24, 8), (6, 6, 8, 16)]


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "bt"), SHAPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_decode(dtype, heads, kv_heads, dim, bt, options):
    contexts = [1, 37, 16, 90 if ON_GPU else 50]
    scene = Scene(contexts, heads, kv_heads, dim, bt, dtype)
    sinks = randn(heads, dtype=torch.float32) if options.get("sinks") else None
    q = randn(4, heads, dim, dtype=dtype, seed=3)
    last = [torch.stack([t[i][-1] for i in range(4)]) for t in (scene.keys, scene.values)]
    qkv = scene.rows(torch.cat([q, q[:1]]), *(torch.cat([t, t[:1]]) for t in last))
    rules = {"scale": 0.3, "window": options.get("window"), "softcap": options.get("softcap"), "sinks": sinks}
    out = torch.full((5, heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    work = DecodeWorkspace(5, kv_heads, heads // kv_heads, dim, lambda n: 3, DEVICE)
    slots, positions = ints([0, 1, 2, 3, -1]), ints([n - 1 for n in contexts] + [0])
    decode_attention(
        qkv, out, scene.kv, scene.tables, slots, positions, work, heads, splits=3, min_chunk=16, block_n=16, **rules
    )
    wanted = torch.stack([attended(q[i], scene.keys[i], scene.values[i], **rules) for i in range(4)]).flatten(1)
    assert gap(out[:4], wanted) < TOLERANCE[dtype]
    assert not out[4].any()
    assert not work.counters.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("norm", "rope_dim", "window"), [(False, 16, None), (True, 8, None), (True, 0, 6), (False, 16, 1)]
)
def test_decode_fused_equals_rope_cache_and_decode(dtype, norm, rope_dim, window):
    heads, kv_heads, dim, bt = 4, 2, 16, 8
    contexts = [1, 20, 33]
    scene = Scene(contexts, heads, kv_heads, dim, bt, dtype)
    qkv = randn(3, (heads + 2 * kv_heads) * dim, dtype=dtype, seed=8)
    angles = torch.rand(40, 8, device=DEVICE) * 6
    cos_sin = torch.cat([angles[:, : rope_dim // 2].cos(), angles[:, : rope_dim // 2].sin()], 1).contiguous()
    if not rope_dim:
        cos_sin = angles
    given = {}
    if norm:
        given = {"q_norm": randn(dim, dtype=dtype, seed=1), "k_norm": randn(dim, dtype=dtype, seed=2), "eps": 1e-6}
    slots, positions = ints([0, 1, 2]), ints([n - 1 for n in contexts])
    work = DecodeWorkspace(3, kv_heads, heads // kv_heads, dim, lambda n: 2, DEVICE)
    found, wanted = (torch.full((3, heads * dim), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    kv, done = scene.kv.clone(), qkv.clone()
    same = {"scale": 0.25, "splits": 2, "min_chunk": 16, "block_n": 16, "window": window}
    decode_attention(
        qkv, found, kv, scene.tables, slots, positions, work, heads, cos_sin=cos_sin, rope_dim=rope_dim, **given, **same
    )
    rope_cache(done, scene.kv, scene.tables, slots, positions, cos_sin, heads, rope_dim=rope_dim, **given)
    decode_attention(done, wanted, scene.kv, scene.tables, slots, positions, work, heads, **same)
    assert gap(found, wanted) < TOLERANCE[dtype]
    assert torch.equal(kv.nan_to_num(7.0), scene.kv.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_many_parts_are_merged_in_two_levels(dtype, sinks):
    heads, kv_heads, dim, bt = 3, 1, 16, 16
    contexts = [300, 129, 17]
    scene = Scene(contexts, heads, kv_heads, dim, bt, dtype)
    rules = {
        "scale": 0.3,
        "window": None,
        "softcap": None,
        "sinks": randn(heads, dtype=torch.float32) if sinks else None,
    }
    q = randn(3, heads, dim, dtype=dtype, seed=3)
    qkv = scene.rows(q, *(torch.stack([t[i][-1] for i in range(3)]) for t in (scene.keys, scene.values)))
    out = torch.full((3, heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    work = DecodeWorkspace(3, kv_heads, heads // kv_heads, dim, lambda n: 20, DEVICE)
    positions = ints([n - 1 for n in contexts])
    wanted = torch.stack([attended(q[i], scene.keys[i], scene.values[i], **rules) for i in range(3)]).flatten(1)
    for splits in (20, 8, 9):
        decode_attention(
            qkv, out, scene.kv, scene.tables, ints([0, 1, 2]), positions, work, heads, splits=splits, min_chunk=16,
            block_n=16, **rules,
        )  # fmt: skip
        assert gap(out, wanted) < TOLERANCE[dtype]
        assert not work.counters.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_cascade_rotates_and_stores_like_rope_cache(dtype, norm):
    heads, kv_heads, dim, bt, shared, rope_dim = 4, 2, 16, 8, 32, 8
    contexts = [40, 33, 90, 38]
    scene = Scene(contexts, heads, kv_heads, dim, bt, dtype, shared=shared)
    qkv = randn(4, (heads + 2 * kv_heads) * dim, dtype=dtype, seed=8)
    angles = torch.rand(90, rope_dim // 2, device=DEVICE) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).contiguous()
    norms = {"eps": 1e-6}
    if norm:
        norms |= {"q_norm": randn(dim, dtype=dtype, seed=1), "k_norm": randn(dim, dtype=dtype, seed=2)}
    slots, positions = ints([0, 1, 2, 3]), ints([n - 1 for n in contexts])
    work = DecodeWorkspace(4, kv_heads, heads // kv_heads, dim, lambda n: 9, DEVICE)
    found, wanted = (torch.full((4, heads * dim), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    kv, done = scene.kv.clone(), qkv.clone()
    same = {"scale": 0.25, "splits": 4, "min_chunk": 16, "block_n": 16}
    decode_attention(
        qkv, found, kv, scene.tables, slots, positions, work, heads, cos_sin=cos_sin, rope_dim=rope_dim, prefix_splits=3,
        prefix_block_n=32, prefix_chunk=16,
        firsts=ints([shared, shared, shared, 0]), tiles=ints([[0, 3, shared], [0, 0, 0]]), **norms, **same,
    )  # fmt: skip
    rope_cache(done, scene.kv, scene.tables, slots, positions, cos_sin, heads, rope_dim=rope_dim, **norms)
    decode_attention(done, wanted, scene.kv, scene.tables, slots, positions, work, heads, **same)
    assert gap(found, wanted) < TOLERANCE[dtype]
    assert torch.equal(kv.nan_to_num(7.0), scene.kv.nan_to_num(7.0))
    assert not work.counters.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 24)])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "sinks": True}], ids=["plain", "softcap-sinks"])
def test_cascade_equals_plain_decode(dtype, heads, kv_heads, dim, options):
    bt, shared = 8, 32
    contexts = [40, 33, 47, 38]
    scene = Scene(contexts, heads, kv_heads, dim, bt, dtype, shared=shared)
    # Read once: by the first row of a tile. Another row's own blocks of the prefix, here nobody's and no numbers, are not read.
    owned = set(scene.tables.flatten().tolist())
    scene.tables[1, : shared // bt] = next(b for b in range(len(scene.kv)) if b not in owned)
    sinks = randn(heads, dtype=torch.float32) if options.get("sinks") else None
    rules = {"scale": 0.3, "window": None, "softcap": options.get("softcap"), "sinks": sinks}
    q = randn(4, heads, dim, dtype=dtype, seed=3)
    last = [torch.stack([t[i][-1] for i in range(4)]) for t in (scene.keys, scene.values)]
    qkv = scene.rows(torch.cat([q, q[:1]]), *(torch.cat([t, t[:1]]) for t in last))
    out = torch.full((5, heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    work = DecodeWorkspace(5, kv_heads, heads // kv_heads, dim, lambda n: 5, DEVICE)
    positions = ints([n - 1 for n in contexts] + [0])
    decode_attention(
        qkv, out, scene.kv, scene.tables, ints([0, 1, 2, 3, -1]), positions, work, heads, splits=2, prefix_splits=3,
        min_chunk=16, block_n=16, prefix_block_n=16, prefix_chunk=16,
        firsts=ints([shared, shared, shared, 0, 0]), tiles=ints([[0, 2, shared], [2, 3, shared], [0, 0, 0]]),
        **rules,
    )  # fmt: skip
    wanted = torch.stack([attended(q[i], scene.keys[i], scene.values[i], **rules) for i in range(4)]).flatten(1)
    assert gap(out[:4], wanted) < TOLERANCE[dtype]
    assert not out[4].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "bt"), SHAPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_prefill(dtype, heads, kv_heads, dim, bt, options):
    starts, lengths = [0, 45, 8], [35, 3, 17]
    ends = [s + n for s, n in zip(starts, lengths, strict=True)]
    scene = Scene(ends, heads, kv_heads, dim, bt, dtype)
    sinks = randn(heads, dtype=torch.float32) if options.get("sinks") else None
    rules = {"scale": dim**-0.5, "window": options.get("window"), "softcap": options.get("softcap"), "sinks": sinks}
    total = sum(lengths)
    q = randn(total, heads, dim, dtype=dtype, seed=4)
    new = [torch.cat([t[i][s:] for i, s in enumerate(starts)]) for t in (scene.keys, scene.values)]
    qkv = scene.rows(q, *new)
    firsts = [0, 35, 38]
    block_m = 16
    chunks = ints([[i, s, n, f] for i, (s, n, f) in enumerate(zip(starts, lengths, firsts, strict=True))])
    tiles = ints([[i, m] for i, n in enumerate(lengths) for m in range(0, n, block_m)])
    out = torch.full((total, heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    prefill_attention(
        qkv, out, scene.kv, scene.tables, chunks, tiles, heads, block_m=block_m, block_n=16, num_warps=4, **rules
    )
    wanted = []
    for i, (s, n) in enumerate(zip(starts, lengths, strict=True)):
        for j in range(n):
            at = s + j + 1
            wanted.append(attended(q[firsts[i] + j], scene.keys[i][:at], scene.values[i][:at], **rules))
    wanted = torch.stack(wanted).flatten(1)
    assert gap(out, wanted) < TOLERANCE[dtype]
    # Cached keys cut among programs, of all tiles but the last two.
    for splits in (2, 3) if ON_GPU else (3,):
        work = PrefillWorkspace(len(tiles) - 2, splits, heads, block_m, dim, DEVICE)
        out.fill_(float("nan"))
        prefill_attention(
            qkv, out, scene.kv, scene.tables, chunks, tiles, heads, block_m=block_m, block_n=16, num_warps=4,
            work=work, min_chunk=16, **rules,
        )  # fmt: skip
        assert gap(out, wanted) < TOLERANCE[dtype]
        assert not work.counters.any()


def test_one_key_is_its_value():
    """The least context: softmax over one key is 1 whatever the scores."""
    scene = Scene([1], 2, 1, 16, 4, torch.float32)
    qkv = scene.rows(randn(1, 2, 16, dtype=torch.float32) * 100, scene.keys[0], scene.values[0])
    out = torch.empty(1, 32, device=DEVICE)
    work = DecodeWorkspace(1, 1, 2, 16, lambda n: 1, DEVICE)
    decode_attention(
        qkv, out, scene.kv, scene.tables, ints([0]), ints([0]), work, 2, scale=math.sqrt(7), splits=1, block_n=16
    )
    assert gap(out.view(2, 16), scene.values[0].expand(1, 1, 16).reshape(1, 16).expand(2, 16)) < 1e-6
