"""Attention kernels alone on the 7B shape beside their floors, over several configurations: `kernels.py [decode] [prefill]`."""

# ruff: noqa: B023 - every closure here is called within the iteration that made it

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from headrace.engine.kernels.decode import DecodeWorkspace, decode_attention
from headrace.engine.kernels.prefill import prefill_attention
from headrace.engine.tune import graph_us

H, KV, D, BT = 32, 8, 128, 16
DEVICE = torch.device("cuda")


def report(**fields) -> None:
    print("RES", json.dumps(fields), flush=True)


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def pool(tokens: int) -> torch.Tensor:
    return torch.randn(tokens // BT + 1, 2, KV, BT, D, device=DEVICE, dtype=torch.bfloat16)


def all_compile(launches) -> list[bool]:
    from triton.runtime.errors import OutOfResources

    def one(launch) -> bool:
        try:
            launch()
        except OutOfResources:
            return False
        return True

    with ThreadPoolExecutor(12) as threads:
        return list(threads.map(one, launches))


def decode() -> None:
    angles = torch.rand(20480, D, device=DEVICE)
    for rows, context in ((1, 128), (1, 2048), (1, 16384), (8, 640), (64, 640), (256, 640), (64, 2200)):
        layers = max(2, min(32, (400 << 20) // (rows * context * KV * D * 4)))
        pools = [pool(rows * context) for _ in range(layers)]
        blocks = context // BT
        tables = torch.randperm(rows * blocks, device=DEVICE).int().view(rows, blocks)
        qkv = torch.randn(rows, (H + 2 * KV) * D, device=DEVICE, dtype=torch.bfloat16)
        out = torch.zeros(rows, H * D, device=DEVICE, dtype=torch.bfloat16)
        slots, positions = ints(range(rows)), ints([context - 1] * rows)
        work = DecodeWorkspace(rows, KV, H // KV, D, lambda n: 100, DEVICE)

        def run(config, which, **more):
            block_n, warps, stages, splits, min_chunk = config
            for kv in which:
                decode_attention(
                    qkv, out, kv, tables, slots, positions, work, H, scale=D**-0.5, cos_sin=angles, rope_dim=D,
                    splits=splits, min_chunk=min_chunk, block_n=block_n, num_warps=warps, stages=stages, pdl=True, **more,
                )  # fmt: skip

        fitting = sorted(
            {max(1, -(-p * 132 // (rows * KV))) for p in (2, 4, 8, 12)} | ({1, 2} if rows >= 64 else set())
        )
        tried = [
            (n, w, s, min(100, sp), mc)
            for n, w, s in (
                (64, 2, 3),
                (64, 2, 4),
                (64, 1, 3),
                (32, 1, 5),
                (128, 2, 3),
                (128, 4, 4),
                (32, 2, 6),
            )
            for sp in fitting
            for mc in ((64, 128) if rows == 1 else (128, 256))
        ]
        kinds = sorted({c[:3] for c in tried})
        good = dict(zip(kinds, all_compile([lambda k=k: run((*k, 2, 128), pools[:1]) for k in kinds]), strict=True))
        torch.cuda.synchronize()
        timed = sorted((graph_us(lambda c=c: run(c, pools), layers, 5), c) for c in tried if good[c[:3]])
        nbytes = rows * context * KV * D * 4
        report(
            step="decode", rows=rows, context=context, us=round(timed[0][0], 2), config=timed[0][1],
            TBs=round(nbytes / timed[0][0] / 1e6, 2), next=[(round(t, 2), c) for t, c in timed[1:8]], worst=round(timed[-1][0], 1),
            default=[round(t, 2) for t, c in timed if c[:3] == (64, 2, 3)],
        )  # fmt: skip
        pools.clear()  # the next shape needs the memory


def prefill() -> None:
    configs = [
        (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 4), 
        (256, 64, 8, 2), (256, 64, 8, 3), (128, 128, 4, 2), (128, 32, 4, 4), (256, 128, 8, 2), (64, 32, 4, 4),
    ]  # fmt: skip
    for start, length in ((0, 1024), (0, 4096), (0, 8192), (8192, 8192), (2048, 512)):
        kv = pool(start + length)
        blocks = -(-(start + length) // BT)
        tables = torch.randperm(blocks, device=DEVICE).int().view(1, blocks)
        qkv = torch.randn(length, (H + 2 * KV) * D, device=DEVICE, dtype=torch.bfloat16)
        out = torch.zeros(length, H * D, device=DEVICE, dtype=torch.bfloat16)
        chunks = ints([[0, start, length, 0]])

        def run(config):
            bm, bn, warps, stages = config
            tiles = ints([[0, m] for m in range((length - 1) // bm * bm, -1, -bm)])
            return lambda: prefill_attention(
                qkv,
                out,
                kv,
                tables,
                chunks,
                tiles,
                H,
                scale=D**-0.5,
                block_m=bm,
                block_n=bn,
                num_warps=warps,
                stages=stages,
            )

        launches = [run(c) for c in configs]
        good = all_compile(launches)
        torch.cuda.synchronize()
        flops = 4 * H * D * (start * length + length * (length + 1) / 2)
        timed = sorted(
            (graph_us(launch, 1, 5), c) for launch, c, fits in zip(launches, configs, good, strict=True) if fits
        )
        report(
            step="prefill", start=start, length=length, us=round(timed[0][0], 1), config=timed[0][1],
            TFLOPs=round(flops / timed[0][0] / 1e6), all=[(round(t, 1), c) for t, c in timed],
        )  # fmt: skip


if __name__ == "__main__":
    for part in sys.argv[1:] or ["decode", "prefill"]:
        globals()[part]()
