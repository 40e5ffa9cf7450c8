"""Row-wise kernels against plain formulas in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_device import DEVICE, DTYPES, ON_GPU, TOLERANCE, gap, randn

from headrace.engine.kernels.activation import ACTIVATIONS, activate
from headrace.engine.kernels.blocks import copy_blocks, scatter
from headrace.engine.kernels.embed import embed
from headrace.engine.kernels.gemm import MAX_ROWS, Gained, GemmConfig, GemmWorkspace, skinny_gemm
from headrace.engine.kernels.norm import add_norm
from headrace.engine.kernels.rope import rope_cache
from headrace.engine.kernels.sample import draw, greedy

ACT = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("post", [False, True])
def test_add_norm(dtype, post):
    x, y = randn(3, 80, dtype=dtype), randn(3, 80, dtype=dtype, seed=1)
    weight, post_weight = randn(80, dtype=dtype, seed=2), randn(80, dtype=dtype, seed=3)
    out = torch.full_like(x, float("nan"))
    bad = torch.full((3,), 7, dtype=torch.int32, device=DEVICE)
    added = rms(y, post_weight, 1e-5) if post else y.double()
    total = x.double() + 0.5 * added
    add_norm(x, y, weight, out, 1e-5, post_weight=post_weight if post else None, scale=0.5, bad=bad)
    assert gap(x, total) < TOLERANCE[dtype]
    assert gap(out, rms(total, weight, 1e-5)) < TOLERANCE[dtype]
    assert bad.tolist() == [0, 0, 0]
    x[1, 5] = float("inf")
    add_norm(x, None, weight, out, 1e-5, bad=bad)
    assert bad.tolist() == [0, 1, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_rows_are_normed_with_eps(dtype):
    """Rows whose mean square is a few times eps, where it shows."""
    x, y = 0.01 * randn(3, 80, dtype=dtype), 0.01 * randn(3, 80, dtype=dtype, seed=1)
    weight, post_weight = randn(80, dtype=dtype, seed=2), 0.01 * randn(80, dtype=dtype, seed=3)
    out = torch.full_like(x, float("nan"))
    total = x.double() + rms(y, post_weight, 1e-4)
    add_norm(x, y, weight, out, 1e-4, post_weight=post_weight)
    assert gap(x, total) < TOLERANCE[dtype]
    assert gap(out, rms(x, weight, 1e-4)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("post", [False, True])
def test_add_norm_sums_parts(dtype, post):
    x, parts = randn(5, 80, dtype=dtype), randn(3, 5, 80, dtype=dtype, seed=1)
    weight, post_weight = randn(80, dtype=dtype, seed=2), randn(80, dtype=dtype, seed=3)
    out = torch.full_like(x, float("nan"))
    y = parts.double().sum(0)
    total = x.double() + 0.5 * (rms(y, post_weight, 1e-5) if post else y)
    add_norm(x, parts, weight, out, 1e-5, post_weight=post_weight if post else None, scale=0.5)
    assert gap(x, total) < TOLERANCE[dtype]
    assert gap(out, rms(total, weight, 1e-5)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_activate(kind, dtype):
    both = 2 * randn(2, 2 * 72, dtype=dtype)
    out = torch.full((2, 72), float("nan"), dtype=dtype, device=DEVICE)
    activate(both, out, kind, gated=True)
    assert gap(out, ACT[kind](both[:, :72].double()) * both[:, 72:].double()) < TOLERANCE[dtype]
    activate(both[:, :72], out, kind, gated=False)
    assert gap(out, ACT[kind](both[:, :72].double())) < TOLERANCE[dtype]


def test_embed_takes_the_last_sampled_id_for_a_negative_one():
    table = randn(9, 20, dtype=torch.float32)
    ids = torch.tensor([3, -1, 0, -1], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0, 2, 1, -1], dtype=torch.int32, device=DEVICE)
    last = torch.tensor([8, 7, 5], dtype=torch.int32, device=DEVICE)
    out = torch.empty(4, 20, device=DEVICE)
    embed(ids, slots, last, table, out, 2.0)
    assert torch.equal(out, 2.0 * table[torch.tensor([3, 5, 0, 8], device=DEVICE)])


def turned(x: torch.Tensor, angles: torch.Tensor, dim: int) -> torch.Tensor:
    """x [tokens, heads, d] with pairs (i, i + dim / 2) turned by angles [tokens, dim / 2]."""
    a, b, rest = x[..., : dim // 2], x[..., dim // 2 : dim], x[..., dim:]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rope_dim", "norm", "dim"), [(16, False, 16), (8, True, 16), (12, True, 12), (0, False, 16)])
def test_rope_cache(dtype, rope_dim, norm, dim):
    heads, kv_heads, bt = 3, 1, 4
    tokens = 3
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    before = qkv.double().view(tokens, -1, dim)
    weights = randn(2, dim, dtype=dtype, seed=5)
    kv = torch.zeros(6, 2, kv_heads, bt, dim, dtype=dtype, device=DEVICE)
    tables = torch.tensor([[5, 2, -1], [1, 4, 0]], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([1, 0, -1], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([6, 3, 0], dtype=torch.int32, device=DEVICE)
    angles = torch.rand(12, max(rope_dim, 2) // 2, dtype=torch.float64, device=DEVICE) * 6
    table = torch.cat([angles.cos(), angles.sin()], 1).float().contiguous()
    given = {"q_norm": weights[0].contiguous(), "k_norm": weights[1].contiguous(), "eps": 0.1} if norm else {}
    rope_cache(qkv, kv, tables, slots, positions, table, heads, rope_dim=rope_dim, **given)
    q, k, v = before[:, :heads], before[:, heads : heads + kv_heads], before[:, heads + kv_heads :]
    if norm:
        q, k = rms(q, weights[0], 0.1), rms(k, weights[1], 0.1)
    if rope_dim:
        q, k = turned(q, angles[positions.long()], rope_dim), turned(k, angles[positions.long()], rope_dim)
    found = qkv.view(tokens, -1, dim)
    assert gap(found[:2, :heads], q[:2]) < TOLERANCE[dtype]
    assert gap(found[:2, heads : heads + kv_heads], k[:2]) < TOLERANCE[dtype]
    assert torch.equal(found[2].double(), before[2])
    for row, (block, offset) in enumerate([(4, 2), (5, 3)]):
        assert gap(kv[block, 0, :, offset], k[row]) < TOLERANCE[dtype]
        assert torch.equal(kv[block, 1, :, offset].double(), v[row])
    assert int((kv != 0).any(-1).sum()) == 2 * 2 * kv_heads


GEMMS = [
    (1, 48, 64, GemmConfig(16, 32, 1, 2, 2)),
    (3, 40, 72, GemmConfig(16, 32, 2, 2, 2)),
    (17, 32, 96, GemmConfig(32, 32, 3, 4, 2)),
    (40, 64, 128, GemmConfig(32, 64, 2, 4, 2, tma=True)),
    (100, 64, 64, GemmConfig(64, 32, 1, 4, 2, tma=True)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns", "inner", "config"), GEMMS)
@pytest.mark.parametrize("way", ["plain", "norm-bias", "norm-pair", "residual"])
def test_skinny_gemm(dtype, rows, columns, inner, config, way):
    if config.tma and ON_GPU and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("bulk tensor copies need compute capability 9")
    x = randn(rows, inner, dtype=dtype)
    pair = way == "norm-pair"
    w = randn(columns * (2 if pair else 1), inner, dtype=dtype, seed=1) * inner**-0.5
    gain, bias = randn(inner, dtype=dtype, seed=2), randn(len(w), dtype=dtype, seed=3)
    work = GemmWorkspace(1 << 15, 64, DEVICE)
    out = torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)
    given, wanted, source = {}, x.double(), x
    if way.startswith("norm"):
        squares = torch.full((3, MAX_ROWS.value), float("nan"), device=DEVICE)
        squares[0, :rows] = x[:, :30].float().square().sum(1)
        squares[1, :rows] = x[:, 30:].float().square().sum(1)
        source = Gained((x.float() * gain.float()).to(dtype), squares, 2)
        given["eps"] = 0.1
        wanted = rms(x, gain, 0.1)
    wanted = wanted @ w.double().T
    if way == "norm-bias":
        given["bias"] = bias
        wanted = wanted + bias.double()
    if pair:
        given["pair"] = "silu"
        wanted = ACT["silu"](wanted[:, :columns]) * wanted[:, columns:]
    if way == "residual":
        residual = randn(rows, columns, dtype=dtype, seed=4)
        out = residual.clone()
        following = randn(columns, dtype=dtype, seed=6)
        gained = Gained(
            torch.full_like(out, float("nan")), torch.full((8, MAX_ROWS.value), float("nan"), device=DEVICE)
        )
        given |= {"residual": out, "scale": 0.5, "gain": following, "gained": gained}
        wanted = residual.double() + 0.5 * wanted
    for _ in range(2 if way == "plain" else 1):  # the counters are left as they were found
        skinny_gemm(source, w, out, work, config, **given)
    assert gap(out, wanted) < TOLERANCE[dtype]
    assert not work.counters.any()
    if way == "residual":
        assert gap(gained.values, out.double() * following.double()) < TOLERANCE[dtype]
        assert gap(gained.squares[: gained.count, :rows].sum(0), out.double().square().sum(1)) < TOLERANCE[dtype]


def test_greedy_takes_the_first_largest_and_names_broken_rows():
    logits = randn(4, 300, dtype=torch.float32)
    logits[0, 17] = logits[0, 200] = 50.0
    logits[1, 299] = 50.0
    logits[2, 3] = float("nan")
    logits[3, 8] = float("inf")
    ids, bad = (torch.full((4,), 9, dtype=torch.int32, device=DEVICE) for _ in range(2))
    last = torch.full((3,), -5, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([2, -1, 0, -1], dtype=torch.int32, device=DEVICE)
    greedy(logits, ids, bad, last, slots)
    assert ids.tolist() == [17, 299, 0, 0]
    assert bad.tolist() == [0, 0, 1, 1]
    assert last.tolist() == [0, -5, 17]


def test_greedy_takes_the_first_largest_of_a_vocabulary_of_many_blocks():
    logits = randn(3, 20_001, dtype=torch.float32)
    logits[0, 17] = logits[0, 17 + 8192] = logits[0, 17 + 2 * 8192 - 1] = 50.0
    logits[1, 20_000] = 50.0
    logits[2, 8191] = logits[2, 8192] = 50.0
    ids, bad = (torch.full((3,), 9, dtype=torch.int32, device=DEVICE) for _ in range(2))
    slots = torch.full((3,), -1, dtype=torch.int32, device=DEVICE)
    greedy(logits, ids, bad, ids.clone(), slots)
    assert ids.tolist() == [17, 20_000, 8191]
    assert not bad.any()


def kept_by_sorting(logits: np.ndarray, heat: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Weights after the filters, the slow way: sorted, one token at a time."""
    weights = np.exp((logits - logits.max()) / heat)
    ranked = np.sort(weights)[::-1]
    floor = min_p
    if top_k:
        floor = max(floor, ranked[min(top_k, len(ranked)) - 1])
    left = ranked[ranked >= ranked[min(top_k, len(ranked)) - 1]] if top_k else ranked
    if top_p < 1:
        mass = 0.0
        for weight in left:
            if mass >= top_p * left.sum():
                break
            floor_p = weight
            mass += weight
        floor = max(floor, floor_p)
    return np.where(weights >= floor, weights, 0.0)


RULES = [
    (1.0, 1.0, 0.0, 0),
    (0.7, 0.9, 0.0, 0),
    (1.3, 1.0, 0.0, 5),
    (1.0, 0.6, 0.0, 7),
    (1.0, 0.95, 0.1, 0),
    (2.0, 1.0, 0.2, 40),
]


@pytest.mark.parametrize("vocab", [150, 9001])  # one block, and three
def test_draw_inverts_the_filtered_distribution(vocab):
    logits = randn(1, vocab, dtype=torch.float32) * 2
    logits[0, 3] = float("-inf")
    row = logits[0].double().cpu().numpy()
    uniforms = [0.0, 0.13, 0.5, 0.77, 0.999999] if not ON_GPU else np.linspace(0, 0.9999, 97).tolist()
    few = vocab > 150 and not ON_GPU
    for heat, top_p, min_p, top_k in RULES[1::2] if few else RULES:
        weights = kept_by_sorting(row, heat, top_k, top_p, min_p)
        reached = np.cumsum(weights) / weights.sum()
        uniforms = uniforms[1::2] if few else uniforms
        count = len(uniforms)
        params = torch.tensor([[heat, top_p, min_p, u, top_k] for u in uniforms], dtype=torch.float32, device=DEVICE)
        many = logits.expand(count, vocab).contiguous()
        ids, last = (
            torch.full((count,), -1, dtype=torch.int32, device=DEVICE),
            torch.zeros(1, dtype=torch.int32, device=DEVICE),
        )
        slots = torch.full((count,), -1, dtype=torch.int32, device=DEVICE)
        draw(many, ids, last, slots, torch.arange(count, dtype=torch.int32, device=DEVICE), params)
        for u, chosen in zip(uniforms, ids.tolist(), strict=True):
            assert weights[chosen] > 0
            below = reached[chosen - 1] if chosen else 0.0
            assert below - 1e-5 <= u <= reached[chosen] + 1e-5, (heat, top_p, min_p, top_k, u)


def test_scatter_and_copy_blocks():
    table = torch.zeros(3, 5, dtype=torch.int32, device=DEVICE)
    scatter(table, torch.tensor([[1, 9], [14, -1]], dtype=torch.int32, device=DEVICE))
    assert table.flatten().tolist() == [0, 9] + [0] * 12 + [-1]
    pool = randn(2, 5, 2, 1, 4, 8, dtype=torch.float16)
    wanted = pool.clone()
    wanted[:, 4], wanted[:, 0] = pool[:, 1], pool[:, 3]
    copy_blocks(pool, torch.tensor([[1, 4], [3, 0]], dtype=torch.int32, device=DEVICE))
    assert torch.equal(pool, wanted)
