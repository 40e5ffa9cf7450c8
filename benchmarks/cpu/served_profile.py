"""Where the CPU time of a server goes while one of the comparison's works runs, by samples of its processes.

    python benchmarks/cpu/served_profile.py --out FILE.json [--work c8] [--seconds 20] [--kernels avx2] [--extension FOLDER]

Samples are of the processes' own CPU time (`perf record -e cpu-clock`), so that other programs disturb little. FOLDER holds a
`headrace_native` with its symbols, which wheels are built without: `cmake -S native -B BUILD -DCMAKE_BUILD_TYPE=RelWithDebInfo`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from client import drive
from engines import Engine, headrace
from noise import family, machine
from works import WORKS, corpus

# what a symbol of the extension belongs to, the first that fits
PARTS = (
    ("attention", r"attend|::attention|merge_segments"),
    ("rounding activations", r"::quantize|::extremes"),
    ("products", r"rows_of|few_rows|four_rows|tiles?_of|add_group|float_tile|gemm|unpack|Model::ahead"),
    ("waiting and handing out items", r"::Pool::(worker|wait_for_items|start|pull|push)"),
)


def part_of(library: str, symbol: str) -> str:
    if "_native" in library:
        return next((name for name, pattern in PARTS if re.search(pattern, symbol)), "rows, norms and the rest")
    if "kernel" in library:
        return "the kernel"
    return "Python and its libraries"


def sampled(engine: Engine, work: str, seconds: float) -> dict[str, object]:
    """Drive the work over and over while `perf` looks, after one round that nobody looks at."""
    ids = corpus()
    asyncio.run(drive(engine.port, engine.api, engine.model, WORKS[work](ids, 0)))
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/perf.data"
        pids = ",".join(str(p.pid) for p in family(engine.pid))
        perf = subprocess.Popen(["perf", "record", "-q", "-e", "cpu-clock", "-F", "997", "-p", pids, "-o", data])
        begin, repeat = time.monotonic(), 1
        while time.monotonic() - begin < seconds:
            asyncio.run(drive(engine.port, engine.api, engine.model, WORKS[work](ids, repeat)))
            repeat += 1
        perf.send_signal(2)
        perf.wait()
        report = [
            "perf",
            "report",
            "-i",
            data,
            "--stdio",
            "-q",
            "-t",
            "|",
            "-F",
            "overhead,comm,dso,symbol",
            "-w",
            "0,0,0,0",
        ]
        lines = subprocess.run(report, capture_output=True, text=True, check=True).stdout.splitlines()
    parts: Counter[str] = Counter()
    symbols = []
    for line in lines:
        fields = [field.strip() for field in line.split("|")]
        if len(fields) < 4 or not fields[0].endswith("%"):
            continue
        share, library, symbol = float(fields[0][:-1]), fields[2], fields[3]
        parts[part_of(library, symbol)] += share
        symbols.append({"percent": share, "thread": fields[1], "library": library, "symbol": symbol[:160]})
    found = {name: round(share, 1) for name, share in parts.most_common()}
    return {"rounds": repeat - 1, "percent": found, "symbols": symbols[:60]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", default="c8", choices=tuple(WORKS))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--extension", type=Path, help="folder with a headrace_native that has symbols")
    a = parser.parse_args()
    engine = headrace("native")
    engine.command += ["--option", f"kernels={a.kernels}"]
    if a.extension is not None:
        engine.env["PYTHONPATH"] = os.pathsep.join([str(a.extension), os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        )
    with tempfile.TemporaryDirectory() as logs:
        try:
            engine.start(Path(logs))
            found = sampled(engine, a.work, a.seconds)
        finally:
            engine.stop()
    record = {"command": " ".join(sys.argv), "machine": machine(), "work": a.work, "kernels": a.kernels} | found
    a.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(found["percent"], indent=1))


if __name__ == "__main__":
    main()
