"""Quantized weights in warp-specialized products: which matrices fit and how they lie (anywhere), results (on Hopper cards)."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE, ON_GPU, TOLERANCE, gap, randn
from test_kernels_quantized import packed_parts

from headrace.engine.cuda.products import MANY_ROWS, Products
from headrace.engine.cuda.repack import repacked
from headrace.engine.kernels.gemm import MAX_ROWS, SPECIALIZED_BYTES, Gained, GemmConfig, GemmWorkspace
from headrace.engine.kernels.quantized import QuantMatrix, dequantize, not_specialized, quantized_gemm
from headrace.engine.kernels.table import SHIPPED, GemmTable, entry_of, specialized_guess
from headrace.engine.kernels.unpack import INT4, INT8, MXFP4
from headrace.engine.quant.formats import form

HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
hopper_only = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9")
hopper = pytest.importorskip("headrace.engine.kernels.quantized_hopper")
FORMATS = ("int4_g128", "int4_g64", "int4_g128_asym", "int8", "int8_g128", "nf4", "nf4_single", "mxfp4")
CONFIGS = [
    GemmConfig(128, 128, 1, 8, 4, rows=64, block_m=64, column_groups=2),
    GemmConfig(128, 128, 1, 8, 3, rows=128, block_m=128, column_groups=2),
    GemmConfig(64, 128, 1, 8, 2, rows=256, block_m=256, column_groups=2),
    GemmConfig(128, 128, 1, 8, 3, rows=256, block_m=128, column_groups=2),
    GemmConfig(64, 128, 1, 12, 3, rows=128, block_m=128, column_groups=3),
    GemmConfig(64, 128, 1, 4, 3, rows=32, block_m=32),
]


def matrix(name: str, outputs: int, inner: int):
    return repacked([form(name).quantize(torch.randn(outputs, inner))])


def bytes_of_a_block(c: GemmConfig, w: QuantMatrix) -> int:
    return 256 * c.block_m + c.column_groups * c.block_n * (128 if w.kind == INT8.value else 64)


def test_which_matrices_fit():
    config = CONFIGS[0]
    for name in FORMATS:
        assert not_specialized(matrix(name, 512, 256), config) is None, name
    assert "unpacked" in not_specialized(matrix("fp8_channel", 512, 256), config)
    assert "chunks" in not_specialized(matrix("int4_g32", 512, 256), config)
    assert "groups of 32" in not_specialized(matrix("int8_g32", 512, 256), config)
    assert "zero points" in not_specialized(matrix("int8_g64_asym", 512, 256), config)
    assert "inputs" in not_specialized(matrix("int8", 512, 192), config)
    assert "outputs" in not_specialized(matrix("int4_g128", 384, 256), config)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [65, 128, 129, 256])
def test_guesses_fit_shared_memory_and_are_taken_only_where_they_run(name, rows):
    w = matrix(name, 512, 256)
    config = specialized_guess(rows, w)
    assert config.rows >= rows
    assert config.stages * bytes_of_a_block(config, w) <= SPECIALIZED_BYTES
    table = GemmTable("", 132)
    assert table.quantized(rows, w, pair=False, rounded=False, specialized=True) == config
    assert table.quantized(rows, w, pair=False, rounded=False) is None
    assert table.quantized(rows, w, pair=False, rounded=True, specialized=True) is None
    work = GemmWorkspace(1, 1, torch.device("cpu"))
    here = Products([w], table, work, 64, torch.bfloat16, torch.device("cpu"), capability=(8, 0), pdl=False)
    assert here.config(rows, w) is None


def test_shipped_entries_fit_their_products_and_are_for_cards_that_run_them():
    entries = json.loads((SHIPPED / "nvidia_h200.json").read_text())["gemm"]
    specialized = {k: v for k, v in entries.items() if v and v.get("block_m") and ":" in k}
    assert specialized, "int4_g128's gate and up have one"
    table = GemmTable("NVIDIA H200", 132)
    for name, entry in specialized.items():
        kind, _, shape = name.partition(":")
        rows, columns, inner, *pair = map(int, shape.split("x"))
        few = matrix(kind, 2, inner)
        w = replace(few, shape=(columns * (2 if pair else 1), inner))
        config = table.quantized(rows, w, pair=bool(pair), rounded=False, specialized=True)
        assert entry_of(config) == entry
        assert config.block_m >= rows
        assert not_specialized(w, config) is None
        assert config.stages * bytes_of_a_block(config, w) <= SPECIALIZED_BYTES
        assert not table.quantized(rows, w, pair=bool(pair), rounded=False).block_m


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("kind", [INT4.value, INT8.value, MXFP4.value])
@pytest.mark.parametrize("outputs", [64, 128])
def test_words_lie_where_the_left_operand_has_their_inputs(outputs, kind, pair):
    """A thread's words are rows g and g + 8 of its warp's sixteen, inputs 2t, 2t + 1 and eight further: the definition of the
    tensor-core instruction's operand."""
    layout = hopper.held_layout(outputs, kind, pair)
    layout = layout.parent if kind == MXFP4.value else layout
    for warp in range(4):
        for lane in range(32):
            rows, pairs = set(), set()
            for register in range(1 << len(layout.reg_bases)):
                parts = (layout.reg_bases, register), (layout.lane_bases, lane), (layout.warp_bases, warp)
                row, *word = (sum(p) for p in zip(*(place(b, i) for b, i in parts), strict=True))
                rows.add(row)
                # Of MXFP4 a word's two pairs go to neighbouring threads.
                pairs.add(2 * word[0] + word[1] if kind == MXFP4.value else word[0])
            g, t = lane // 4, lane % 4
            first = [16 * warp + g + r for r in (0, 8)]
            if pair:
                first = [8 * warp + g + r for r in (0, outputs // 2)]
            more = [0, 64] if not pair else [0, 32]
            assert rows == {r + m for r in first for m in more[: outputs // 64]}
            assert {p % 4 for p in pairs} == {t}


def place(bases: list[list[int]], number: int) -> list[int]:
    """The sum of the bases whose bits the number has, with zeros behind."""
    found = [b for i, b in enumerate(bases) if number >> i & 1]
    return [*(sum(b) for b in zip([0] * len(bases[0]), *found, strict=True)), 0][:3]


@hopper_only
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_m}x{c.block_n}.{c.column_groups}-{c.rows}")
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_dequantized_weights(name, config):
    """Cut in many ways: as many programs as parts of a tile, a few of all tiles, one for each."""
    rng = random.Random(config.rows + config.block_n + len(name))
    work = GemmWorkspace(9_000_000, 8192, DEVICE, torch.cuda.get_device_properties(0).multi_processor_count)
    tile = config.block_n * config.column_groups
    for tiles, inner in ((1, 256), (1, 4096), (rng.randint(2, 40), 128 * rng.randint(1, 12)), (16, 1024)):
        outputs = tile * tiles
        rows = rng.randint(max(1, config.rows // 2 + 1), config.rows)
        parts, w = packed_parts(name, (outputs // 2, outputs // 2) if outputs % 512 == 0 else (outputs,), inner)
        x = randn(rows + 3, inner, dtype=torch.bfloat16)[:rows]
        out = torch.full((rows, outputs), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        for _ in range(2):
            quantized_gemm(x, repacked(parts), out, work, config, bias=out.new_ones(outputs))
        assert gap(out, x.double() @ w.T + 1) < TOLERANCE[torch.bfloat16]
        assert not work.counters.any()


@hopper_only
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_dequantized_ones(name):
    """Of rows that are 1 at one input the products are the weights, rounded once."""
    spread = torch.exp(randn(256, 512, dtype=torch.float32, seed=1) * 2)
    packed = form(name).quantize(randn(256, 512, dtype=torch.float32) * spread)
    x = torch.eye(512, dtype=torch.bfloat16, device=DEVICE)[::4]
    w, work = repacked([packed]), GemmWorkspace(9_000_000, 8192, DEVICE, 132)
    out = torch.empty(128, 256, dtype=torch.bfloat16, device=DEVICE)
    quantized_gemm(x, w, out, work, CONFIGS[1])
    dense = dequantize(w, torch.empty(256 * 512, dtype=torch.bfloat16, device=DEVICE))[:, ::4].T
    if name.startswith("int4"):
        assert torch.equal(out, dense)
    else:
        torch.testing.assert_close(out, dense, rtol=2**-7, atol=0)


@hopper_only
@pytest.mark.parametrize("config", CONFIGS[:5], ids=lambda c: f"{c.block_m}x{c.block_n}.{c.column_groups}-{c.rows}")
@pytest.mark.parametrize("name", ["int4_g128_asym", "int8", "nf4", "mxfp4"])
def test_what_is_fused(name, config):
    """Norm, bias and act(gate) * up; then the residual sum with the next norm's gain."""
    inner, columns, rows, dtype = 512, 768, config.rows - 5, torch.bfloat16
    parts, w = packed_parts(name, (columns, columns), inner)
    work = GemmWorkspace(9_000_000, 8192, DEVICE, torch.cuda.get_device_properties(0).multi_processor_count)
    x, gain, bias = randn(rows, inner, dtype=dtype), randn(inner, dtype=dtype, seed=2), randn(2 * columns, dtype=dtype)
    squares = torch.full((1, MAX_ROWS.value), float("nan"), device=DEVICE)
    squares[0, :rows] = x.float().square().sum(1)
    source = Gained((x.float() * gain.float()).to(dtype), squares, 1)
    out = torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)
    quantized_gemm(source, repacked(parts), out, work, config, eps=1e-5, bias=bias, pair="silu")
    xd = x.double()
    both = (xd / (xd.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()) @ w.T + bias.double()
    assert gap(out, torch.nn.functional.silu(both[:, :columns]) * both[:, columns:]) < TOLERANCE[dtype]

    parts, w = packed_parts(name, (columns,), inner)
    out = randn(rows, columns, dtype=dtype, seed=4)
    wanted = out.double() + 0.5 * (xd @ w.T)
    following = randn(columns, dtype=dtype, seed=6)
    gained = Gained(torch.full_like(out, float("nan")), torch.full((64, MAX_ROWS.value), float("nan"), device=DEVICE))
    quantized_gemm(x, repacked(parts), out, work, config, residual=out, scale=0.5, gain=following, gained=gained)
    assert gap(out, wanted) < TOLERANCE[dtype]
    assert gap(gained.values, out.double() * following.double()) < TOLERANCE[dtype]
    assert gap(gained.squares[: gained.count, :rows].sum(0), out.double().square().sum(1)) < TOLERANCE[dtype]


@hopper_only
def test_more_rows_than_a_tile_and_sums_in_place():
    parts, w = packed_parts("int4_g128", (512,), 384)
    table, work = GemmTable("", 132), GemmWorkspace(9_000_000, 8192, DEVICE, 132)
    found = repacked(parts)
    products = Products([found], table, work, MANY_ROWS, torch.bfloat16, DEVICE, capability=(9, 0), pdl=False)
    for rows in (257, 700, MANY_ROWS, MANY_ROWS + 1):
        x, old = randn(rows, 384, dtype=torch.bfloat16), randn(rows, 512, dtype=torch.bfloat16, seed=2)
        out, added = torch.empty_like(old), old.clone()
        products.linear(x, found, None, out)
        products.added(added, x, found, 0.25)
        assert gap(out, x.double() @ w.T) < TOLERANCE[torch.bfloat16]
        assert gap(added, old.double() + 0.25 * (x.double() @ w.T)) < TOLERANCE[torch.bfloat16]
