"""Products with quantized weights against the dequantized matrix in fp64."""

from __future__ import annotations

import pytest
import torch
from kernel_device import DEVICE, DTYPES, ON_GPU, TOLERANCE, gap, randn

from headrace.engine.cuda.repack import repacked, unfit
from headrace.engine.kernels.activation import activate, activate_rounded
from headrace.engine.kernels.eight_bits import rescale, round_rows
from headrace.engine.kernels.gemm import MAX_ROWS, Gained, GemmConfig, GemmWorkspace
from headrace.engine.kernels.norm import add_norm
from headrace.engine.kernels.quantized import dequantize, has_gluon, not_direct, quantized_gemm
from headrace.engine.kernels.rounding import Rounded
from headrace.engine.quant.formats import Packed, form
from headrace.spec.precision import precision

FORMATS = (
    "int4", "int4_g32", "int4_g64", "int4_g128", "int4_g128_asym", "int4_g32_asym", "int8", "int8_g128", "int8_g64_asym",
    "nf4", "nf4_single", "mxfp4", "fp8_e4m3", "fp8_channel", "fp8_block128",
)  # fmt: skip


def packed_parts(name: str, rows: tuple[int, ...], columns: int) -> tuple[list[Packed], torch.Tensor]:
    """Random matrices of a format whose outputs have unlike scales, and their values joined, fp64."""
    parts = []
    for i, n in enumerate(rows):
        w = randn(n, columns, dtype=torch.float32, seed=i) * torch.linspace(0.2, 1.5, n, device=DEVICE)[:, None]
        w[: n // 2, : columns // 2] *= 3.0
        parts.append(form(name).quantize(w * columns**-0.5))
    return parts, torch.cat([p.dequantize().double() for p in parts])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "config"), [(3, GemmConfig(32, 128, 2, 2, 3)), (20, GemmConfig(64, 128, 1, 2, 2))])
def test_joined_matrices(dtype, name, rows, config):
    parts, w = packed_parts(name, (256, 128), 256)
    matrix = repacked(parts)
    assert matrix.nbytes == sum(p.nbytes for p in parts) == sum(precision(name).nbytes(p.shape) for p in parts)
    x = randn(rows, 256, dtype=dtype)
    out = torch.full((rows, 384), float("nan"), dtype=dtype, device=DEVICE)
    work = GemmWorkspace(1 << 16, 64, DEVICE)
    for _ in range(2):
        quantized_gemm(x, matrix, out, work, config)
    assert not work.counters.any()
    assert gap(out, x.double() @ w.T) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["int8_g128", "fp8_block128"])
def test_inner_steps_of_several_groups(name):
    """A step of 256 inputs holds two groups of codes of 8 bits, each with a scale of its own."""
    parts, w = packed_parts(name, (128,), 512)
    x = randn(3, 512, dtype=DTYPES[0])
    out = torch.full((3, 128), float("nan"), dtype=DTYPES[0], device=DEVICE)
    quantized_gemm(x, repacked(parts), out, GemmWorkspace(1 << 16, 64, DEVICE), GemmConfig(32, 256, 2, 2, 2))
    assert gap(out, x.double() @ w.T) < TOLERANCE[DTYPES[0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["int4_g64_asym", "nf4", "fp8_e4m3"])
def test_what_is_fused(dtype, name):
    fused(dtype, name, 5, GemmConfig(32, 128, 2, 2, 2))


def fused(dtype, name, rows, config):
    """Norm, bias and act(gate) * up; then the residual sum with the next norm's gain."""
    inner, columns = 256, 128
    parts, w = packed_parts(name, (columns, columns), inner)
    matrix, work = repacked(parts), GemmWorkspace(1 << 16, 64, DEVICE)
    x, gain, bias = randn(rows, inner, dtype=dtype), randn(inner, dtype=dtype, seed=2), randn(256, dtype=dtype, seed=3)
    squares = x.float().square().sum(1).repeat(1, 1)
    padded = torch.full((1, MAX_ROWS.value), float("nan"), device=DEVICE)
    padded[0, :rows] = squares
    source = Gained((x.float() * gain.float()).to(dtype), padded, 1)
    out = torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)
    quantized_gemm(source, matrix, out, work, config, eps=1e-5, bias=bias, pair="silu")
    xd = x.double()
    both = (xd / (xd.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()) @ w.T + bias.double()
    assert gap(out, torch.nn.functional.silu(both[:, :columns]) * both[:, columns:]) < TOLERANCE[dtype]

    parts, w = packed_parts(name, (columns,), inner)
    out = randn(rows, columns, dtype=dtype, seed=4)
    wanted = out.double() + 0.5 * (xd @ w.T)
    following = randn(columns, dtype=dtype, seed=6)
    gained = Gained(torch.full_like(out, float("nan")), torch.full((8, MAX_ROWS.value), float("nan"), device=DEVICE))
    quantized_gemm(
        x, repacked(parts), out, work, config, residual=out, scale=0.5, gain=following, gained=gained
    )  # fmt: skip
    assert gap(out, wanted) < TOLERANCE[dtype]
    assert gap(gained.values, out.double() * following.double()) < TOLERANCE[dtype]
    assert gap(gained.squares[: gained.count, :rows].sum(0), out.double().square().sum(1)) < TOLERANCE[dtype]


DIRECT = tuple(n for n in FORMATS if n not in ("int4_g32", "int4_g32_asym", "int8_g64_asym"))
direct_only = pytest.mark.skipif(not (ON_GPU and has_gluon()), reason="Gluon kernels have no interpreter")


@direct_only
@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize(
    ("rows", "inner", "config"),
    [
        (1, 1024, GemmConfig(16, 128, 1, 4, 1, rows=1, direct=True)),
        (1, 1024, GemmConfig(32, 128, 1, 2, 2, rows=1, direct=True, registers=128)),
        # Loops of a warp whose last eight groups are not all there.
        (1, 896, GemmConfig(16, 128, 1, 1, 1, rows=1, direct=True)),
        (1, 1792, GemmConfig(16, 128, 1, 1, 2, rows=1, direct=True)),
        (1, 3584, GemmConfig(16, 128, 1, 1, 7, rows=1, direct=True)),
        (5, 1024, GemmConfig(16, 128, 1, 2, 2, rows=8, direct=True)),
        (8, 1024, GemmConfig(16, 128, 1, 8, 1, rows=8, direct=True)),
    ],
)
def test_codes_straight_to_registers(name, rows, inner, config):
    parts, w = packed_parts(name, (256, 128), inner)
    x = randn(rows, inner, dtype=torch.bfloat16)
    out = torch.full((rows, 384), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    work = GemmWorkspace(1 << 16, 64, DEVICE)
    quantized_gemm(x, repacked(parts), out, work, config)
    assert gap(out, x.double() @ w.T) < TOLERANCE[torch.bfloat16]
    # Beside the other kernel, whose sums are fp32 too: nothing but the order of sums and one rounding apart.
    other = torch.empty_like(out)
    quantized_gemm(x, repacked(parts), other, work, GemmConfig(32, 128, 1, 2, 2))
    assert gap(out, other) < 4e-3


@direct_only
@pytest.mark.parametrize("together", [True, False], ids=["eight", "one"])
@pytest.mark.parametrize("name", DIRECT)
def test_single_weights_straight_to_registers(name, together):
    """Of rows that are 1 at one input the products are the weights, from the smallest to the largest."""
    spread = torch.exp(randn(64, 512, dtype=torch.float32, seed=1) * 3)
    packed = form(name).quantize(randn(64, 512, dtype=torch.float32) * spread)
    w, inputs = packed.dequantize(), [0, 3, 17, 62, 65, 130, 300, 511]
    x = torch.zeros(8, 512, dtype=torch.bfloat16, device=DEVICE)
    x[range(8), inputs] = 1.0
    out = torch.empty(8, 64, dtype=torch.bfloat16, device=DEVICE)
    matrix, work = repacked([packed]), GemmWorkspace(1 << 16, 64, DEVICE)
    config = GemmConfig(16, 128, 1, 2, 2, rows=8 if together else 1, direct=True)
    for part in (slice(0, 8),) if together else (slice(i, i + 1) for i in range(8)):
        quantized_gemm(x[part], matrix, out[part], work, config)
    wanted = w[:, inputs].T.double()
    # NF4's values are rounded to bf16 and their sums again.
    assert ((out.double() - wanted).abs() <= wanted.abs() * 2.0**-7 + 1e-30).all()


@direct_only
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("name", ["int4_g64_asym", "int4_g128", "nf4", "mxfp4", "int8", "fp8_e4m3"])
def test_what_is_fused_straight_to_registers(name, rows):
    fused(torch.bfloat16, name, rows, GemmConfig(16, 128, 1, 2, 1, rows=1 if rows == 1 else 8, direct=True))


def test_matrices_that_cannot_go_straight_to_registers_are_named():
    config = GemmConfig(16, 128, 1, 2, 2, direct=True)

    def why(name: str, columns: int = 64, inputs: int = 512) -> str:
        return not_direct(repacked([form(name).quantize(torch.randn(columns, inputs))]), columns, config) or ""

    assert why("int4_g128") == why("mxfp4") == why("nf4") == why("fp8_block128", 128) == ""
    assert "groups of 32" in why("int4_g32")
    assert "zero points of 8 bits" in why("int8_g64_asym")
    assert "whole steps of 2 warps" in why("int8", inputs=640)
    assert "not a multiple of 16" in why("int8", columns=72)
    assert "chunks are of 64 inputs" in why("int4", inputs=192)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_dequantized(dtype, name):
    parts, w = packed_parts(name, (128, 40), 384)
    scratch = torch.full((70_000,), float("nan"), dtype=dtype, device=DEVICE)
    assert gap(dequantize(repacked(parts), scratch), w) < TOLERANCE[dtype]


def test_matrices_out_of_the_kernels_reach_are_named():
    assert unfit(precision("int4_g128"), [256], 256) is None
    assert "whole groups" in unfit(precision("int4_g128"), [256], 192)
    assert "multiple of 64" in unfit(precision("fp8_channel"), [256], 100)
    assert "runs of 256" in unfit(precision("nf4"), [192, 64], 576)
    assert "neighbouring" in unfit(precision("int4_g128_act"), [256], 256)
    assert "tiles" in unfit(precision("fp8_block128"), [64, 64], 256)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_norms_and_activations_leave_the_codes_that_rounding_makes(dtype, kind):
    """Bit for bit what a kernel of its own makes of their outputs."""

    def empty(width: int) -> Rounded:
        return Rounded(torch.empty(5, width, dtype=kind, device=DEVICE), torch.full((5,), float("nan"), device=DEVICE))

    def same(found: Rounded, x: torch.Tensor) -> None:
        wanted = empty(x.shape[1])
        round_rows(x, wanted.codes, wanted.scales)
        assert torch.equal(found.codes.view(torch.int8), wanted.codes.view(torch.int8))
        assert torch.equal(found.scales, wanted.scales)

    x, y, weight = randn(5, 200, dtype=dtype), randn(5, 200, dtype=dtype, seed=2), randn(200, dtype=dtype, seed=3)
    x[3], y[3] = 0.0, 0.0
    for given, post in ((None, None), (y, None), (y, weight)):
        out, found, sums = torch.empty_like(x), empty(200), (x.clone(), x.clone())
        add_norm(sums[0], given, weight, out, 1e-5, post_weight=post, scale=0.5)
        add_norm(sums[1], given, weight, None, 1e-5, post_weight=post, scale=0.5, rounded=found)
        assert torch.equal(sums[0], sums[1])
        same(found, out)
    for gated in (True, False):
        both = randn(5, 400 if gated else 200, dtype=dtype, seed=4)
        out, found = torch.empty_like(x), empty(200)
        activate(both, out, "silu", gated=gated)
        activate_rounded(both, found, "silu", gated=gated)
        same(found, out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_activations_rounded_to_eight_bits(dtype, kind):
    if kind != torch.int8 and not (ON_GPU and torch.cuda.get_device_capability() >= (8, 9)):
        pytest.skip("E4M3 needs compute capability 8.9; the interpreter cuts where it should round")
    x = randn(3, 200, dtype=dtype) * torch.tensor([[0.01], [0.0], [7.0]], dtype=dtype, device=DEVICE)
    codes, scales = torch.empty(3, 200, dtype=kind, device=DEVICE), torch.empty(3, device=DEVICE)
    round_rows(x, codes, scales)
    wanted = x.float().abs().amax(1) / (127 if kind == torch.int8 else 448)
    assert torch.allclose(scales, torch.where(wanted > 0, wanted, 1.0), rtol=1e-6)
    values = codes.float() * scales[:, None]
    bound = scales[:, None] * 0.5001 if kind == torch.int8 else x.float().abs() / 16 + scales[:, None] * 2**-10
    assert ((values - x.float()).abs() <= bound + 1e-9).all()

    sums, bias = randn(3, 40, dtype=torch.float32), randn(40, dtype=dtype, seed=3)
    by = torch.tensor([2.0, -1.0, 0.5], device=DEVICE)
    out = torch.full((3, 40), float("nan"), dtype=dtype, device=DEVICE)
    rescale(sums, out, scales, by, bias, (16, 24))
    columns = by.repeat_interleave(torch.tensor([16, 8, 16], device=DEVICE))
    wanted = sums.double() * scales.double()[:, None] * columns.double() + bias.double()
    assert gap(out, wanted) < TOLERANCE[dtype]
    rescale(sums, out, scales, columns, None, (1 << 30, 1 << 30))
    assert gap(out, wanted - bias.double()) < TOLERANCE[dtype]
