"""Measure bytes and loss of the formats of one model on one backend, and keep the record. Speed is `speed.py`'s.

    python benchmarks/quality/run.py smollm2-135m native
    python benchmarks/quality/speed.py
    python benchmarks/quality/table.py

Weights vary with the first KV format that the backend offers, then KV with the first weights. Losses do not depend on what
else the machine does. The record is written after every format; the same command measures what is missing in it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.files import write_atomic
from headrace.base.host import host
from headrace.engine.launch import BACKENDS
from headrace.engine.quality.choices import built_in
from headrace.engine.quality.measure import Settings, built_in_text, measure
from headrace.engine.quality.report import QualityReport
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

RECORDS = Path(__file__).parents[1] / "records" / "quality"
TEXT = "Alice's Adventures in Wonderland, chapters I to III"
WEIGHTS = {
    "native": ("auto", "bf16", "int8", "int4"),
    "torch": (
        "fp32", "bf16", "w8a8", "int8", "int8_g128", "fp8_channel", "fp8_block128", "int4_g32", "int4_g128",
        "int4_g128_asym", "nf4", "mxfp4",
    ),
}  # fmt: skip
"""Weights of a table that is still read: one per kind. All that a backend offers are measured with `--all`."""
SETTINGS = Settings(window=384, stride=320, tokens=4096, prompts=24, prompt_tokens=48, agreement=48)
"""Windows overlap little: half the time for the same number of scored tokens."""

Format = dict[str, Any]


def same(a: Format, b: Format) -> bool:
    """Whether two reports have one reference: its perplexity is equal but for the order of sums, which threads change."""
    one, other = (r["unquantized"]["perplexity"]["value"] for r in (a, b))
    return abs(one / other - 1) < 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("backend", choices=sorted(WEIGHTS))
    parser.add_argument("--all", action="store_true", help="all weights that the backend offers")
    parser.add_argument("--weights", nargs="*", help="these instead")
    parser.add_argument("--kv", nargs="*", help="these besides the first, instead of all that the backend offers")
    parser.add_argument("--tokens", type=int, default=SETTINGS.tokens)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=RECORDS)
    a = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    offered = BACKENDS.get(a.backend).formats()
    weights = a.weights or (
        offered.weights if a.all else [w for w in WEIGHTS[a.backend] if w in ("auto", *offered.weights)]
    )
    more = offered.kv[1:] if a.kv is None else a.kv
    formats = [(w, offered.kv[0]) for w in weights] + [(weights[0], kv) for kv in more]
    settings = replace(SETTINGS, tokens=a.tokens)
    path = a.out / f"{locate(a.model).name}-{a.backend}.json"
    before = json.loads(path.read_text()) if path.exists() else None
    known: list[Format] = before["report"]["formats"] if before else []
    if before and before["settings"] != msgspec.to_builtins(settings):
        raise SystemExit(f"{path} has other settings; remove it or name another folder with --out")
    missing = [f for f in formats if f not in {(k["asked_weights"], k["asked_kv"]) for k in known}]
    if not missing:
        print(f"{path} has them all")
        return
    here = host()
    command = "python " + " ".join(["benchmarks/quality/run.py", *sys.argv[1:]])
    begin = time.time()

    def keep(report: QualityReport) -> None:
        new = msgspec.to_builtins(report)
        if before and not same(before["report"], new):
            raise SystemExit(f"the reference of {path} had another perplexity; it cannot be continued")
        if before:
            new["unquantized"] = before["report"]["unquantized"]
        place = {f: i for i, f in enumerate(formats)}
        rows = sorted(
            [*known, *new["formats"]], key=lambda r: place.get((r["asked_weights"], r["asked_kv"]), len(formats))
        )
        run = {
            "command": command,
            "date": time.strftime("%Y-%m-%d", time.gmtime(begin)),
            "seconds": round(time.time() - begin, 1),
            "machine": {"cpu": here["processor"], "system": here["system"]},
        }
        record = {
            "model": a.model,
            "runs": [*(before["runs"] if before else []), run],
            "settings": msgspec.to_builtins(settings),
            "report": new | {"formats": rows},
            "speed": before["speed"] if before else None,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(record, indent=1) + "\n")

    measure(
        EngineConfig(model=a.model, backend=a.backend, threads=a.threads),
        missing,
        built_in_text(),
        TEXT,
        built_in(),
        settings,
        scratch=Path(tempfile.gettempdir()),
        each=keep,
    )
    print(path)


if __name__ == "__main__":
    main()
