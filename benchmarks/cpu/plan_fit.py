"""How fast the planner's page is answered: memory plans and times over HTTP, as a browser asks for them.

    python benchmarks/cpu/plan_fit.py --out FILE.json

`headrace plan web` is started and every model of the catalog is asked for on H200 cards (eight, or as many as divide its heads), after
the options that a browser loads first. `first`: a model that was not asked for before; `again`: the same with another
context, which is what a change in the form sends.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from noise import Noise, machine

GPU, COUNTS, CONTEXTS = "h200-sxm-141", (8, 4, 2, 1), {"first": 8192, "again": 16_384}


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def start(port: int) -> subprocess.Popen[bytes]:
    """The page's server, once it answers."""
    program = "from headrace.cli.main import main; main()"
    server = subprocess.Popen([sys.executable, "-c", program, "plan", "web", "--port", str(port)])
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).read()
            return server
        except urllib.error.URLError:
            time.sleep(0.1)
    server.kill()
    raise SystemExit("the page does not answer")


def ask(base: str, what: str, model: str, context: int) -> float:
    """Milliseconds until the answer is there, on the largest number of cards that the model can be cut over."""
    for count in COUNTS:
        query = urlencode({"model": model, "gpu": GPU, "n_gpus": count, "context": context, "concurrency": 16})
        began = time.perf_counter()
        try:
            get(f"{base}api/{what}?{query}")
            return (time.perf_counter() - began) * 1e3
        except urllib.error.HTTPError as error:
            if error.code != 400 or count == 1:
                raise
    raise AssertionError


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server, base = start(port), f"http://127.0.0.1:{port}/"
    try:
        models = get(f"{base}api/options")["models"]
        rows = []
        for what in ("fit", "perf"):
            for when, context in CONTEXTS.items():
                with Noise([server.pid]) as noise:
                    ms = [ask(base, what, model, context) for model in models]
                slowest = max(range(len(ms)), key=ms.__getitem__)
                row = {
                    "asked": what,
                    "when": when,
                    "models": len(ms),
                    "median_ms": round(statistics.median(ms), 2),
                    "p95_ms": round(sorted(ms)[len(ms) * 95 // 100], 2),
                    "max_ms": round(ms[slowest], 2),
                    "slowest": models[slowest],
                    "foreign_cores": round(noise.foreign, 3),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    finally:
        server.terminate()
        server.wait(20)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
