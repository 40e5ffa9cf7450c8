"""Decode attention by bulk copies: against the formula on Hopper cards, and anywhere when it is chosen and how it is cut."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from kernel_device import DEVICE, ON_GPU, TOLERANCE, gap, randn
from test_kernels_attention import Scene, attended, ints
from test_kernels_codes import CodedScene, meant

from headrace.engine.cuda.bulk_decode import BulkDecode
from headrace.engine.kernels.decode import DecodeWorkspace
from headrace.engine.kernels.rope import rope_cache
from headrace.engine.kernels.table import GemmTable
from headrace.spec.model import Attention, Rope

decode_hopper = pytest.importorskip("headrace.engine.kernels.decode_hopper")
HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9")
BF16, FP16 = torch.bfloat16, torch.float16
RULES = {"scale": 0.2, "window": None, "softcap": None, "sinks": None}
# Around pages of 16 tokens, the rings of all shapes, and blocks.
CONTEXTS = [1, 2, 15, 16, 17, 18, 31, 32, 33, 48, 49, 64, 65, 113, 128, 129, 255, 257, 500, 1025, 2300]


def rows_of_contexts(kv_heads, group, dim, dtype):
    """A row for the last token of each context in random order and one of nobody: what they project to, and how it is turned."""
    count = len(CONTEXTS)
    qkv = randn(count + 1, (group + 2) * kv_heads * dim, dtype=dtype, seed=8)
    angles = torch.rand(max(CONTEXTS), dim // 2, device=DEVICE) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).contiguous()
    norms = {"q_norm": randn(dim, dtype=dtype, seed=1), "k_norm": randn(dim, dtype=dtype, seed=2), "eps": 1e-6}
    order = random.Random(dim).sample(range(count), count)
    slots, positions = ints([*order, -1]), ints([CONTEXTS[i] - 1 for i in order] + [0])
    return qkv, cos_sin, norms if group % 2 else {}, order, slots, positions


@on_hopper
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "group", "dim", "bt", "warps", "stages", "splits", "least", "pages"),
    [
        (BF16, 2, 4, 128, 16, 1, 6, 9, 4, 1), (FP16, 1, 8, 128, 32, 2, 6, 5, 2, 1), (BF16, 3, 3, 64, 16, 4, 2, 7, 1, 1),
        (FP16, 2, 1, 64, 48, 2, 2, 1, 1, 2), (BF16, 1, 16, 128, 16, 4, 3, 40, 4, 1), (FP16, 2, 7, 64, 16, 1, 4, 20, 1, 1),
        (BF16, 2, 4, 128, 16, 8, 3, 16, 8, 1), (BF16, 2, 4, 128, 16, 1, 3, 4, 64, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("fused", [False, True])
def test_contexts_of_all_lengths(dtype, kv_heads, group, dim, bt, warps, stages, splits, least, pages, fused):
    heads, count = kv_heads * group, len(CONTEXTS)
    scene = Scene(CONTEXTS, heads, kv_heads, dim, bt, dtype, seed=dim + bt)
    qkv, cos_sin, norms, order, slots, positions = rows_of_contexts(kv_heads, group, dim, dtype)
    kv, turned = scene.kv.clone(), qkv.clone()
    rope_cache(turned, scene.kv, scene.tables, slots, positions, cos_sin, heads, rope_dim=dim, **norms)
    q, k, v = turned.view(count + 1, -1, dim).split([heads, kv_heads, kv_heads], 1)
    wanted = []
    for row, i in enumerate(order):
        scene.keys[i][-1], scene.values[i][-1] = k[row], v[row]
        wanted.append(attended(q[row], scene.keys[i], scene.values[i], **RULES))
    work = DecodeWorkspace(count + 1, kv_heads, group, dim, lambda n: splits, DEVICE)
    given = {"cos_sin": cos_sin, "rope_dim": dim, **norms} if fused else {}
    out = torch.full((count + 1, heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    decode_hopper.decode_hopper(
        qkv if fused else turned, out, kv if fused else scene.kv, scene.tables, slots, positions, work, heads, scale=0.2,
        splits=splits, least=least, warps=warps, stages=stages, pages=pages, pdl=fused, **given,
    )  # fmt: skip
    assert gap(out[:-1], torch.stack(wanted).flatten(1)) < TOLERANCE[dtype]
    # Outputs of long contexts are small: each row by itself.
    assert max(gap(o, w) for o, w in zip(out[:-1], torch.stack(wanted).flatten(1), strict=True)) < 2 * TOLERANCE[dtype]
    assert not out[-1].any()
    assert not work.counters.any()
    if fused:
        # What is not in a context may have been anything, and still is; fp16 may round a rotation the other way.
        assert torch.equal(kv.isnan(), scene.kv.isnan())
        assert gap(kv.nan_to_num(7.0), scene.kv.nan_to_num(7.0)) < 1e-3


@on_hopper
@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "group", "dim", "bt", "warps", "stages", "splits", "least", "pages"),
    [
        (BF16, 2, 4, 128, 16, 1, 12, 9, 4, 1), (FP16, 1, 8, 128, 32, 2, 6, 5, 2, 2), (BF16, 3, 3, 64, 16, 4, 3, 7, 1, 1),
        (FP16, 2, 1, 64, 48, 2, 2, 1, 1, 2), (BF16, 1, 16, 128, 16, 4, 3, 40, 4, 1), (BF16, 8, 4, 128, 16, 2, 4, 16, 8, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("fused", [False, True])
def test_codes_of_contexts_of_all_lengths(
    name, dtype, kv_heads, group, dim, bt, warps, stages, splits, least, pages, fused
):
    heads, count = kv_heads * group, len(CONTEXTS)
    scene = CodedScene(CONTEXTS, heads, kv_heads, dim, bt, name, seed=dim + bt)
    qkv, cos_sin, norms, order, slots, positions = rows_of_contexts(kv_heads, group, dim, dtype)
    own = [(int(scene.tables[i, n // bt]), n % bt) for i, n in zip(order, positions.tolist()[:-1], strict=True)]
    before, turned = scene.pool.blocks.clone(), qkv.clone()
    rope_cache(
        turned, scene.kv, scene.tables, slots, positions, cos_sin, heads, rope_dim=dim, scales=scene.scales, **norms
    )
    q = turned.view(count + 1, -1, dim)[:, :heads]
    wanted = []
    for row, i in enumerate(order):
        scene.keys[i][-1], scene.values[i][-1] = scene.row(i, CONTEXTS[i] - 1)
        wanted.append(attended(q[row], scene.keys[i], scene.values[i], **RULES).flatten())
    after = scene.pool.blocks.clone()
    if fused:
        scene.pool.blocks.copy_(before)
    work = DecodeWorkspace(count + 1, kv_heads, group, dim, lambda n: splits, DEVICE)
    given = {"cos_sin": cos_sin, "rope_dim": dim, **norms} if fused else {}
    out = torch.full((count + 1, heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    decode_hopper.decode_hopper(
        qkv if fused else turned, out, scene.kv, scene.tables, slots, positions, work, heads, scale=0.2, scales=scene.scales,
        splits=splits, least=least, warps=warps, stages=stages, pages=pages, pdl=fused, **given,
    )  # fmt: skip
    assert gap(out[:-1], torch.stack(wanted)) < TOLERANCE[dtype]
    assert max(gap(o, w) for o, w in zip(out[:-1], wanted, strict=True)) < 2 * TOLERANCE[dtype]
    assert not out[-1].any()
    assert not work.counters.any()
    found = scene.pool.blocks.clone()
    ours = scene.kv.clone(), None if scene.scales is None else scene.scales.clone()
    scene.pool.blocks.copy_(after)
    theirs = scene.kv.clone(), None if scene.scales is None else scene.scales.clone()
    pages, tokens = torch.tensor(own, device=DEVICE).T
    at = (pages, slice(None), slice(None), tokens)
    # New values to the bit; new keys but for rotations that were rounded the other way.
    mine, reference = (meant(w[at], None if s is None else s[at]) for w, s in (ours, theirs))
    assert torch.equal(mine[:, 1], reference[:, 1])
    assert gap(mine[:, 0], reference[:, 0]) < 4e-3
    # Nothing else changed.
    for words, scales in (ours, theirs):
        words[at] = 0
        if scales is not None:
            scales[at] = 0
    assert torch.equal(ours[0], theirs[0])
    if ours[1] is not None:
        assert torch.equal(ours[1].view(torch.int16), theirs[1].view(torch.int16))
    if not fused:
        assert torch.equal(found, after)


def chosen(
    mixers, *, dtype=torch.bfloat16, kv="bf16", device="cuda", capability=(9, 0), table=None, num_blocks=1000, **given
) -> BulkDecode:
    layout = SimpleNamespace(
        **{"head_dim": 128, "num_kv_heads": 8, "block_tokens": 16, "kv_precision": kv, "layers_per_group": 2, **given}
    )  # fmt: skip
    layout.bytes_per_block = layout.layers_per_group * layout.block_tokens * layout.num_kv_heads * 2 * layout.head_dim
    return BulkDecode(
        mixers,
        layout,
        num_blocks,
        table or GemmTable("no card", 132),
        dtype,
        torch.device(device),
        sms=132,
        capability=capability,
    )


def mixer(**given) -> Attention:
    return Attention(**{"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rope": Rope(dim=128), **given})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"device": "cpu"}, "interpreter"),
        ({"capability": (8, 9)}, "compute capability 8.9"),
        ({"kv": "int4"}, "keys and values are int4"),
        ({"kv": "int8", "num_blocks": 200_000}, "200000 blocks are more"),
        ({"kv": "fp8", "head_dim": 96}, "head dimension 96"),
        ({"kv": "fp16"}, "keys and values are fp16"),
        ({"head_dim": 256}, "head dimension 256"),
        ({"block_tokens": 24}, "blocks of 24 tokens"),
        ({"num_kv_heads": 4}, "all layers"),
    ],
)
def test_what_it_cannot_serve_is_named(given, why):
    bulk = chosen([mixer()], **given)
    assert why in bulk.why_not
    assert not bulk.serves(0)
    assert bulk.splits(1) == 1
    assert bulk.compiled(1) == ()


def test_layers_are_served_one_by_one():
    mixers = [mixer(), mixer(window=64), mixer(softcap=20.0), mixer(rope=Rope(dim=64)), mixer(rope=None)]
    bulk = chosen(mixers)
    assert bulk.why_not is None
    assert [bulk.serves(i) for i in range(5)] == [True, False, False, False, True]
    assert bulk.note() == "bulk copies (Hopper) in 2 of 5 layers, plain loads in the others"
    assert chosen([mixer()]).note() == "bulk copies (Hopper)"
    assert "all layers" in chosen(mixers[1:4]).why_not
    assert "20 query heads" in chosen([mixer(num_heads=160)]).why_not


def test_the_table_says_how_work_is_cut():
    table = GemmTable("no card", 132)
    bulk = chosen([mixer()], table=table)
    table._decode["4x128xbulk"] = {"warps": 2, "stages": 5, "programs": 33, "least": 8}
    table._decode["8x128"] = {"splits": 4}
    assert [bulk.shape(n)["splits"] for n in (1, 2, 4)] == [33, 16, 8]
    assert bulk.compiled(3) == (2, 5, 1)
    assert bulk.shape(5)["splits"] == 6, "entries of the other kernel say nothing of this one"
    assert bulk.splits(4) == 8
    coded = chosen([mixer()], table=table, kv="fp8")
    assert coded.shape(4)["pages"] == 2, "entries of plain keys say nothing of codes"
    table._decode["4x128xbulkfp8"] = {"warps": 1, "stages": 4, "pages": 2, "programs": 64, "least": 4}
    assert coded.shape(4) == {"warps": 1, "stages": 4, "pages": 2, "splits": 16, "least": 4}
    assert chosen([mixer()], table=table, kv="int8").shape(4) != coded.shape(4)
    assert bulk.shape(4)["splits"] == 8


@pytest.mark.parametrize("kv", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("given", [{}, {"head_dim": 64}, {"num_kv_heads": 2}, {"num_kv_heads": 1, "head_dim": 64}])
def test_without_a_table_all_programs_fit_on_the_card(given, kv):
    heads, dim = given.get("num_kv_heads", 8), given.get("head_dim", 128)
    bulk = chosen([mixer(num_kv_heads=heads, head_dim=dim, num_heads=8 * heads, rope=Rope(dim=dim))], kv=kv, **given)
    assert bulk.why_not is None
    page = {"bf16": 4, "fp8": 2, "int8": 2}[kv] * decode_hopper.PAGE.value * dim + 256 * (kv == "int8")
    filled = 2 if kv == "bf16" else 4
    for rows in (1, 2, 3, 8, 16, 24, 32, 64, 128, 256):
        shape = bulk.shape(rows)
        assert rows > 32 or rows * heads * shape["splits"] <= max(filled * 132, rows * heads)
        resident = -(-rows * heads // 132) if rows > 32 else -(-rows * heads * shape["splits"] // 132)
        ring = shape["warps"] * shape["stages"] * shape["pages"] * page
        assert ring <= 228 << 10
        assert ring * resident <= 228 << 10 or shape["stages"] == (3 if kv == "bf16" else 2)
    assert bulk.shape(1)["splits"] * heads > 132
