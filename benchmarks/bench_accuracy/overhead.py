"""What the client itself adds, against the rate of streamed events: the golden server's write to the client's stamp.

python benchmarks/bench_accuracy/overhead.py --out DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
import uvloop

from headrace.base.host import host
from headrace.bench.endpoint import Endpoint
from headrace.bench.headroom import Load, prove
from headrace.bench.neighbours import Neighbours, wait_until_idle
from headrace.bench.run import run_golden
from headrace.bench.settings import RunSettings

RATES = (250, 500, 1000, 2000, 4000)
CONCURRENCY = 16


async def measure(rate: int, processes: int) -> dict[str, object]:
    """16 streams whose tokens come at `rate` events per second in all."""
    settings = RunSettings(
        endpoint=Endpoint("", "golden"), workload="random", processes=processes, max_client_delay_s=0.002
    )
    load = Load(ttft_s=0.05, itl_s=CONCURRENCY / rate, output_tokens=max(8, rate // 16), prompt_tokens=128)
    found = await prove(settings, load, CONCURRENCY, None, run_golden)
    return {"asked_events_per_s": rate, **msgspec.to_builtins(found)}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--idle-wait", type=float, default=0.0, help="seconds to wait at most for the host to be idle")
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    results = []
    for repeat in range(a.repeats):
        for rate in RATES if repeat % 2 == 0 else reversed(RATES):
            if a.idle_wait:
                await wait_until_idle(a.idle_wait)
            neighbours = Neighbours()
            results.append({"repeat": repeat, **await measure(rate, 1), "foreign_cores": neighbours.cores()})
            r = results[-1]
            print(
                f"{rate:5d}/s: p50 {r['delay_p50_s'] * 1e3:.2f} ms, p99 {r['delay_p99_s'] * 1e3:.2f} ms, "
                f"server late p99 {r['golden_late_p99_s'] * 1e3:.2f} ms, {r['events_per_s']:.0f} events/s",
                flush=True,
            )
    lines = ["| events/s | added p50, ms | added p99, ms (range) | below 2 ms |", "|---|---|---|---|"]
    for rate in RATES:
        mine = [r for r in results if r["asked_events_per_s"] == rate]
        p50 = sorted(r["delay_p50_s"] * 1e3 for r in mine)
        p99 = sorted(r["delay_p99_s"] * 1e3 for r in mine)
        below = sum(value < 2.0 for value in p99)
        lines.append(
            f"| {rate} | {p50[len(p50) // 2]:.2f} | {p99[len(p99) // 2]:.2f} ({p99[0]:.2f} – {p99[-1]:.2f}) "
            f"| {below} of {len(p99)} |"
        )
    a.out.mkdir(parents=True, exist_ok=True)
    record = {
        "command": f"python benchmarks/bench_accuracy/overhead.py --repeats {a.repeats}",
        "host": host(),
        "note": "best of up to three attempts each, as the headroom check takes it; server and client on the same cores",
        "results": results,
    }
    (a.out / "overhead.json").write_text(json.dumps(record, indent=1))
    (a.out / "overhead.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    uvloop.run(main())
