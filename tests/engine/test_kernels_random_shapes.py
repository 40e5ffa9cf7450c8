"""Kernels against formulas in fp64 on shapes that nobody chose: each seed draws heads, dimensions, pages, lengths, rules and cuts."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_device import DEVICE, DTYPES, TOLERANCE, gap, randn
from test_kernels_attention import Scene, attended, ints
from test_kernels_rows import ACT, rms, turned

from headrace.engine.kernels.activation import ACTIVATIONS, activate
from headrace.engine.kernels.decode import DecodeWorkspace, decode_attention
from headrace.engine.kernels.gemm import MAX_ROWS, Gained, GemmConfig, GemmWorkspace, skinny_gemm
from headrace.engine.kernels.norm import add_norm
from headrace.engine.kernels.prefill import PrefillWorkspace, prefill_attention
from headrace.engine.kernels.rope import rope_cache


def drawn(seed: int):
    """A generator of the seed's shapes, and its precision."""
    return random.Random(seed), DTYPES[seed % len(DTYPES)]


def model(rng: random.Random):
    """Heads, KV heads, dimension and block size."""
    kv_heads, group = rng.randint(1, 3), rng.randint(1, 5)
    return kv_heads * group, kv_heads, rng.choice([8, 16, 20, 24, 32, 40]), rng.choice([4, 8, 12, 16, 32])


def rules_of(rng: random.Random, heads: int):
    return {
        "scale": rng.uniform(0.1, 0.5),
        "window": rng.choice([None, None, 1, rng.randint(2, 60)]),
        "softcap": rng.choice([None, None, rng.uniform(1, 20)]),
        "sinks": rng.choice([None, randn(heads, dtype=torch.float32, seed=heads)]),
    }


@pytest.mark.parametrize("seed", range(8))
def test_decode(seed):
    rng, dtype = drawn(seed)
    heads, kv_heads, dim, bt = model(rng)
    contexts = [rng.randint(1, 80) for _ in range(rng.randint(1, 3))]
    count, rules = len(contexts), rules_of(rng, heads)
    scene = Scene(contexts, heads, kv_heads, dim, bt, dtype, seed=seed)
    q = randn(count, heads, dim, dtype=dtype, seed=seed)
    qkv = scene.rows(q, *(torch.stack([t[i][-1] for i in range(count)]) for t in (scene.keys, scene.values)))
    out = torch.full((count, heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    splits = rng.randint(1, 12)
    work = DecodeWorkspace(count, kv_heads, heads // kv_heads, dim, lambda n: splits, DEVICE)
    decode_attention(
        qkv, out, scene.kv, scene.tables, ints(range(count)), ints([n - 1 for n in contexts]), work, heads, splits=splits,
        min_chunk=rng.choice([1, 16, 40]), block_n=rng.choice([16, 32]), **rules,
    )  # fmt: skip
    wanted = torch.stack([attended(q[i], scene.keys[i], scene.values[i], **rules) for i in range(count)]).flatten(1)
    assert gap(out, wanted) < TOLERANCE[dtype]
    assert not work.counters.any()


@pytest.mark.parametrize("seed", range(4))
def test_cascade(seed):
    rng, dtype = drawn(seed)
    heads, kv_heads, dim, bt = model(rng)
    shared = bt * rng.randint(1, 48 // bt + 1)
    contexts = [shared + rng.randint(1, 40) for _ in range(rng.randint(2, 4))]
    count, rules = len(contexts), rules_of(rng, heads) | {"window": None}
    scene = Scene(contexts, heads, kv_heads, dim, bt, dtype, seed=seed, shared=shared)
    q = randn(count, heads, dim, dtype=dtype, seed=seed)
    qkv = scene.rows(q, *(torch.stack([t[i][-1] for i in range(count)]) for t in (scene.keys, scene.values)))
    out = torch.full((count, heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    splits, prefix_splits, members = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, count)
    work = DecodeWorkspace(count, kv_heads, heads // kv_heads, dim, lambda n: splits + prefix_splits, DEVICE)
    decode_attention(
        qkv, out, scene.kv, scene.tables, ints(range(count)), ints([n - 1 for n in contexts]), work, heads, splits=splits,
        prefix_splits=prefix_splits, min_chunk=16, block_n=16, prefix_block_n=16, prefix_chunk=rng.choice([16, 32]),
        firsts=ints([shared] * members + [0] * (count - members)), tiles=ints([[0, members, shared], [0, 0, 0]]), **rules,
    )  # fmt: skip
    wanted = torch.stack([attended(q[i], scene.keys[i], scene.values[i], **rules) for i in range(count)]).flatten(1)
    assert gap(out, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("seed", range(6))
def test_prefill(seed):
    rng, dtype = drawn(seed)
    heads, kv_heads, dim, bt = model(rng)
    spans = [(rng.choice([0, rng.randint(1, 60)]), rng.randint(1, 40)) for _ in range(rng.randint(1, 2))]
    scene, rules = Scene([s + n for s, n in spans], heads, kv_heads, dim, bt, dtype, seed=seed), rules_of(rng, heads)
    total = sum(n for _, n in spans)
    q = randn(total, heads, dim, dtype=dtype, seed=seed)
    qkv = scene.rows(q, *(torch.cat([t[i][s:] for i, (s, _) in enumerate(spans)]) for t in (scene.keys, scene.values)))
    firsts = [sum(n for _, n in spans[:i]) for i in range(len(spans))]
    block_m = rng.choice([16, 32])
    chunks = ints([[i, s, n, f] for i, ((s, n), f) in enumerate(zip(spans, firsts, strict=True))])
    tiles = ints([[i, m] for i, (_, n) in enumerate(spans) for m in range(0, n, block_m)])
    given = {}
    if parts := rng.choice([0, 2, 3]):
        given = {"work": PrefillWorkspace(len(tiles), parts, heads, block_m, dim, DEVICE), "min_chunk": 16}
    out = torch.full((total, heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    prefill_attention(
        qkv, out, scene.kv, scene.tables, chunks, tiles, heads, block_m=block_m, block_n=rng.choice([16, 32]),
        num_warps=4, **given, **rules,
    )  # fmt: skip
    wanted = [
        attended(q[f + j], scene.keys[i][: s + j + 1], scene.values[i][: s + j + 1], **rules)
        for i, ((s, n), f) in enumerate(zip(spans, firsts, strict=True))
        for j in range(n)
    ]
    assert gap(out, torch.stack(wanted).flatten(1)) < TOLERANCE[dtype]


@pytest.mark.parametrize("seed", range(12))
def test_products_of_few_rows(seed):
    rng, dtype = drawn(seed)
    rows, columns, inner = rng.randint(1, 40), 8 * rng.randint(1, 12), 8 * rng.randint(2, 20)
    config = GemmConfig(16 if rows <= 16 else 64, rng.choice([16, 32, 64]), rng.randint(1, 4), 4, 2)
    pair, norm, eps = rng.random() < 0.5, rng.random() < 0.5, 10 ** rng.uniform(-6, -1)
    x = rng.uniform(0.05, 2) * randn(rows, inner, dtype=dtype, seed=seed)
    w = randn(columns * (1 + pair), inner, dtype=dtype, seed=seed + 1) * inner**-0.5
    work = GemmWorkspace(1 << 16, 64, DEVICE)
    out = torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)
    given, source, wanted = {}, x, x.double()
    if norm:
        gain = randn(inner, dtype=dtype, seed=seed + 2)
        squares = torch.full((2, MAX_ROWS.value), float("nan"), device=DEVICE)
        squares[0, :rows] = x.float().square().sum(1)
        source, wanted = Gained((x.float() * gain.float()).to(dtype), squares, 1), rms(x, gain, eps)
        given["eps"] = eps
    if rng.random() < 0.5:
        given["bias"] = randn(len(w), dtype=dtype, seed=seed + 3)
    wanted = wanted @ w.double().T + (given["bias"].double() if "bias" in given else 0.0)
    if pair:
        given["pair"] = kind = rng.choice(sorted(ACTIVATIONS))
        wanted = ACT[kind](wanted[:, :columns]) * wanted[:, columns:]
    skinny_gemm(source, w, out, work, config, **given)
    assert gap(out, wanted) < TOLERANCE[dtype]
    assert not work.counters.any()


@pytest.mark.parametrize("seed", range(12))
def test_norms_activations_and_rotations(seed):
    rng, dtype = drawn(seed)
    tokens, width, eps = rng.randint(1, 5), rng.randint(3, 300), 10 ** rng.uniform(-6, -1)
    x, y = (rng.uniform(0.05, 2) * randn(tokens, width, dtype=dtype, seed=seed + i) for i in range(2))
    weight, out = randn(width, dtype=dtype, seed=seed), torch.empty(tokens, width, dtype=dtype, device=DEVICE)
    total = x.double() + y.double()
    add_norm(x, y, weight, out, eps)
    assert gap(x, total) < TOLERANCE[dtype]
    assert gap(out, rms(total, weight, eps)) < TOLERANCE[dtype]
    kind, both = rng.choice(sorted(ACTIVATIONS)), randn(tokens, 2 * width, dtype=dtype, seed=seed + 2)
    activate(both, out, kind, gated=True)
    assert gap(out, ACT[kind](both[:, :width].double()) * both[:, width:].double()) < TOLERANCE[dtype]
    heads, kv_heads, dim, bt = model(rng)
    rope_dim = 2 * rng.randint(1, dim // 2)
    kv = torch.zeros(tokens, 2, kv_heads, bt, dim, dtype=dtype, device=DEVICE)
    tables = torch.arange(tokens, dtype=torch.int32, device=DEVICE)[:, None].contiguous()
    places = [rng.randrange(bt) for _ in range(tokens)]
    angles = 6 * torch.rand(bt, rope_dim // 2, dtype=torch.float64, device=DEVICE)
    norms = [randn(dim, dtype=dtype, seed=seed + i) for i in range(2)]
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, seed=seed)
    q, k, v = qkv.double().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
    q, k = (turned(rms(t, n, eps), angles[places], rope_dim) for t, n in ((q, norms[0]), (k, norms[1])))
    table = torch.cat([angles.cos(), angles.sin()], 1).float().contiguous()
    rope_cache(
        qkv, kv, tables, ints(range(tokens)), ints(places), table, heads, rope_dim=rope_dim, q_norm=norms[0],
        k_norm=norms[1], eps=eps,
    )  # fmt: skip
    found = qkv.view(tokens, -1, dim)
    assert gap(found[:, :heads], q) < TOLERANCE[dtype]
    assert gap(found[:, heads : heads + kv_heads], k) < TOLERANCE[dtype]
    rows = torch.arange(tokens, device=DEVICE)
    assert gap(kv[rows, 0, :, places], k) < TOLERANCE[dtype]
    assert torch.equal(kv[rows, 1, :, places].double(), v)
    assert int((kv != 0).any(-1).sum()) == 2 * kv_heads * tokens
