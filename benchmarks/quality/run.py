"""Measure bytes, speed and loss of the formats of one model on one backend, and keep the record.

    python benchmarks/quality/run.py smollm2-135m native
    python benchmarks/quality/table.py

Weights vary with the first KV format that the backend offers, then KV with the first weights. Nothing else may run on the
machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from headrace.base.files import write_atomic
from headrace.base.host import host
from headrace.engine.launch import BACKENDS
from headrace.engine.quality.choices import built_in
from headrace.engine.quality.measure import Settings, built_in_text, measure
from headrace.spec.config import EngineConfig

RECORDS = Path(__file__).parents[1] / "records" / "quality"
WEIGHTS = {
    "native": ("auto", "bf16", "int8", "int4"),
    "torch": (
        "fp32", "bf16", "w8a8", "int8", "int8_g128", "fp8_channel", "fp8_block128", "int4_g32", "int4_g128",
        "int4_g128_asym", "nf4", "mxfp4",
    ),
}  # fmt: skip
"""Weights of a table that is still read: one per kind. All that a backend offers are measured with `--all`."""


def machine() -> dict[str, object]:
    """Where it ran."""
    known = host()
    return {
        "cpu": known["processor"],
        "cpus": len(os.sched_getaffinity(0)),
        "system": known["system"],
        "load_1m": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("backend", choices=sorted(WEIGHTS))
    parser.add_argument("--all", action="store_true", help="all weights that the backend offers")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--speed-repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=RECORDS)
    a = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    offered = BACKENDS.get(a.backend).formats()
    weights = offered.weights if a.all else [w for w in WEIGHTS[a.backend] if w in ("auto", *offered.weights)]
    formats = [(w, offered.kv[0]) for w in weights] + [(weights[0], kv) for kv in offered.kv[1:]]
    settings = Settings(tokens=a.tokens, speed_repeats=a.speed_repeats)
    before = machine()
    begin = time.time()
    report = measure(
        EngineConfig(model=a.model, backend=a.backend, threads=a.threads),
        formats,
        built_in_text(),
        "Alice's Adventures in Wonderland, chapters I to III",
        built_in(),
        settings,
        scratch=Path(tempfile.gettempdir()),
    )
    record = {
        "command": "python " + " ".join(["benchmarks/quality/run.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime(begin)),
        "seconds": round(time.time() - begin, 1),
        "machine": before,
        "settings": msgspec.to_builtins(settings),
        "report": msgspec.to_builtins(report),
    }
    path = a.out / f"{report.model}-{a.backend}.json"
    write_atomic(path, json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
