"""Run the GPU comparison's requests on Headrace's engine in this process: `run.py MODEL [FIELD=VALUE …] [part …]`; one JSON line
a result. `FIELD=VALUE` sets a field of `EngineConfig`, say weights=fp8_channel kv=fp8.

Parts: mixed single ttft uniform prefix (default: all), stall, loops, host, submit, profile, steps; after `round` other prompts
are drawn. Token ids in and out, greedy, EOS ignored. Beside a result stands what the planner predicts for it (`planned`: value,
low, high), where it can.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import statistics
import sys
import time
import uuid

from requests_gpu import Ask, mixed, prefix, single

from headrace.base.process import process_start_s
from headrace.control.request import Request, Sampling
from headrace.engine.inprocess import InProcessEngine
from headrace.engine.launch import launch
from headrace.spec.config import EngineConfig

LOOPS = (
    # prompt, answer, in flight, rounds
    (128, 128, 1, 10),
    (4096, 64, 1, 8),
    (16384, 32, 1, 5),
    (1024, 128, 8, 10),
    (512, 128, 64, 10),
    (4096, 128, 32, 3),
    (256, 64, 256, 5),
)


def report(**fields) -> None:
    print("RES", json.dumps(fields), flush=True)


def planned(config: EngineConfig, isl: int, osl: int, concurrency: int) -> dict[str, list[float]]:
    """What `headrace plan` predicts for such requests on one H200."""
    from headrace.plan.deployment import Inputs
    from headrace.plan.perf import perf

    found = perf(
        Inputs(
            model=config.model, gpu="h200", engine="headrace", weights="bf16" if config.weights == "auto" else config.weights,
            kv=config.kv, max_model_len=20480, max_num_seqs=256, isl=isl, osl=osl, concurrency=concurrency,
        )
    )  # fmt: skip
    figures = {"ttft_ms": found.ttft_ms, "tpot_ms": found.tpot_ms, "out_tok_s": found.output_tokens_per_s}
    return {name: [round(v, 2) for v in (f.value, f.low, f.high)] for name, f in figures.items()}


class Bench:
    def __init__(self, model: str, **options) -> None:
        self.config = EngineConfig(model=model, backend="cuda", **options)
        self.salt = 0  # added to the requests' seeds, so that no round finds another's prompts in the prefix cache
        self.core = launch(self.config)
        self.engine = InProcessEngine(self.core)
        info = self.core.info
        report(step="ready", s=round(time.monotonic() - process_start_s(), 2), startup=info.startup_s, notes=info.notes)
        report(
            step="memory",
            items=[(m.name, m.predicted_bytes, m.actual_bytes) for m in info.memory],
            blocks=info.num_blocks,
        )

    def generate(self, asks: list[Ask], *, stamps: bool = False) -> tuple[float, list[list[float]]]:
        """Seconds until all are answered, and when each token of each answer came."""
        arrived: queue.SimpleQueue = queue.SimpleQueue()
        tag = uuid.uuid4().hex[:8]
        requests = [
            Request(
                request_id=f"{tag}-{i}",
                prompt_token_ids=tuple(prompt),
                sampling=Sampling(max_tokens=count, temperature=0.0, ignore_eos=True),
            )
            for i, (prompt, count) in enumerate(asks)
        ]
        times: dict[str, list[float]] = {r.request_id: [] for r in requests}
        counts, open_requests = dict.fromkeys(times, 0), len(requests)
        begin = time.perf_counter()
        for request in requests:
            self.engine.submit(request, arrived.put)
        while open_requests:
            output = arrived.get()
            counts[output.request_id] += len(output.token_ids)
            if stamps:
                times[output.request_id] += [time.perf_counter() - begin] * len(output.token_ids)
            if output.finish is not None:
                assert output.finish.error is None, output.finish.error
                open_requests -= 1
        seconds = time.perf_counter() - begin
        assert [counts[r.request_id] for r in requests] == [count for _, count in asks]
        return seconds, list(times.values())

    def warm(self) -> None:
        report(step="warm", s=round(self.generate(mixed(32, seed=99, output=(16, 32)))[0], 2))
        self.generate([(single(300 + k, 77 + k), 3) for k in range(3)])

    def mixed(self, repeats: int = 2) -> None:
        for repeat in range(repeats):
            asks = mixed(256, seed=10 + repeat + self.salt)
            s = self.generate(asks)[0]
            out = sum(n for _, n in asks)
            report(
                step="mixed256",
                s=round(s, 3),
                in_tok=sum(len(p) for p, _ in asks),
                out_tok=out,
                out_tok_s=round(out / s, 1),
                planned=planned(self.config, 576, 320, 256),
            )

    def single(self, repeats: int = 2) -> None:
        for length in (128, 2048, 16384):
            first = [self.generate([(single(length, length * 1000 + 100 + k + self.salt), 1)])[0] for k in range(3)]
            whole = [
                self.generate([(single(length, length * 1000 + 200 + k + self.salt), 257)])[0] for k in range(repeats)
            ]
            ttft = statistics.median(first)
            itl = [1e3 * (w - ttft) / 256 for w in whole]
            report(
                step="single",
                ctx=length,
                ttft_ms=round(1e3 * ttft, 2),
                itl_ms=round(statistics.median(itl), 4),
                all=itl,
                planned=planned(self.config, length, 257, 1),
            )

    def ttft(self) -> None:
        for length in (1024, 4096, 16384):
            all_s = [self.generate([(single(length, length * 1000 + 300 + k + self.salt), 1)])[0] for k in range(5)]
            report(
                step="ttft",
                prompt=length,
                ms=round(1e3 * statistics.median(all_s), 2),
                all=[round(1e3 * s, 2) for s in all_s],
                planned=planned(self.config, length, 1, 1),
            )

    def uniform(self) -> None:
        for batch in (8, 32, 64, 128, 256):
            first = self.generate([(single(512, 1000 + batch * 300 + k + self.salt), 1) for k in range(batch)])[0]
            whole = self.generate([(single(512, 500000 + batch * 300 + k + self.salt), 257) for k in range(batch)])[0]
            report(
                step="uniform", B=batch, prefill_s=round(first, 4), prefill_tok_s=round(512 * batch / first),
                step_ms=round(1e3 * (whole - first) / 256, 3), decode_tok_s=round(256 * batch / (whole - first), 1),
                planned=planned(self.config, 512, 257, batch),
            )  # fmt: skip

    def prefix(self) -> None:
        for name, seed in (("first", 2), ("again", 2), ("first", 3)):
            s = self.generate(prefix(seed=seed + self.salt))[0]
            report(step="prefix64", cache=name, s=round(s, 3), out_tok_s=round(64 * 128 / s, 1))

    def loops(self) -> None:
        """Closed loops: a number of unrelated requests of one length always in flight, each replaced as it ends, as public
        benchmarks do it. Means over all requests: what the planner is calibrated on (`headrace plan refit`)."""
        for place, (prompt, answer, in_flight, rounds) in enumerate(LOOPS):
            total = in_flight * rounds
            asks = [tuple(single(prompt, 40_000_000 + 1_000_000 * place + k + self.salt)) for k in range(total)]
            arrived: queue.SimpleQueue = queue.SimpleQueue()
            tag = uuid.uuid4().hex[:8]
            stamps: dict[str, list[float]] = {}  # handed over, first token, last token

            def submit(k: int, asks=asks, tag=tag, stamps=stamps, arrived=arrived, answer=answer) -> None:
                sampling = Sampling(max_tokens=answer, temperature=0.0, ignore_eos=True)
                request = Request(request_id=f"{tag}-{k}", prompt_token_ids=asks[k], sampling=sampling)
                stamps[request.request_id] = [time.perf_counter()]
                self.engine.submit(request, arrived.put)

            begin = time.perf_counter()
            for k in range(in_flight):
                submit(k)
            sent, left = in_flight, total
            while left:
                output = arrived.get()
                of = stamps[output.request_id]
                if output.token_ids:
                    of[1:] = [*of[1:2], time.perf_counter()] if len(of) > 1 else [time.perf_counter()] * 2
                if output.finish is not None:
                    assert output.finish.error is None, output.finish.error
                    left -= 1
                    if sent < total:
                        submit(sent)
                        sent += 1
            seconds = time.perf_counter() - begin
            report(
                step="loop", isl=prompt, osl=answer, concurrency=in_flight, requests=total, s=round(seconds, 3),
                ttft_ms=round(1e3 * statistics.mean(b - a for a, b, _ in stamps.values()), 3),
                tpot_ms=round(1e3 * statistics.mean((c - b) / (answer - 1) for _, b, c in stamps.values()), 4),
                out_tok_s=round(total * answer / seconds, 1),
                planned=planned(self.config, prompt, answer, in_flight),
            )  # fmt: skip

    def round(self) -> None:
        self.salt += 10_000_000

    def stall(self) -> None:
        """ITL of 64 running streams while a 16k prompt is prefilled, beside their undisturbed time before it."""
        arrived: queue.SimpleQueue = queue.SimpleQueue()
        tag = uuid.uuid4().hex[:8]

        def submit(name: str, prompt: list[int], count: int) -> None:
            sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
            self.engine.submit(
                Request(request_id=f"{tag}-{name}", prompt_token_ids=tuple(prompt), sampling=sampling), arrived.put
            )

        streams = [f"s{k}" for k in range(64)]
        for k, name in enumerate(streams):
            submit(name, single(512, 900000 + k), 400)
        stamps: dict[str, list[float]] = {name: [] for name in [*streams, "long"]}
        left, asked, first = 65, None, None
        while left:
            output = arrived.get()
            now, name = time.perf_counter(), output.request_id.split("-")[1]
            stamps[name] += [now] * len(output.token_ids)
            left -= output.finish is not None
            if name == "long":
                first = now
            if asked is None and min(len(stamps[n]) for n in streams) >= 150:
                asked = now
                submit("long", single(16384, 4242), 1)
        gaps = [(a, b) for n in streams for a, b in itertools.pairwise(stamps[n])]
        settled = max(stamps[n][20] for n in streams)
        calm = sorted(b - a for a, b in gaps if a >= settled and b <= asked)
        during = sorted(b - a for a, b in gaps if b > asked and a < first)
        p99 = lambda v: 1e3 * v[int(0.99 * (len(v) - 1))]  # noqa: E731
        report(
            step="stall",
            quiet_p99_ms=round(p99(calm), 2),
            loud_p50_ms=round(1e3 * statistics.median(during), 2),
            loud_p99_ms=round(p99(during), 2),
            ratio=round(p99(during) / p99(calm), 2),
            prompt_s=round(first - asked, 3),
            gaps=[len(calm), len(during)],
        )

    def steps(self) -> None:
        """Where the time of mixed256 goes: device time of its steps by kind, and the time in which none was running."""
        executor, real = self.core.executor, self.core.executor.submit
        seen: list[tuple[int, int, object]] = []

        def recorded(plan):
            step = real(plan)
            prompt = sum(c.length for c in plan.chunks if c.length > 1)
            seen.append((sum(c.length == 1 for c in plan.chunks), prompt, step))
            return step

        executor.submit = recorded
        wall = self.generate(mixed(256, seed=77))[0]
        executor.submit = real
        kinds: dict[str, list[float]] = {}
        for rows, prompt, step in seen:
            size = next(n for n in (8, 16, 32, 64, 96, 128, 192, 256) if rows <= n)
            long = next((f"{n} prompt tokens" for n in (512, 2048, 10**9) if 0 < prompt <= n), "")
            kinds.setdefault(f"mixed up to {long}" if prompt else f"decode up to {size}", []).append(
                step.result().compute_s
            )
        total = sum(map(sum, kinds.values()))
        idle = [
            (a.events[1].elapsed_time(b.events[0]), i, rows, prompt)
            for i, ((_, _, a), (rows, prompt, b)) in enumerate(itertools.pairwise(seen))
        ]
        report(
            step="steps", idle_ms=round(sum(i for i, *_ in idle), 1), 
            idle_median_ms=round(statistics.median(i for i, *_ in idle), 3),
            longest_idle=[(round(ms, 2), *rest) for ms, *rest in sorted(idle)[-8:]],
            wall_s=round(wall, 3), device_s=round(total, 3), steps=len(seen),
            kinds={k: (len(v), round(sum(v), 3), round(1e3 * statistics.median(v), 2)) for k, v in sorted(kinds.items())},
        )  # fmt: skip

    def submit(self) -> None:
        """Host time of launching a step, by its number of tokens, on the engine's own thread."""
        executor, real = self.core.executor, self.core.executor.submit
        seen: dict[str, list[float]] = {}

        def timed(plan):
            begin = time.perf_counter()
            step = real(plan)
            longest = max((c.length for c in plan.chunks), default=0)
            kind = "decode" if longest <= 1 else "mixed"
            seen.setdefault(f"{kind} {len(plan.chunks)}", []).append(1e3 * (time.perf_counter() - begin))
            return step

        executor.submit = timed
        self.generate([(single(600, 1234), 60)])
        self.generate([(single(64, 777000 + k), 60) for k in range(64)])
        executor.submit = real
        medians = {k: (len(v), round(statistics.median(v), 3), round(min(v), 3)) for k, v in seen.items()}
        report(step="submit", host_ms=medians)

    def profile(self) -> None:
        """Device time of a step by kind of kernel, beside the floor of the bytes and operations of just these steps."""
        import torch

        from headrace.engine.cuda.timeline import profiled
        from headrace.engine.roofline import ceilings, floors
        from headrace.spec.locate import locate

        shared = "shared 2048"
        cases = (
            (1, 128, 40),
            (8, 512, 40),
            (64, 512, 40),
            (256, 512, 24),
            (1, 16384, 24),
            (1, 4096, 1),
            (1, 16384, 1),
            (64, shared, 40),
        )
        info, card = self.core.info, ceilings(torch.cuda.get_device_name())
        spec = locate(self.config.model).spec()
        executor, real = self.core.executor, self.core.executor.submit
        computed: list = []

        def recorded(plan):
            if plan.chunks:
                computed.append(plan.chunks)
            return real(plan)

        for place, (batch, prompt, count) in enumerate(cases):
            if prompt == shared:
                asks = [(p, count) for p, _ in prefix(seed=77)]
            else:
                # Prompts of their own: a prefix cache must not answer one case with another's.
                asks = [(single(prompt, 3_000_000 + 1000 * place + k), count) for k in range(batch)]
            if count > 1:
                self.generate([(p, 1) for p, _ in asks])
            computed.clear()
            executor.submit = recorded
            kinds, span = profiled(lambda a=asks: self.generate(a), 1)
            executor.submit = real
            steps = len(computed)
            least: dict[str, float] = {}
            for chunks in computed:
                for kind, us in floors(spec, info.weights_precision, info.kv_precision, chunks, card).items():
                    least[kind] = least.get(kind, 0.0) + us / steps
            report(
                step="profile", B=batch, prompt=prompt, steps=steps, span_us=round(span / steps, 1),
                busy_us=round(sum(k.us for k in kinds) / steps, 1),
                kinds={k.kind: (round(k.us / steps, 1), round(k.launches / steps, 1)) for k in kinds},
                floors_us={k.kind: round(least[k.kind], 1) for k in kinds if k.kind in least},
                names={n: round(t / steps, 1) for k in kinds for n, t in k.names.items() if t / steps > 20},
            )  # fmt: skip

    def host(self) -> None:
        """Wall time per step beside the device's own time."""
        for batch in (1, 64):
            before = self.engine.stats
            asks = [(single(128, 700000 + batch * 300 + k), 400) for k in range(batch)]
            self.generate([(p, 1) for p, _ in asks])
            before = self.engine.stats
            s = self.generate([(single(128, 710000 + batch * 300 + k), 400) for k in range(batch)])[0]
            after = self.engine.stats
            steps = after.steps - before.steps
            device = (after.compute_s - before.compute_s) / steps
            report(
                step="host", B=batch, steps=steps, wall_ms=round(1e3 * s / steps, 4), device_ms=round(1e3 * device, 4)
            )


def value(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def main(model: str, words: list[str]) -> None:
    options: dict[str, object] = {"max_model_len": 20480, "max_num_seqs": 256, "memory_fraction": 0.88}
    options |= {k: value(v) for k, v in (w.split("=", 1) for w in words if "=" in w)}
    parts = [w for w in words if "=" not in w]
    bench = Bench(model, **options)
    bench.warm()
    for part in parts or ["mixed", "single", "ttft", "uniform", "prefix"]:
        getattr(bench, part)()
    report(step="done", stats=str(bench.engine.stats))
    bench.engine.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
