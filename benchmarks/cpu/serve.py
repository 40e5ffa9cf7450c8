"""Our server beside its CPU peers: one client, the same requests, interleaved work by work, repeats, ratios with intervals.

All servers stay up (an idle one uses no CPU); for each repeat and each work every engine runs in turn, in alternating
order, after other processes have gone quiet. A ratio is the geometric mean over repeats of (ours / theirs) within the
repeat, its interval Student's t on the logarithm. See `benchmarks/cpu/README.md` for how to bring the peers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from pathlib import Path

import instructions
from client import Mismatch, drive
from engines import Engine, headrace, limited, llama, openvino, transformers_static, vllm
from noise import Noise, machine, wait_idle
from scipy.stats import t as student
from works import WORKS, corpus

# figure compared, and whether more is better
MEASURE = {
    "single": ("output_tokens_per_s", True),
    "prefill": ("prefill_tokens_per_s", True),
    "c8": ("output_tokens_per_s", True),
    "c32": ("output_tokens_per_s", True),
    "prefix": ("wall_s", False),
}
# Of the CPU time of an engine held to AVX2, that of threads which used AVX-512: a moment in a main thread is no use of it.
AVX512_SHARE = 0.2


def engines(a: argparse.Namespace) -> list[Engine]:
    avx2 = a.instructions == "avx2"
    found = [headrace(b, avx2) for b in a.backends.split(",")]
    small, large = ("single", "prefill", "c8", "prefix"), ("c32",)
    for gguf in a.gguf:
        for flash in (True, False) if a.both_flash else (True,):
            served = [
                llama(a.llama_server, gguf, flash=flash, parallel=n, works=w) for n, w in ((8, small), (32, large))
            ]
            found += [limited(e) for e in served] if avx2 else served
    if a.vllm:
        server = vllm(a.vllm, a.hf_folder)
        found.append(limited(server, **instructions.TORCH) if avx2 else server)
    if a.transformers_python:
        server = transformers_static(a.transformers_python, a.hf_folder)
        found.append(limited(server, **instructions.TORCH) if avx2 else server)
    if a.openvino_python:
        server = openvino(a.openvino_python, a.openvino_gguf)
        found.append(limited(server, **instructions.OPENVINO) if avx2 else server)
    return found


def ratio(ours: list[float], theirs: list[float], more_is_better: bool) -> dict[str, float | None]:
    """How many times better ours is, paired by repeat, with a 95 % interval (none from a single repeat)."""
    logs = [math.log(o / t if more_is_better else t / o) for o, t in zip(ours, theirs, strict=True)]
    mean, n = statistics.fmean(logs), len(logs)
    if n == 1:
        return {"value": round(math.exp(mean), 3), "low": None, "high": None}
    half = student.ppf(0.975, n - 1) * statistics.stdev(logs) / math.sqrt(n)
    ends = {"value": mean, "low": mean - half, "high": mean + half}
    return {key: round(math.exp(at), 3) for key, at in ends.items()}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, required=True, help="folder for raw.jsonl, summary.json and logs")
    p.add_argument("--backends", default="torch", help="our backends, e.g. torch,native")
    p.add_argument("--works", default=",".join(WORKS))
    p.add_argument("--first-repeat", type=int, default=0, help="number of the first repeat (it seeds the requests)")
    p.add_argument("--summarize", action="store_true", help="only make summary.json anew from raw.jsonl")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--llama-server", type=Path)
    p.add_argument("--gguf", type=Path, nargs="*", default=[])
    p.add_argument("--both-flash", action="store_true", help="llama-server with and without flash attention")
    p.add_argument("--vllm", type=Path, help="the vllm executable of its own environment")
    p.add_argument("--hf-folder", type=Path, help="the same model as a Hugging Face folder, fp32")
    p.add_argument("--transformers-python", type=Path)
    p.add_argument("--openvino-python", type=Path)
    p.add_argument("--openvino-gguf", type=Path, help="the Q8_0 file, which OpenVINO keeps as int8")
    p.add_argument(
        "--instructions",
        choices=("all", "avx2"),
        default="all",
        help="avx2: every engine without AVX-512 (a llama-server built for it); a figure during which one used it is left out",
    )
    p.add_argument("--quiet-cores", type=float, default=0.15, help="foreign load above which a figure is marked")
    p.add_argument("--patience", type=float, default=60.0, help="seconds to wait for quiet before each figure")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    log = a.out / "raw.jsonl"
    raw: list[dict[str, object]] = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if {row.get("instructions", "all") for row in raw} - {a.instructions} and not a.summarize:
        p.error(f"{log} holds figures with other instructions; take another folder")
    if not a.summarize:
        measure(a, raw)
    found = summary(raw, a.quiet_cores)
    (a.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["ratios"], indent=1))


def measure(a: argparse.Namespace, raw: list[dict[str, object]]) -> None:
    """Run what was asked and append its rows to `raw` and to raw.jsonl, so that a run can be continued."""
    ids = corpus()
    running: list[Engine] = []
    try:
        for engine in engines(a):
            running.append(engine)  # before it starts: one that is not ready in time is stopped too
            engine.start(a.out)
            print(f"up: {engine.name}", flush=True)
        roots = [e.pid for e in running]
        for engine in running:  # warm: first kernels, allocators, caches of code
            for work in ("single", "prefill"):
                if engine.works is None or work in engine.works:
                    asyncio.run(drive(engine.port, engine.api, engine.model, WORKS[work](ids, -1)))
        for repeat in range(a.first_repeat, a.first_repeat + a.repeats):
            for name in a.works.split(","):
                turn = [e for e in running if e.works is None or name in e.works]
                for engine in turn if repeat % 2 == 0 else reversed(turn):
                    wait_idle(roots, a.quiet_cores, a.patience)
                    row: dict[str, object] = {"engine": engine.name, "work": name, "repeat": repeat}
                    row["instructions"] = a.instructions
                    with Noise(roots) as noise, instructions.Avx512Use(engine.pid) as wide:
                        try:
                            row |= asyncio.run(drive(engine.port, engine.api, engine.model, WORKS[name](ids, repeat)))
                        except (Mismatch, OSError) as error:
                            row["failed"] = str(error)
                    row |= {"foreign_cores": noise.foreign, "at": time.strftime("%Y-%m-%dT%H:%M:%S")}
                    row["avx512_share"] = wide.share
                    raw.append(row)
                    with (a.out / "raw.jsonl").open("a") as out:
                        out.write(json.dumps(row) + "\n")
                    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    finally:
        for engine in running:
            engine.stop()


def summary(raw: list[dict[str, object]], quiet_cores: float) -> dict[str, object]:
    """Medians per engine and work, ratios of each of our backends to each peer, and the machine.

    A figure taken while other processes used more than `quiet_cores` is left out here (it stays in raw.jsonl): engines
    suffer differently from a busy neighbour, so such a row compares the neighbour. So is one of a run held to AVX2 during
    which the engine used AVX-512.
    """
    kept: dict[str, dict[str, dict[int, float]]] = {}
    disturbed = beyond = 0
    limits = {str(row.get("instructions", "all")) for row in raw}
    for row in raw:
        figure = MEASURE[str(row["work"])][0]
        if float(row["foreign_cores"]) > quiet_cores:  # type: ignore[arg-type]
            disturbed += 1
        elif row.get("instructions") == "avx2" and float(row["avx512_share"]) > AVX512_SHARE:  # type: ignore[arg-type]
            beyond += 1
        elif figure in row:
            kept.setdefault(str(row["work"]), {}).setdefault(str(row["engine"]), {})[int(row["repeat"])] = float(
                row[figure]
            )  # type: ignore[call-overload]
    medians = {w: {e: statistics.median(v.values()) for e, v in of.items()} for w, of in kept.items()}
    ratios: dict[str, dict[str, dict[str, dict[str, float | None]]]] = {}
    for work, of in kept.items():
        more = MEASURE[work][1]
        for ours in (e for e in of if e.startswith("headrace")):
            for peer in (e for e in of if not e.startswith("headrace")):
                both = sorted(of[ours].keys() & of[peer].keys())
                if both:
                    pair = ratio([of[ours][r] for r in both], [of[peer][r] for r in both], more)
                    ratios.setdefault(work, {}).setdefault(ours, {})[peer] = pair
    repeats = {w: {e: len(v) for e, v in of.items()} for w, of in kept.items()}
    left_out = {"quiet_cores": quiet_cores, "left_out": disturbed, "repeats": repeats}
    return {
        "machine": machine(),
        "instructions": {"allowed": sorted(limits), "left_out_for_avx512": beyond},
        "quiet": left_out,
        "measure": {w: MEASURE[w][0] for w in kept},
        "medians": medians,
        "ratios": ratios,
    }


if __name__ == "__main__":
    main()
