"""Warp-specialized products: how their work is cut (anywhere), and results against formulas (on Hopper cards only)."""

from __future__ import annotations

import json
import random

import pytest
import torch
from kernel_device import DEVICE, ON_GPU, TOLERANCE, gap, randn

from headrace.engine.cuda.products import Products
from headrace.engine.kernels.gemm import MAX_ROWS, Gained, GemmConfig, GemmWorkspace, unfit, why_not_specialized
from headrace.engine.kernels.table import SHIPPED, GemmTable, entry_of

HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
gemm_hopper = pytest.importorskip("headrace.engine.kernels.gemm_hopper")


def tile(block_m, block_n, row_groups, column_groups, stages, rows):
    groups = row_groups * column_groups
    return GemmConfig(
        block_n, 64, 1, 4 * groups, stages, rows=rows, block_m=block_m, row_groups=row_groups, column_groups=column_groups
    )  # fmt: skip


@pytest.fixture
def formulas(monkeypatch):
    """The kernel's formulas as plain functions: the first unit of a program, a unit's program."""
    monkeypatch.setattr(gemm_hopper, "first_unit", gemm_hopper.first_unit.fn)
    return gemm_hopper.first_unit, gemm_hopper.owner.fn


def cuts():
    """Tiles, blocks of each, programs and lead as `cut` makes them, and cuts of any kind."""
    rng = random.Random(5)
    for _ in range(300):
        tiles, blocks, programs = rng.randint(1, 80), rng.randint(1, 60), rng.randint(1, 140)
        yield tiles, blocks, *gemm_hopper.cut(tiles, blocks, programs)
    yield 64, 64, *gemm_hopper.cut(64, 64, 132)
    yield 64, 224, *gemm_hopper.cut(64, 224, 132)


def test_pieces_cover_the_line_of_units_once(formulas):
    first_unit, owner = formulas
    for tiles, blocks, programs, lead in cuts():
        units = tiles * blocks
        more = (units, programs, blocks, lead)
        pieces = [range(first_unit(p, *more), first_unit(p + 1, *more)) for p in range(programs)]
        assert [u for piece in pieces for u in piece] == list(range(units))
        assert min(map(len, pieces)) > 0
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1 + 2 * lead
        assert all(owner(u, *more) == p for p, piece in enumerate(pieces) for u in piece)


def test_who_begins_a_tile_finds_all_its_other_parts(formulas):
    first_unit, owner = formulas
    for tiles, blocks, programs, lead in cuts():
        more = (tiles * blocks, programs, blocks, lead)
        left: dict[int, tuple[int, int, int]] = {}
        begun: dict[int, tuple[int, int]] = {}
        for program in range(programs):
            unit, end = first_unit(program, *more), first_unit(program + 1, *more)
            while unit < end:
                tile, start = unit // blocks, unit % blocks
                stop = min(blocks, start + end - unit)
                if start:
                    assert program not in left  # a program leaves one part at most
                    assert not any(p == program for p, _ in begun.values())  # and before it waits for any
                    left[program] = (tile, start, stop)
                else:
                    begun[tile] = (program, stop)
                unit += stop - start
        assert sorted(begun) == list(range(tiles))
        for tile, (program, stop) in begun.items():
            last = owner(tile * blocks + blocks - 1, *more)
            found = [left.pop(p) for p in range(program + 1, last + 1)]
            assert {t for t, _, _ in found} <= {tile}
            assert [k for _, start, end in found for k in range(start, end)] == list(range(stop, blocks))
        assert not left


def test_which_products_fit():
    config = tile(64, 128, 1, 2, 5, 64)
    assert unfit(config, 6144, 4096, pair=False) is None
    assert unfit(config, 14336, 4096, pair=True) is None
    assert "outputs" in unfit(config, 6144 + 128, 4096, pair=False)
    assert "inner" in unfit(config, 6144, 4096 + 32, pair=False)
    assert "groups" in unfit(tile(64, 64, 4, 1, 4, 256), 6144, 4096, pair=False)
    assert "shared memory" in unfit(tile(64, 128, 1, 2, 6, 64), 6144, 4096, pair=False)
    assert "tile" in unfit(tile(128, 256, 2, 1, 2, 256), 6144, 4096, pair=False)


def test_only_hopper_cards_and_half_precision():
    assert "capability 8.0" in why_not_specialized((8, 0), torch.bfloat16)
    assert "capability 10.0" in why_not_specialized((10, 0), torch.bfloat16)
    assert "float32" in why_not_specialized((9, 0), torch.float32)
    assert why_not_specialized((9, 0), torch.float16) is None


def test_shipped_entries_fit_their_products_and_are_for_cards_that_run_them():
    entries = json.loads((SHIPPED / "nvidia_h200.json").read_text())["gemm"]
    specialized = {k: v for k, v in entries.items() if v and v.get("block_m") and ":" not in k}
    assert specialized
    table = GemmTable("NVIDIA H200", 132)
    work = GemmWorkspace(1, 1, torch.device("cpu"))
    here = Products([], table, work, 64, torch.bfloat16, torch.device("cpu"), capability=(8, 0), pdl=False)
    for name in specialized:
        rows, columns, inner, *pair = map(int, name.split("x"))
        config = table.config(rows, columns, inner, pair=bool(pair))
        assert config == table.config(rows - 1, columns, inner, pair=bool(pair))
        assert config.block_m * config.row_groups >= rows
        assert unfit(config, columns, inner, pair=bool(pair)) is None
        assert entry_of(config) == entries[name]
        weights = torch.empty(columns * (2 if pair else 1), inner, device="meta")
        assert here.config(rows, weights, pair=bool(pair)) is None


CONFIGS = [
    tile(64, 64, 1, 1, 13, 64),
    tile(64, 64, 1, 2, 9, 64),
    tile(64, 128, 2, 1, 6, 128),
    tile(64, 64, 3, 1, 6, 192),
    tile(64, 256, 2, 1, 4, 256),
    tile(128, 64, 2, 1, 5, 256),
]


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9")
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.block_m}x{c.block_n}-{c.row_groups}.{c.column_groups}-{c.rows}"
)
@pytest.mark.parametrize("way", ["plain", "norm-bias", "norm-pair", "residual"])
def test_products(config, way):
    rng = random.Random(config.rows + len(way))
    dtype = torch.float16 if config.rows == 192 else torch.bfloat16
    pair = way == "norm-pair"
    work = GemmWorkspace(9_000_000, 8192, DEVICE, torch.cuda.get_device_properties(0).multi_processor_count)
    for rows in (config.rows, rng.randint(max(33, config.rows // 2), config.rows)):
        width = config.block_n * config.column_groups * rng.choice([1, 3, 8, 17, 150])
        columns, inner = width // (2 if pair else 1), 64 * rng.choice([1, 5, 33, 64, 300])
        x = randn(rows + 7, inner, dtype=dtype)[:rows]
        w = (randn(width, inner, dtype=dtype, seed=1) * inner**-0.5).to(dtype)
        gain, bias = randn(inner, dtype=dtype, seed=2), randn(width, dtype=dtype, seed=3)
        out = torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)
        given, wanted, source = {}, x.double(), x
        if way.startswith("norm"):
            parts = [*x.float().square().split(rng.choice([16, 40]), 1)]
            squares = torch.full((len(parts) + 1, MAX_ROWS.value), float("nan"), device=DEVICE)
            for i, part in enumerate(parts):
                squares[i, :rows] = part.sum(1)
            source = Gained((x.float() * gain.float()).to(dtype), squares, len(parts))
            given["eps"] = 1e-5
            wanted = normed(x, gain)
        wanted = wanted @ w.double().T
        if way.startswith("norm"):
            given["bias"] = bias
            wanted = wanted + bias.double()
        if pair:
            given["pair"] = "silu"
            wanted = torch.nn.functional.silu(wanted[:, :columns]) * wanted[:, columns:]
        if way == "residual":
            residual, following = randn(rows, columns, dtype=dtype, seed=4), randn(columns, dtype=dtype, seed=6)
            gained = Gained(
                torch.full_like(out, float("nan")),
                torch.full((columns // 16 + 1, MAX_ROWS.value), float("nan"), device=DEVICE),
            )
            given |= {"residual": residual, "scale": 0.5, "gain": following, "gained": gained}
            wanted = residual.double() + 0.5 * wanted
        found = []
        for pdl in (True, True, False):  # who arrives last changes, and nothing else may; counters are left as found
            gemm_hopper.hopper_gemm(source, w, out, work, config, pdl=pdl, **given)
            found.append(out.clone())
        assert gap(out, wanted) < TOLERANCE[dtype]
        assert all(torch.equal(f, out) for f in found)
        assert not work.counters.any()
        if way == "residual":
            assert gap(gained.values, out.double() * following.double()) < TOLERANCE[dtype]
            assert gap(gained.squares[: gained.count, :rows].sum(0), out.double().square().sum(1)) < TOLERANCE[dtype]


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9")
def test_logits_in_fp32():
    config, rows = tile(64, 128, 1, 2, 5, 64), 50
    x, w = randn(rows, 512, dtype=torch.bfloat16), randn(32000, 512, dtype=torch.bfloat16, seed=1)
    out = torch.full((rows, 32000), float("nan"), device=DEVICE)
    work = GemmWorkspace(9_000_000, 8192, DEVICE, torch.cuda.get_device_properties(0).multi_processor_count)
    gemm_hopper.hopper_gemm(x, w, out, work, config)
    assert gap(out, x.double() @ w.double().T) < 1e-5
