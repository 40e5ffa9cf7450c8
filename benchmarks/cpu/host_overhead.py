"""What a decode step costs besides arithmetic: wall time of a whole scheduler round less the time inside the model.

    python benchmarks/cpu/host_overhead.py --out FILE.json

In process, real scheduler, real executor, SmolLM2-135M. For the torch backend "inside" is GEMM and attention alone (its
`profile` option), so norms, rotary embedding, the KV write and sampling count as overhead; for the native backend it is
the one native call. Steps are not overlapped here, so that nothing is hidden.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path

from noise import Noise, machine

from headrace.base.clock import SystemClock
from headrace.control.config import SchedulerConfig
from headrace.control.request import Request, Sampling
from headrace.control.scheduler import Scheduler
from headrace.engine.backend import Limits
from headrace.engine.launch import BACKENDS
from headrace.spec.accounting import cache_layout
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

MODEL, STEPS, BLOCKS = "smollm2-135m", 60, 2500


def measure(name: str, batch: int) -> dict[str, object]:
    """Medians over decode steps of `batch` sequences at context of about 200."""
    profiled = name == "torch"
    config = EngineConfig(model=MODEL, backend=name, options=(("profile", "1"),) if profiled else ())
    backend = BACKENDS.get(name)
    for variable, value in getattr(backend, "environment", ()):
        os.environ.setdefault(variable, value)
    model = backend.load(locate(MODEL), config)
    layout = cache_layout(model.spec, model.kv_precision, 16)
    executor = model.executor(layout, Limits(BLOCKS, 64, 2048, 512))
    settings = SchedulerConfig(max_num_seqs=64, max_batched_tokens=512, max_model_len=2048, prefix_caching=False)
    scheduler = Scheduler(settings, layout, BLOCKS, SystemClock())
    draw = random.Random(0)
    for i in range(batch):
        prompt = tuple(draw.randrange(1000, 40_000) for _ in range(draw.randint(64, 320)))
        greedy = Sampling(max_tokens=STEPS + 40, temperature=0.0, ignore_eos=True)
        scheduler.submit(Request(request_id=str(i), prompt_token_ids=prompt, sampling=greedy))
    walls, insides, planning = [], [], []
    while len(walls) < STEPS:
        begin = time.perf_counter()
        plan = scheduler.plan()
        assert plan is not None
        planned = time.perf_counter()
        before = (model.profile.gemm_s + model.profile.attention_s) if profiled else 0.0
        result = executor.submit(plan).result()
        ran = time.perf_counter()
        scheduler.commit(plan, result)
        end = time.perf_counter()
        if all(c.length == 1 for c in plan.chunks) and len(plan.chunks) == batch:
            inside = model.profile.gemm_s + model.profile.attention_s - before if profiled else result.compute_s
            walls.append(end - begin)
            insides.append(inside)
            planning.append((planned - begin) + (end - ran))
    executor.close()
    over = [w - i for w, i in zip(walls, insides, strict=True)]
    ms = {"wall": walls, "inside": insides, "overhead": over, "plan_and_commit": planning}
    quartiles = {key: [round(q * 1e3, 3) for q in statistics.quantiles(values, n=4)] for key, values in ms.items()}
    return {"backend": name, "batch": batch, "steps": STEPS, "quartiles_ms": quartiles}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--backends", default="torch,native")
    a = p.parse_args()
    rows = []
    for name in a.backends.split(","):
        for batch in (1, 8, 32):
            with Noise([]) as noise:
                row = measure(name, batch)
            rows.append(row | {"foreign_cores": round(noise.foreign, 3)})
            print(json.dumps(rows[-1]), flush=True)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps({"machine": machine(), "model": MODEL, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
