"""Attention kernels alone on the 7B shape beside their floors, over several configurations.

`kernels.py [decode] [cascade] [prefill] [short] [codes]`; every line is one shape, best configuration first. `codes` compares the
KV formats: decode attention, a chunk over a long context, shared prefixes, gathering of cached keys for long prompts.
"""

# ruff: noqa: B023 - every closure here is called within the iteration that made it

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from headrace.engine.kernels.decode import DecodeWorkspace, decode_attention
from headrace.engine.kernels.launchers import separate_launchers
from headrace.engine.kernels.prefill import PrefillWorkspace, prefill_attention
from headrace.engine.kernels.rope import rope_cache
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
        torch.cuda.set_device(0)
        try:
            launch()
        except OutOfResources:
            return False
        return True

    assert separate_launchers()
    with ThreadPoolExecutor(12) as threads:
        return list(threads.map(one, launches))


def decode() -> None:
    angles = torch.rand(20480, D, device=DEVICE)
    for rows, context in (
        (1, 160),
        (1, 2048),
        (1, 16384),
        (8, 640),
        (16, 640),
        (32, 640),
        (64, 640),
        (128, 640),
        (256, 640),
    ):
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
            {max(1, -(-p * 132 // (rows * KV))) for p in (2, 3, 4, 8)} | ({1, 2, 4} if rows >= 8 else set())
        )
        tried = [
            (n, w, s, min(100, sp), mc)
            for n, w, s in (
                (64, 2, 3), (64, 2, 4), (64, 1, 3), (32, 1, 5), (32, 1, 4), (32, 1, 3), (64, 4, 2), (64, 4, 3),
                (128, 4, 2), (128, 4, 3), (32, 2, 4), (32, 2, 6), (64, 1, 4), (64, 2, 2),
            )
            for sp in fitting
            for mc in ((64, 128) if rows == 1 else (128, 256))
        ]  # fmt: skip
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


def cascade() -> None:
    """64 rows that share 2,048 tokens and have 128 of their own."""
    rows, shared, own = 64, 2048, 128
    angles = torch.rand(20480, D, device=DEVICE)
    pools = [pool(shared + rows * own) for _ in range(16)]
    common = torch.randperm(shared // BT, device=DEVICE).int()
    rest = (shared // BT + torch.randperm(rows * own // BT, device=DEVICE)).int().view(rows, -1)
    tables = torch.cat([common.expand(rows, -1), rest], 1).contiguous()
    qkv = torch.randn(rows, (H + 2 * KV) * D, device=DEVICE, dtype=torch.bfloat16)
    out = torch.zeros(rows, H * D, device=DEVICE, dtype=torch.bfloat16)
    slots, positions, firsts = ints(range(rows)), ints([shared + own - 1] * rows), ints([shared] * rows)
    tiles = ints([[r, r + 16, shared] for r in range(0, rows, 16)])
    work = DecodeWorkspace(rows, KV, H // KV, D, lambda n: 40, DEVICE)

    def run(config, which):
        rotates, own, prefix_splits, prefix_block_n, prefix_warps, prefix_stages = config
        block_n, warps, stages = own
        for kv in which:
            given = {"cos_sin": angles, "rope_dim": D}
            if not rotates:
                rope_cache(qkv, kv, tables, slots, positions, angles, H, rope_dim=D, pdl=True)
                given = {}
            decode_attention(
                qkv, out, kv, tables, slots, positions, work, H, scale=D**-0.5, splits=1, min_chunk=1024,
                block_n=block_n, num_warps=warps, stages=stages, pdl=True, firsts=firsts, tiles=tiles,
                prefix_splits=prefix_splits, prefix_block_n=prefix_block_n, prefix_warps=prefix_warps,
                prefix_stages=prefix_stages, prefix_chunk=prefix_block_n, **given,
            )  # fmt: skip

    tried = [
        (rotates, own, p, *shape)
        for rotates in (True, False)
        for own in ((32, 1, 3), (64, 2, 2))
        for p in (4, 8, 16)
        for shape in ((64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 8, 2), (32, 4, 3))
    ]
    good = all_compile([lambda c=c: run(c, pools[:1]) for c in tried if c[2] == 4])
    fits = {(c[0], c[1], *c[3:]): g for c, g in zip([c for c in tried if c[2] == 4], good, strict=True)}
    torch.cuda.synchronize()
    timed = sorted((graph_us(lambda c=c: run(c, pools), len(pools), 5), c) for c in tried if fits[c[0], c[1], *c[3:]])
    report(
        step="cascade", rows=rows, shared=shared, own=own, us=round(timed[0][0], 1), config=timed[0][1],
        all=[(round(t, 1), c) for t, c in timed],
    )  # fmt: skip


def prefill() -> None:
    configs = [(128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (256, 64, 8, 3)]
    hopper = torch.cuda.get_device_capability()[0] == 9
    for start, length in ((0, 512), (0, 1024), (0, 4096), (0, 8192), (8192, 8192), (2048, 512)):
        kv = pool(start + length)
        blocks = -(-(start + length) // BT)
        tables = torch.randperm(blocks, device=DEVICE).int().view(1, blocks)
        qkv = torch.randn(length, (H + 2 * KV) * D, device=DEVICE, dtype=torch.bfloat16)
        out = torch.zeros(length, H * D, device=DEVICE, dtype=torch.bfloat16)
        chunks, offsets = ints([[0, start, length, 0]]), ints([0])
        gathered = torch.zeros(max(start, 128), 2 * KV * D, device=DEVICE, dtype=torch.bfloat16)

        def tiles(rows):
            return ints([[0, m] for m in range((length - 1) // rows * rows, -1, -rows)])

        def run(config):
            bm, bn, warps, stages = config
            these = tiles(bm)
            return lambda: prefill_attention(
                qkv, out, kv, tables, chunks, these, H, scale=D**-0.5, block_m=bm, block_n=bn, num_warps=warps, stages=stages
            )  # fmt: skip

        launches = [run(c) for c in configs]
        if hopper:
            from headrace.engine.kernels.blocks import gather_rows
            from headrace.engine.kernels.prefill_hopper import TILE, prefill_hopper

            wide, total = tiles(TILE), ints([start])

            def specialized():
                if start:
                    gather_rows(kv, tables, chunks, offsets, total, gathered, programs=8 * 132)
                prefill_hopper(qkv, out, gathered, chunks, wide, offsets, H, KV, scale=D**-0.5, programs=132)

            launches.append(specialized)
        good = all_compile(launches)
        torch.cuda.synchronize()
        flops = 4 * H * D * (start * length + length * (length + 1) / 2)
        named = [*configs, "warp-specialized"][: len(launches)]
        timed = sorted(
            ((graph_us(launch, 1, 9), str(c)) for launch, c, fits in zip(launches, named, good, strict=True) if fits)
        )
        report(
            step="prefill", start=start, length=length, us=round(timed[0][0], 1), config=timed[0][1],
            TFLOPs=round(flops / timed[0][0] / 1e6), all=[(round(t, 1), c) for t, c in timed],
        )  # fmt: skip


def short() -> None:
    """A chunk of 256 queries over a long context, its keys cut among programs or not."""
    start, length = 16128, 256
    kv = pool(start + length)
    tables = torch.randperm((start + length) // BT, device=DEVICE).int().view(1, -1)
    qkv = torch.randn(length, (H + 2 * KV) * D, device=DEVICE, dtype=torch.bfloat16)
    out = torch.zeros(length, H * D, device=DEVICE, dtype=torch.bfloat16)
    chunks, tiles = ints([[0, start, length, 0]]), ints([[0, m] for m in range(192, -1, -64)])
    found = []
    for splits in (1, 2, 3, 4, 6, 8):
        work = PrefillWorkspace(8, splits, H, 64, D, DEVICE) if splits > 1 else None
        for stages in (2, 3):
            launch = lambda w=work, s=stages: prefill_attention(  # noqa: E731
                qkv, out, kv, tables, chunks, tiles, H, scale=D**-0.5, block_m=64, block_n=64, num_warps=4, stages=s, work=w
            )  # fmt: skip
            launch()
            found.append((round(graph_us(launch, 1, 9), 1), splits, stages))
    flops = 4 * H * D * (start * length + length * (length + 1) / 2)
    report(step="short", us=min(found)[0], TFLOPs=round(flops / min(found)[0] / 1e6), all=sorted(found))


def coded_pool(name: str, tokens: int, layers: int):
    """A pool of one KV format whose keys and values are like normal numbers."""
    from headrace.engine.cuda.pool import KVPool
    from headrace.spec.cache import CacheLayout
    from headrace.spec.precision import kv_precision

    nbytes = layers * BT * KV * kv_precision(name).token_bytes(D, D)
    made = KVPool(CacheLayout((), layers, BT, KV, D, D, name, nbytes), tokens // BT, DEVICE)
    for slot in range(layers):
        kv, scales = made.layer(slot)
        if name == "bf16":
            kv.normal_()
        elif name == "fp8":
            kv.copy_(
                torch.randn(*kv.shape[:-1], D, device=DEVICE, dtype=torch.bfloat16)
                .to(torch.float8_e4m3fn)
                .view(torch.int16)
            )
        else:
            kv.random_(-(1 << 15), 1 << 15)
            scales.fill_(0.01)
    return made


def codes() -> None:
    from headrace.engine.kernels.blocks import gather_rows

    formats = ("bf16", "fp8", "int8")
    angles = torch.rand(20480, D, device=DEVICE)
    kinds = ((32, 1, 4), (64, 2, 3), (64, 1, 3), (64, 1, 4), (64, 2, 4), (128, 2, 3), (128, 4, 3), (128, 4, 2))
    width = 1281
    good: dict[tuple, bool] = {}
    for rows, context in ((1, 4096), (1, 16384), (8, 4096), (8, 16384), (64, 640), (64, 4096), (64, 16384), (256, 640)):
        layers = max(2, min(32, (400 << 20) // (rows * context * KV * D * 4)))
        blocks = context // BT
        tables = torch.zeros(rows, width, dtype=torch.int32, device=DEVICE)
        tables[:, :blocks] = torch.randperm(rows * blocks, device=DEVICE).int().view(rows, blocks)
        qkv = torch.randn(rows, (H + 2 * KV) * D, device=DEVICE, dtype=torch.bfloat16)
        out = torch.zeros(rows, H * D, device=DEVICE, dtype=torch.bfloat16)
        slots, positions = ints(range(rows)), ints([context - 1] * rows)
        work = DecodeWorkspace(rows, KV, H // KV, D, lambda n: 100, DEVICE)
        fitting = sorted(
            {min(100, max(1, -(-p * 132 // (rows * KV)))) for p in (1, 2, 4, 8)} | {1} if rows > 1 else {33, 66, 100}
        )
        pools = {name: coded_pool(name, rows * context, layers) for name in formats}

        def run(name, config, count=layers):
            block_n, warps, stages, splits = config
            for slot in range(count):
                kv, scales = pools[name].layer(slot)
                decode_attention(
                    qkv, out, kv, tables, slots, positions, work, H, scale=D**-0.5, scales=scales, cos_sin=angles, rope_dim=D,
                    splits=splits, min_chunk=64 if rows == 1 else 128, block_n=block_n, num_warps=warps, stages=stages, pdl=True,
                )  # fmt: skip

        if not good:
            todo = [(name, kind) for name in formats for kind in kinds]
            good = dict(zip(todo, all_compile([lambda n=n, k=k: run(n, (*k, 2), 1) for n, k in todo]), strict=True))
            torch.cuda.synchronize()
        best = {}
        for name in formats:
            tried = [(*k, s) for k in kinds if good[name, k] for s in fitting]
            timed = sorted((graph_us(lambda c=c, n=name: run(n, c), layers, 5), c) for c in tried)
            nbytes = pools[name].nbytes / layers
            best[name] = timed[0][0]
            report(
                step="codes-decode", kv=name, rows=rows, context=context, us=round(timed[0][0], 2), config=timed[0][1],
                TBs=round(nbytes / timed[0][0] / 1e6, 2), to_bf16=round(timed[0][0] / best["bf16"], 3),
                next=[(round(t, 2), c) for t, c in timed[1:6]],
            )  # fmt: skip
        pools.clear()
    start, length = 16128, 256
    chunks, tiles, offsets = ints([[0, start, length, 0]]), ints([[0, m] for m in range(192, -1, -64)]), ints([0])
    qkv = torch.randn(length, (H + 2 * KV) * D, device=DEVICE, dtype=torch.bfloat16)
    out = torch.zeros(length, H * D, device=DEVICE, dtype=torch.bfloat16)
    gathered = torch.zeros(start, 2 * KV * D, device=DEVICE, dtype=torch.bfloat16)
    work = PrefillWorkspace(8, 4, H, 64, D, DEVICE)
    for name in formats:
        pool = coded_pool(name, start + length, 2)
        kv, scales = pool.layer(1)
        tables = torch.randperm((start + length) // BT, device=DEVICE).int().view(1, -1)
        found = []
        for block_n, warps, stages in ((64, 4, 2), (64, 4, 3), (32, 4, 3), (64, 4, 4)):
            launch = lambda b=block_n, w=warps, s=stages: prefill_attention(  # noqa: E731
                qkv, out, kv, tables, chunks, tiles, H, scale=D**-0.5, scales=scales, block_m=64, block_n=b, num_warps=w,
                stages=s, work=work,
            )  # fmt: skip
            launch()
            found.append((round(graph_us(launch, 1, 9), 1), block_n, warps, stages))
        gather = lambda: gather_rows(kv, tables, chunks, offsets, total, gathered, programs=8 * 132, scales=scales)  # noqa: E731
        total = ints([start])
        gather()
        report(step="codes-prompts", kv=name, short=sorted(found), gather_us=round(graph_us(gather, 1, 9), 1))
    rows, shared, own = 64, 2048, 128
    qkv = torch.randn(rows, (H + 2 * KV) * D, device=DEVICE, dtype=torch.bfloat16)
    out = torch.zeros(rows, H * D, device=DEVICE, dtype=torch.bfloat16)
    common = torch.randperm(shared // BT, device=DEVICE).int()
    rest = (shared // BT + torch.randperm(rows * own // BT, device=DEVICE)).int().view(rows, -1)
    tables = torch.cat([common.expand(rows, -1), rest], 1).contiguous()
    slots, positions, firsts = ints(range(rows)), ints([shared + own - 1] * rows), ints([shared] * rows)
    tiles = ints([[r, r + 16, shared] for r in range(0, rows, 16)])
    work = DecodeWorkspace(rows, KV, H // KV, D, lambda n: 40, DEVICE)
    for name in formats:
        pool = coded_pool(name, shared + rows * own, 16)

        def both(prefix, own_shape):
            for slot in range(16):
                kv, scales = pool.layer(slot)
                decode_attention(
                    qkv, out, kv, tables, slots, positions, work, H, scale=D**-0.5, scales=scales, cos_sin=angles, rope_dim=D,
                    splits=2, min_chunk=1024, pdl=True, firsts=firsts, tiles=tiles, prefix_splits=4, prefix_chunk=64,
                    prefix_block_n=prefix[0], prefix_warps=prefix[1], prefix_stages=prefix[2], block_n=own_shape[0],
                    num_warps=own_shape[1], stages=own_shape[2],
                )  # fmt: skip

        tried = [(p, o) for p in ((64, 4, 3), (64, 4, 2), (128, 4, 2), (64, 8, 3)) for o in ((32, 1, 3), (64, 2, 3))]
        fits = all_compile([lambda c=c: both(*c) for c in tried])
        torch.cuda.synchronize()
        timed = sorted((graph_us(lambda c=c: both(*c), 16, 5), c) for c, fit in zip(tried, fits, strict=True) if fit)
        report(step="codes-cascade", kv=name, us=round(timed[0][0], 1), all=[(round(t, 1), c) for t, c in timed])


if __name__ == "__main__":
    for part in sys.argv[1:] or ["decode", "cascade", "prefill", "short"]:
        globals()[part]()
