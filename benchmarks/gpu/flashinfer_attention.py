"""Our attention beside flashinfer's on the 7B shape: `flashinfer_attention.py`; one JSON line a shape, results compared.

Both read the same pool. Ours rotates and stores a decode row's query, key and value itself; flashinfer needs our kernel that
does so before it, hence its two figures, with and without. Planning on the host is left out and told apart.
"""

# ruff: noqa: B023 - every closure here is called within the iteration that made it

from __future__ import annotations

import json
import statistics
import time

import numpy as np
import torch
from checkpoint import COMMON, SHAPES

from headrace.engine.cuda.decoder import prefill_shape
from headrace.engine.cuda.flashinfer import FlashInfer, unfit
from headrace.engine.kernels.blocks import gather_rows
from headrace.engine.kernels.decode import DecodeWorkspace, decode_attention
from headrace.engine.kernels.prefill import PrefillWorkspace, prefill_attention
from headrace.engine.kernels.rope import rope_cache
from headrace.engine.kernels.table import GemmTable
from headrace.engine.tune import graph_us
from headrace.spec.accounting import cache_layout
from headrace.spec.hf import spec_from_hf
from headrace.spec.model import ModelSpec

H, KV, D, BT = 32, 8, 128, 16
DECODE = ((1, 160), (1, 2048), (1, 16384), (8, 640), (32, 640), (64, 640), (64, 4096), (256, 640))
"""Rows and context of decode steps."""
PROMPTS = ((0, 512), (0, 1024), (0, 4096), (0, 16384), (8192, 8192), (2048, 512), (16128, 256))
"""Cached tokens and tokens of chunks."""
DEVICE = torch.device("cuda")
WIDTH = (H + 2 * KV) * D


def report(**fields) -> None:
    print("RES", json.dumps(fields), flush=True)


def ints(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def plan_us(plan) -> float:
    """Host time of a plan, waiting for nothing else."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        plan()
        times.append(1e6 * (time.perf_counter() - begin))
    return round(statistics.median(times), 1)


def main() -> None:
    spec = spec_from_hf(COMMON | SHAPES["mistral-7b"], "mistral-7b")
    if (reason := unfit(spec, "bf16", "bf16", DEVICE)) is not None:
        raise SystemExit(f"flashinfer: {reason}")
    properties = torch.cuda.get_device_properties(DEVICE)
    sms, table = properties.multi_processor_count, GemmTable(properties.name, properties.multi_processor_count)
    begin = time.perf_counter()
    plans = FlashInfer(
        spec, cache_layout(spec, "bf16", BT), torch.bfloat16, DEVICE, rows=256, sms=sms, blocks=20480 // BT, graphs=True
    )
    report(
        step="flashinfer",
        version=plans.version,
        kernels_ready_s=round(time.perf_counter() - begin, 1),
        card=properties.name,
    )
    decode(plans, table, sms)
    prompts(plans, spec, properties, sms)


def decode(plans: FlashInfer, table: GemmTable, sms: int) -> None:
    turns = torch.rand(20480, D, device=DEVICE)
    for rows, context in DECODE:
        layers = max(2, min(32, (400 << 20) // (rows * context * KV * D * 4)))
        blocks = context // BT
        pools = [random(rows * blocks + 1, 2, KV, BT, D) for _ in range(layers)]
        tables = torch.randperm(rows * blocks, device=DEVICE).int().view(rows, blocks)
        host = tables.cpu().numpy()[None]
        qkv, ours, theirs = random(rows, WIDTH), random(rows, H * D), random(rows, H * D)
        slots, positions = ints(range(rows)), ints([context - 1] * rows)
        work = DecodeWorkspace(rows, KV, H // KV, D, lambda n: 100, DEVICE)
        shape = table.decode(rows, D) or {"splits": min(33, max(4, -(-8 * sms // (rows * KV)))), "min_chunk": 128}

        def rope(kv):
            rope_cache(qkv, kv, tables, slots, positions, turns, H, rope_dim=D, pdl=True)

        def run_ours(which, **given):
            for kv in which:
                decode_attention(
                    qkv, ours, kv, tables, slots, positions, work, H, scale=D**-0.5, pdl=True, **shape, **given
                )

        def plan():
            return plans.decode(rows, np.arange(rows), np.full(rows, context - 1), host)

        planned = plan()

        def run_theirs(which, *, rotate=False):
            for kv in which:
                if rotate:
                    rope(kv)
                planned.run(0, qkv, theirs, kv)

        rope(pools[0])
        run_ours(pools[:1])
        run_theirs(pools[:1])
        off = gap(theirs, ours)
        fused = {"cos_sin": turns, "rope_dim": D}
        run_ours(pools[:1], **fused)
        torch.cuda.synchronize()
        us = {
            "ours": graph_us(lambda: run_ours(pools, **fused), layers, 9),
            "flashinfer": graph_us(lambda: run_theirs(pools), layers, 9),
            "flashinfer_with_rope": graph_us(lambda: run_theirs(pools, rotate=True), layers, 9),
        }
        nbytes = rows * context * KV * D * 4
        report(
            step="decode", rows=rows, context=context, **{f"{k}_us": round(v, 2) for k, v in us.items()},
            ours_TBs=round(nbytes / us["ours"] / 1e6, 2), flashinfer_TBs=round(nbytes / us["flashinfer"] / 1e6, 2),
            gap=round(off, 5), plan_us=plan_us(plan),
        )  # fmt: skip
        assert off < 2e-2, (rows, context, off)
        pools.clear()  # the next shape needs the memory


def prompts(plans: FlashInfer, spec: ModelSpec, properties, sms: int) -> None:
    hopper = properties.major == 9
    for start, length in PROMPTS:
        blocks = (start + length) // BT
        kv, tables = random(blocks, 2, KV, BT, D), torch.randperm(blocks, device=DEVICE).int().view(1, blocks)
        host = tables.cpu().numpy()[None]
        qkv, ours, theirs = random(length, WIDTH), random(length, H * D), random(length, H * D)
        chunks, offsets = ints([[0, start, length, 0]]), ints([0])
        flat = torch.zeros(max(start, 128), 2 * KV * D, device=DEVICE, dtype=torch.bfloat16)
        # The chunk's own keys and values come from the projection in our kernels, from the pool in theirs.
        still = torch.zeros(20480, D, device=DEVICE)
        still[:, : D // 2] = 1
        rope_cache(qkv, kv, tables, ints([0] * length), ints(range(start, start + length)), still, H, rope_dim=D)

        def tiles(rows):
            return ints([[0, m] for m in range((length - 1) // rows * rows, -1, -rows)])

        short = length <= 256
        if hopper and not short:
            from headrace.engine.kernels.prefill_hopper import TILE, prefill_hopper

            wide, total = tiles(TILE), ints([start])

            def run_ours():
                if start:
                    gather_rows(kv, tables, chunks, offsets, total, flat, programs=8 * sms)
                prefill_hopper(qkv, ours, flat, chunks, wide, offsets, H, KV, scale=D**-0.5, programs=sms)
        else:
            rows = 64 if short else 128
            these, work = tiles(rows), PrefillWorkspace(8, 4, H, 64, D, DEVICE) if short else None
            shape = prefill_shape(rows, spec.layers[0].mixer)

            def run_ours():
                prefill_attention(qkv, ours, kv, tables, chunks, these, H, scale=D**-0.5, work=work, **shape)

        def plan():
            none = np.zeros(0, np.int64)
            one = np.array([0])
            return plans.mixed(none, none, one, one + start, one + length, host)

        planned = plan()

        def run_theirs():
            planned.run(0, qkv, theirs, kv)

        run_ours()
        run_theirs()
        off = gap(theirs, ours)
        us = {"ours": graph_us(run_ours, 1, 9), "flashinfer": graph_us(run_theirs, 1, 9)}
        flops = 4 * H * D * (start * length + length * (length + 1) / 2)
        report(
            step="prefill", start=start, length=length, **{f"{k}_us": round(v, 1) for k, v in us.items()},
            **{f"{k}_TFLOPs": round(flops / v / 1e6) for k, v in us.items()}, gap=round(off, 5), plan_us=plan_us(plan),
        )  # fmt: skip
        assert off < 2e-2, (start, length, off)


if __name__ == "__main__":
    main()
