"""Fill the speed column of the records of `run.py`: one sequence alone, a prompt of one window and a greedy answer.

    python benchmarks/quality/speed.py --limit-s 460

Nothing else may run on the machine meanwhile. Formats that have a speed are left as they are (`--again`: measured again), and
no further format is begun after `--limit-s` seconds; the same command then goes on. Each record says when its speeds were
measured, on how many threads and beside what load.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.files import write_atomic
from headrace.base.host import host
from headrace.engine.quality.measure import Settings, built_in_text, measure_speed, unquantized
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

RECORDS = Path(__file__).parents[1] / "records" / "quality"
ANSWERS = {"native": (64, 5), "torch": (12, 3)}
"""Tokens of the answer and repeats: torch dequantizes every matrix in every step, so that few tokens take as long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-s", type=float, default=460.0)
    parser.add_argument("--again", action="store_true", help="measure also what has a speed")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--records", type=Path, default=RECORDS)
    a = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    begin = time.monotonic()
    paths = [*sorted(a.records.glob("*-native.json")), *sorted(a.records.glob("*-torch.json"))]
    rows = [(path, i + 1) for path in paths for i in range(len(json.loads(path.read_text())["report"]["formats"]))]
    rows += [(path, 0) for path in paths]  # references are nobody's choice, so they come last
    for path, i in rows:
        record = json.loads(path.read_text())
        row = [record["report"]["unquantized"], *record["report"]["formats"]][i]
        if row["speed"] is not None and not a.again:
            continue
        if time.monotonic() - begin > a.limit_s:
            raise SystemExit(f"{a.limit_s:.0f} s are over; {path.name} and what follows are not complete")
        logging.info("%s %s / %s", path.name, row["asked_weights"], row["asked_kv"])
        fill(record, row, reference=i == 0, threads=a.threads)
        write_atomic(path, json.dumps(record, indent=1) + "\n")
        gc.collect()


def fill(record: dict[str, Any], row: dict[str, Any], *, reference: bool, threads: int) -> None:
    """Measure `row` of `record` and note in the record how."""
    agreement, repeats = ANSWERS[row["backend"]]
    settings = replace(Settings(**record["settings"]), agreement=agreement, speed_repeats=repeats)
    config = EngineConfig(
        model=record["model"], backend=row["backend"], weights=row["asked_weights"], kv=row["asked_kv"], threads=threads
    )
    if reference:
        config = unquantized(config, locate(config.model), row["backend"])[0]
    load = os.getloadavg()[0]
    row["speed"] = msgspec.to_builtins(measure_speed(config, built_in_text(), settings))
    here = host()
    now = {
        "command": "python " + " ".join(["benchmarks/quality/speed.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "threads": threads,
        "machine": {"cpu": here["processor"], "system": here["system"], "cpus": len(os.sched_getaffinity(0))},
    }
    before = record["speed"] or {"load_1m": []}
    record["speed"] = now | {"load_1m": [*before["load_1m"], round(load, 2)]}


if __name__ == "__main__":
    main()
