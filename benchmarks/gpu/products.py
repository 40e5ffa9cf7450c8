"""Whole decode steps with products of our own and with the library's, on one model in turns: `products.py MODEL [TABLES.json]`.

MODEL may be a folder with nothing but a configuration (weights are drawn then). Each kind of step is captured once a table and
replayed in turns, so that all see the same clock and the same contexts (random keys and values); one JSON line a step. TABLES
maps a name to entries as in `kernels/configs` (null: the library); without it the shipped table stands beside one without
warp-specialized entries. With `library`, the first of the tables, the library also chooses its algorithms itself.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from headrace.engine.backend import Limits
from headrace.engine.cuda.decoder import Decoder, DeviceStep
from headrace.engine.executors.cuda import BACKEND
from headrace.engine.kernels.launchers import separate_launchers
from headrace.engine.kernels.table import GemmTable
from headrace.spec.accounting import cache_layout
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

BLOCK_TOKENS, LENGTH, SEQS = 16, 4096, 256
STEPS = ((40, 640, 0), (64, 640, 0), (64, 2176, 2048), (96, 640, 0), (128, 640, 0), (192, 640, 0), (256, 640, 0))
"""Rows, their contexts, tokens of these that all share."""
TURNS, REPLAYS = 6, 24


def report(**fields) -> None:
    print("RES", json.dumps(fields), flush=True)


def make(model: str) -> Decoder:
    config = EngineConfig(model=model, backend="cuda", device="cuda", weights="bf16", kv="bf16", load_format="dummy")
    loaded = BACKEND.load(locate(model), config)
    loaded._uploader.finish()
    layout = cache_layout(loaded.spec, "bf16", BLOCK_TOKENS)
    card = torch.cuda.get_device_properties(0)
    decoder = Decoder(
        loaded.spec, loaded._weights, layout, Limits(SEQS * LENGTH // BLOCK_TOKENS // 5, SEQS, LENGTH, 4096),
        GemmTable(card.name, card.multi_processor_count), torch.bfloat16, torch.device("cuda:0"),
        sms=card.multi_processor_count, pdl=True, capability=(card.major, card.minor),
    )  # fmt: skip
    decoder.pool.blocks.normal_()
    return decoder


def step_of(decoder: Decoder, rows: int, context: int, shared: int) -> DeviceStep:
    def ints(values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    common, own = shared // BLOCK_TOKENS, -(-(context + 1 - shared) // BLOCK_TOKENS)
    for row in range(rows):
        decoder.tables[0, row, :common] = torch.arange(common)
        decoder.tables[0, row, common : common + own] = common + row * own + torch.arange(own)
    step = DeviceStep(ints([5] * rows), ints(range(rows)), ints([context - 1] * rows), rows)
    if shared:
        step.firsts, step.prefix_tiles = (
            ints([shared] * rows),
            ints([[r, min(r + 16, rows), shared] for r in range(0, rows, 16)]),
        )
    return step


def one_job(job: Callable[[], None]) -> None:
    torch.cuda.set_device(0)
    job()


def main(model: str, given: str | None) -> None:
    decoder = make(model)
    entries = decoder._table._entries
    library = {k: None if v is None or v.get("block_m") else v for k, v in entries.items()}
    tables = {"library": library}
    for name, own in (json.loads(Path(given).read_text()) if given else {"shipped": entries}).items():
        tables[name] = library | own
    why_not = decoder.library.why_not
    report(algorithms=decoder.library.note())

    def take(name: str) -> None:
        decoder._table._entries = tables[name]
        decoder.library.why_not = "switched off" if name == "library" else why_not

    assert separate_launchers()
    seen: set[object] = set()
    for name in tables:
        take(name)
        jobs: list[Callable[[], None]] = []
        for rows, context, _ in STEPS:
            kind, kernels = decoder.decode_kernel(rows), decoder.kernels_of(rows)
            if kernels not in seen:
                jobs += decoder.compile_jobs(step_of(decoder, rows, context, 0), attention=kind not in seen)
            seen |= {kind, kernels}
        with ThreadPoolExecutor(14) as pool:
            list(pool.map(one_job, jobs))
    for rows, context, shared in STEPS:
        step, graphs, logits = step_of(decoder, rows, context, shared), {}, {}
        for name in tables:
            take(name)
            decoder.run(step)
            logits[name] = decoder.run(step).clone()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                decoder.run(step)
        found: dict[str, list[float]] = {name: [] for name in tables}
        for _ in range(TURNS):
            for name, graph in graphs.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                graph.replay()
                begin.record()
                for _ in range(REPLAYS):
                    graph.replay()
                end.record()
                end.synchronize()
                found[name].append(round(begin.elapsed_time(end) / REPLAYS, 4))
        base, exact = statistics.median(found["library"]), logits["library"].double()
        report(
            rows=rows, context=context, shared=shared, ms=found,
            to_library={n: round(statistics.median(t) / base, 4) for n, t in found.items()},
            logits_apart={n: round(float((v.double() - exact).norm() / exact.norm()), 5) for n, v in logits.items()},
        )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
