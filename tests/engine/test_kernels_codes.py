"""Kernels over keys and values of 8 bits against the formula in fp64 on what the codes mean, on random shapes; the codes
themselves against those of the torch backend."""

from __future__ import annotations

import pytest
import torch
from kernel_device import DEVICE, DTYPES, ON_GPU, gap, randn
from test_kernels_attention import OPTIONS, Scene, attended, ints

from headrace.engine.cuda.pool import KVPool
from headrace.engine.kernels.blocks import copy_blocks, gather_rows
from headrace.engine.kernels.decode import DecodeWorkspace, decode_attention
from headrace.engine.kernels.prefill import PrefillWorkspace, prefill_attention
from headrace.engine.kernels.rope import rope_cache
from headrace.engine.kv_formats import int8
from headrace.spec.cache import CacheLayout
from headrace.spec.precision import kv_precision

CODED = ("fp8", "int8")
KINDS = [(n, d) for n in CODED for d in DTYPES] if ON_GPU else [("fp8", torch.float16), ("int8", torch.float32)]
"""In the interpreter, which is slow, one type each."""
SHAPES = [(4, 2, 16, 4), (3, 1, 24, 8), (2, 2, 48, 16)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
NO_RULES = {"window": None, "softcap": None, "sinks": None}


def pool_of(name, blocks, kv_heads, bt, dim, layers=1):
    token = kv_precision(name).token_bytes(dim, dim)
    layout = CacheLayout((), layers, bt, kv_heads, dim, dim, name, layers * bt * kv_heads * token)
    made = KVPool(layout, blocks, DEVICE)
    assert made.nbytes == layout.bytes_per_block * blocks
    return made


def codes_of(x, name):
    """[…, dim] as words of two codes and scales […], by the torch backend's rule."""
    if name == "fp8":
        return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.int16), None
    codes, scales = int8.quantized(x.float())
    return codes.view(torch.int16), scales


def meant(words, scales):
    if scales is None:
        return words.contiguous().view(torch.float8_e4m3fn).float()
    return int8.dequantized(words.contiguous().view(torch.int8), scales, torch.float32)


class CodedScene(Scene):
    """`Scene` in codes: keys and values are what these mean; of blocks that nobody owns, no code or no scale is a number."""

    def __init__(self, contexts, heads, kv_heads, dim, bt, name, **more):
        super().__init__(contexts, heads, kv_heads, dim, bt, torch.float32, **more)
        self.pool = pool_of(name, len(self.kv), kv_heads, bt, dim)
        words, scales = codes_of(self.kv, name)
        self.kv, self.scales = self.pool.layer(0)
        self.kv.copy_(words)
        if scales is not None:
            self.scales.copy_(scales)
        for which in (self.keys, self.values):
            which[:] = [meant(*codes_of(x, name)) for x in which]

    def forget(self, slot, before):
        """Give away the blocks that hold nothing but tokens before `before`: their place is taken by one without a number."""
        owned = set(self.tables.flatten().tolist())
        stranger = next(b for b in range(len(self.kv)) if b not in owned)
        self.tables[slot, : max(before, 0) // self.bt] = stranger

    def row(self, slot, token):
        """The stored key and value of a token, [2, kv_heads, dim], as numbers."""
        block = int(self.tables[slot, token // self.bt])
        at = (block, slice(None), slice(None), token % self.bt)
        return meant(self.kv[at], None if self.scales is None else self.scales[at])


def queries_and_new(scene, name, dtype, contexts, seed=3):
    """Rows whose new key and value are those cached already, as `rope_cache` leaves them."""
    q = randn(len(contexts), scene.heads, scene.dim, dtype=dtype, seed=seed)
    last = [torch.stack([t[i][-1] for i in range(len(contexts))]).to(dtype) for t in (scene.keys, scene.values)]
    return q, scene.rows(q, *last)


@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "bt"), SHAPES)
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[4]], ids=lambda o: "-".join(o) or "plain")
def test_decode(name, dtype, heads, kv_heads, dim, bt, options):
    contexts = [1, 37, 16, 90 if ON_GPU else 50]
    scene = CodedScene(contexts, heads, kv_heads, dim, bt, name)
    sinks = randn(heads, dtype=torch.float32) if options.get("sinks") else None
    q, qkv = queries_and_new(scene, name, dtype, contexts)
    qkv = torch.cat([qkv, qkv[:1]])
    rules = {"scale": 0.3, "window": options.get("window"), "softcap": options.get("softcap"), "sinks": sinks}
    if rules["window"]:
        for i, n in enumerate(contexts):
            scene.forget(i, n - rules["window"])
    out = torch.full((5, heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    work = DecodeWorkspace(5, kv_heads, heads // kv_heads, dim, lambda n: 3, DEVICE)
    slots, positions = ints([0, 1, 2, 3, -1]), ints([n - 1 for n in contexts] + [0])
    decode_attention(
        qkv, out, scene.kv, scene.tables, slots, positions, work, heads, splits=3, min_chunk=16, block_n=16,
        scales=scene.scales, **rules,
    )  # fmt: skip
    wanted = torch.stack([attended(q[i], scene.keys[i], scene.values[i], **rules) for i in range(4)]).flatten(1)
    assert gap(out[:4], wanted) < TOLERANCE[dtype]
    assert not out[4].any()


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 60.0])
def test_values_of_any_magnitude_survive_fp16(name, magnitude):
    """INT8 value scales are folded into fp16 weights."""
    contexts = [200]
    scene = CodedScene(contexts, 2, 1, 16, 8, name)
    kv = scene.kv
    wide = [randn(200, 1, 16, dtype=torch.float32, seed=70 + j) * m for j, m in ((0, 1.0), (1, magnitude))]
    for j, x in enumerate(wide):
        words, scales = codes_of(x, name)
        for n in range(200):
            block = int(scene.tables[0, n // 8])
            kv[block, j, :, n % 8] = words[n]
            if scales is not None:
                scene.scales[block, j, :, n % 8] = scales[n]
        wide[j] = meant(words, scales)
    q = randn(1, 2, 16, dtype=torch.float16, seed=3)
    qkv = scene.rows(q, *(x[-1:].half() for x in wide))
    out = torch.full((1, 32), float("nan"), dtype=torch.float16, device=DEVICE)
    work = DecodeWorkspace(1, 1, 2, 16, lambda n: 1, DEVICE)
    decode_attention(
        qkv,
        out,
        kv,
        scene.tables,
        ints([0]),
        ints([199]),
        work,
        2,
        splits=1,
        block_n=16,
        scale=0.25,
        scales=scene.scales,
    )
    wanted = attended(q[0], *wide, scale=0.25, **NO_RULES).flatten()[None]
    assert gap(out, wanted) < 4e-3


def turned(qkv, at, heads, positions, cos_sin, rope_dim, norm, dim):
    """Heads from `at` on, normalized and rotated, in fp32."""
    x = qkv.view(len(qkv), -1, dim)[:, at : at + heads].float()
    if norm is not None:
        x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.float()
    if rope_dim:
        half = rope_dim // 2
        cos, sin = (t[positions.long()][:, None] for t in (cos_sin[:, :half], cos_sin[:, half:]))
        a, b = x[..., :half], x[..., half:rope_dim]
        x = torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., rope_dim:]], -1)
    return x


@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize(("norm", "rope_dim"), [(False, 16), (True, 8), (True, 0)])
def test_codes_are_those_of_the_torch_backend_whoever_writes_them(name, dtype, norm, rope_dim):
    heads, kv_heads, dim, bt = 4, 2, 16, 8
    contexts = [1, 20, 33]
    scene = CodedScene(contexts, heads, kv_heads, dim, bt, name)
    qkv = randn(3, (heads + 2 * kv_heads) * dim, dtype=dtype, seed=8)
    qkv[:, -kv_heads * dim :] *= torch.tensor([1e-3, 30.0, 1000.0], dtype=dtype, device=DEVICE)[:, None]
    angles = torch.rand(40, 8, device=DEVICE) * 6
    cos_sin = torch.cat([angles[:, : rope_dim // 2].cos(), angles[:, : rope_dim // 2].sin()], 1).contiguous()
    if not rope_dim:
        cos_sin = angles
    given = {"scales": scene.scales}
    if norm:
        given |= {"q_norm": randn(dim, dtype=dtype, seed=1), "k_norm": randn(dim, dtype=dtype, seed=2), "eps": 1e-6}
    slots, positions = ints([0, 1, 2]), ints([n - 1 for n in contexts])
    work = DecodeWorkspace(3, kv_heads, heads // kv_heads, dim, lambda n: 2, DEVICE)
    found, wanted = (torch.full((3, heads * dim), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    before, done = scene.pool.blocks.clone(), qkv.clone()
    same = {"scale": 0.25, "splits": 2, "min_chunk": 16, "block_n": 16}
    decode_attention(
        qkv, found, scene.kv, scene.tables, slots, positions, work, heads, cos_sin=cos_sin, rope_dim=rope_dim, **given,
        **same,
    )  # fmt: skip
    fused = scene.pool.blocks.clone()
    k = turned(qkv, heads, kv_heads, positions, cos_sin, rope_dim, given.get("k_norm"), dim).to(dtype)
    v = qkv.view(3, -1, dim)[:, heads + kv_heads :]
    step = 1 / 7 if name == "fp8" else 1 / 127
    for i, n in enumerate(contexts):
        for j, x in enumerate((k, v)):
            codes = meant(*codes_of(x[i], name))
            if j:
                assert torch.equal(scene.row(i, n - 1)[j], codes)
            else:  # a rotation that rounds otherwise may give the next code
                assert (scene.row(i, n - 1)[j] - codes).abs().max() <= step * codes.abs().max()
                assert (scene.row(i, n - 1)[j] != codes).sum() <= 2
    scene.pool.blocks.copy_(before)
    rope_cache(done, scene.kv, scene.tables, slots, positions, cos_sin, heads, rope_dim=rope_dim, **given)
    assert torch.equal(scene.pool.blocks, fused)
    # What a prompt sees of itself is what is stored.
    for i, n in enumerate(contexts):
        seen = done.view(3, -1, dim)[i, heads:].view(2, kv_heads, dim)
        assert torch.equal(seen, scene.row(i, n - 1).to(dtype))
    decode_attention(done, wanted, scene.kv, scene.tables, slots, positions, work, heads, scales=scene.scales, **same)
    assert gap(found, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", CODED)
def test_a_value_that_is_no_number_stays_none(name):
    scene = CodedScene([9, 9], 2, 1, 16, 4, name)
    qkv = randn(2, 64, dtype=torch.float32, seed=2)
    qkv[0, 50] = float("nan")
    cos_sin = torch.rand(9, 16, device=DEVICE)
    slots, positions = ints([0, 1]), ints([8, 8])
    given = {"rope_dim": 16, "scales": scene.scales}
    rope_cache(qkv.clone(), scene.kv, scene.tables, slots, positions, cos_sin, 2, **given)
    assert torch.isnan(scene.row(0, 8)[1]).any()
    assert torch.isfinite(scene.row(1, 8)).all()


@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 24)])
def test_cascade(name, dtype, heads, kv_heads, dim):
    bt, shared = 8, 32
    contexts = [40, 33, 47, 38]
    scene = CodedScene(contexts, heads, kv_heads, dim, bt, name, shared=shared)
    rules = {"scale": 0.3, **NO_RULES}
    q, qkv = queries_and_new(scene, name, dtype, contexts)
    qkv = torch.cat([qkv, qkv[:1]])
    out = torch.full((5, heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    work = DecodeWorkspace(5, kv_heads, heads // kv_heads, dim, lambda n: 5, DEVICE)
    positions = ints([n - 1 for n in contexts] + [0])
    decode_attention(
        qkv, out, scene.kv, scene.tables, ints([0, 1, 2, 3, -1]), positions, work, heads, splits=2, prefix_splits=3,
        min_chunk=16, block_n=16, prefix_block_n=16, prefix_chunk=16, scales=scene.scales,
        firsts=ints([shared, shared, shared, 0, 0]), tiles=ints([[0, 2, shared], [2, 3, shared], [0, 0, 0]]),
        **rules,
    )  # fmt: skip
    wanted = torch.stack([attended(q[i], scene.keys[i], scene.values[i], **rules) for i in range(4)]).flatten(1)
    assert gap(out[:4], wanted) < TOLERANCE[dtype]
    assert not out[4].any()


@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "bt"), SHAPES)
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[4]], ids=lambda o: "-".join(o) or "plain")
def test_prefill(name, dtype, heads, kv_heads, dim, bt, options):
    starts, lengths = [0, 45, 8], [35, 3, 17]
    ends = [s + n for s, n in zip(starts, lengths, strict=True)]
    scene = CodedScene(ends, heads, kv_heads, dim, bt, name)
    sinks = randn(heads, dtype=torch.float32) if options.get("sinks") else None
    rules = {"scale": dim**-0.5, "window": options.get("window"), "softcap": options.get("softcap"), "sinks": sinks}
    if rules["window"]:
        for i, s in enumerate(starts):
            scene.forget(i, s - rules["window"] + 1)
    total = sum(lengths)
    q = randn(total, heads, dim, dtype=dtype, seed=4)
    new = [torch.cat([t[i][s:] for i, s in enumerate(starts)]).to(dtype) for t in (scene.keys, scene.values)]
    qkv = scene.rows(q, *new)
    firsts = [0, 35, 38]
    block_m = 16
    chunks = ints([[i, s, n, f] for i, (s, n, f) in enumerate(zip(starts, lengths, firsts, strict=True))])
    tiles = ints([[i, m] for i, n in enumerate(lengths) for m in range(0, n, block_m)])
    wanted = []
    for i, (s, n) in enumerate(zip(starts, lengths, strict=True)):
        for j in range(n):
            at = s + j + 1
            wanted.append(attended(q[firsts[i] + j], scene.keys[i][:at], scene.values[i][:at], **rules))
    wanted = torch.stack(wanted).flatten(1)
    out = torch.empty(total, heads * dim, dtype=dtype, device=DEVICE)
    for splits in (1, 2):
        work = PrefillWorkspace(len(tiles) - 2, splits, heads, block_m, dim, DEVICE) if splits > 1 else None
        out.fill_(float("nan"))
        prefill_attention(
            qkv, out, scene.kv, scene.tables, chunks, tiles, heads, block_m=block_m, block_n=16, num_warps=4,
            work=work, min_chunk=16, scales=scene.scales, **rules,
        )  # fmt: skip
        assert gap(out, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", CODED)
def test_gathered_rows_are_what_the_codes_mean(name):
    starts, bt, dim, kv_heads = [37, 0, 130], 8, 24, 2
    scene = CodedScene([max(s, 1) for s in starts], 2, kv_heads, dim, bt, name)
    chunks = ints([[i, s, 5, 5 * i] for i, s in enumerate(starts)])
    out = torch.full((448, 2 * kv_heads * dim), 7.0, dtype=torch.float16, device=DEVICE)
    gather_rows(
        scene.kv, scene.tables, chunks, ints([0, 128, 128]), ints([384]), out, programs=5, scales=scene.scales
    )  # fmt: skip
    for i, (s, first) in enumerate(zip(starts, (0, 128, 128), strict=True)):
        if s:
            wanted = torch.cat([scene.keys[i][:s].flatten(1), scene.values[i][:s].flatten(1)], 1).half()
            assert torch.equal(out[first : first + s], wanted)
    assert not out[37:128].any()
    assert not out[258:384].any()
    assert (out[384:] == 7.0).all()


@pytest.mark.parametrize("name", CODED)
def test_copied_blocks_are_whole(name):
    made = pool_of(name, 6, 3, 4, 10, layers=2)
    made.blocks.copy_(torch.arange(made.blocks.numel()).view_as(made.blocks) % 30000)
    before = made.blocks.clone()
    copy_blocks(made.blocks, ints([[1, 4], [0, 2]]))
    wanted = before.clone()
    wanted[:, 4], wanted[:, 2] = before[:, 1], before[:, 0]
    assert torch.equal(made.blocks, wanted)
    for slot in range(2):
        kv, scales = made.layer(slot)
        assert torch.equal(kv[4], kv[1])
        assert scales is None or torch.equal(scales[4].view(torch.int16), scales[1].view(torch.int16))
