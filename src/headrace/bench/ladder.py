"""The optimization ladder: naive → engine → one technique after another, alone and stacked, against users and context.

Every cell is a run of its own with records. The order of the steps turns round from repeat to repeat, so that a drift
of the machine hits all alike; each step starts its own server and the cache is flushed before each cell. What is known
of a step is appended to `steps.jsonl` after each cell, so that a ladder can go on in the folder where it was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.base.errors import InvalidInput
from headrace.base.files import write_atomic
from headrace.bench import quality_probe, stats
from headrace.bench.arrivals import ArrivalOptions
from headrace.bench.endpoint import Endpoint
from headrace.bench.job import finished_summary
from headrace.bench.neighbours import NOTICEABLE_CORES
from headrace.bench.records import RecordLog, read_lines
from headrace.bench.run import InvalidRun, Watch, run
from headrace.bench.rungs import Step, all_rungs, baseline_settings, steps
from headrace.bench.series import aimed
from headrace.bench.settings import RunSettings
from headrace.bench.stored import read_summary
from headrace.bench.targets import TargetSpec
from headrace.bench.targets._process import RunningTarget, TargetFailed, open_target

LADDER_FILE = "ladder.json"
STEPS_FILE = "steps.jsonl"
REFERENCE = "engine"
BASELINE = "naive"
_FIGURES = (
    ("output_tokens_per_s", "value"),
    ("requests_per_s", "value"),
    ("ttft_s", "mean"),
    ("ttft_s", "p99"),
    ("itl_s", "mean"),
    ("itl_s", "p99"),
    ("tpot_s", "mean"),
    ("e2e_s", "mean"),
)

Opener = Callable[[TargetSpec, str, Path], AbstractAsyncContextManager[RunningTarget]]


class LadderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. `users` at the first context and `contexts` at the last number of users are the cells.

    Prompts share all but `own` of their tokens. `common`: engine settings of every step (threads, context, backend).
    """

    model: str
    users: tuple[int, ...] = (1, 4, 8)
    contexts: tuple[int, ...] = (256, 1024)
    own: int = 32
    output: int = 32
    requests: int = 16
    repeats: int = 3
    weights: tuple[str, ...] = ("auto",)
    common: dict[str, str] = {}
    seed: int = 0
    only: tuple[str, ...] = ()
    run_noise: float = 0.03
    idle_wait_s: float = 0.0
    max_client_delay_s: float = 0.01

    def check(self) -> None:
        """Raise `InvalidInput` naming the option that is wrong."""
        for name in ("users", "contexts", "weights"):
            if not getattr(self, name):
                raise InvalidInput("needs at least one value", field=f"--{name}")
        for name, values in (("users", self.users), ("contexts", self.contexts)):
            if min(values) < 1:
                raise InvalidInput(f"must be at least 1, got {min(values)}", field=f"--{name}")
        for name in ("own", "output", "requests", "repeats"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"must be at least 1, got {getattr(self, name)}", field=f"--{name}")
        if min(self.contexts) <= self.own + 1:
            raise InvalidInput(f"must be above --own + 1, got {min(self.contexts)}", field="--contexts")
        known = {step.id for step in steps(all_rungs())}
        for name in self.only:
            if name not in known:
                raise InvalidInput(f"unknown step {name!r}", field="--step", remedy=", ".join(sorted(known)))

    @property
    def cells(self) -> list[tuple[int, int]]:
        """(users, context) pairs, none twice."""
        return list(
            dict.fromkeys([(u, self.contexts[0]) for u in self.users] + [(self.users[-1], c) for c in self.contexts])
        )


class StepState(msgspec.Struct, kw_only=True):
    """What is known of one step so far. status: measured, absent (the engine refuses it, `reason` says how) or failed."""

    id: str
    label: str
    stack: str
    engine: str
    weights: str
    what: str
    share: float
    settings: dict[str, str] = {}
    status: str = ""
    reason: str = ""
    info: dict[str, Any] = {}
    quality: quality_probe.Quality | None = None
    cells: dict[str, list[str]] = {}


async def climb(settings: LadderSettings, out: Path, watch: Watch, *, opener: Opener = open_target) -> dict[str, Any]:
    """Measure the ladder into `out` and return what `ladder.json` holds."""
    settings.check()
    rungs = all_rungs()
    wanted = [s for s in steps(rungs) if not settings.only or s.id in settings.only]
    plain = baseline_settings(rungs)
    states = {
        (weights, step.id): StepState(
            id=step.id, label=step.label, stack=step.stack, engine=step.rung.engine, weights=weights,
            what=step.rung.what, share=step.rung.share,
        )
        for weights in settings.weights
        for step in wanted
    }  # fmt: skip
    states |= {(s.weights, s.id): s for s in _known(out / STEPS_FILE) if (s.weights, s.id) in states}
    accepted: dict[str, Mapping[str, str]] = {}
    for weights, step in ((w, step) for w in settings.weights for step in wanted):
        _accept(accepted, step, states[weights, step.id].settings, plain)
    for repeat in range(settings.repeats):
        order = [(weights, step) for weights in settings.weights for step in wanted]
        for weights, step in order if repeat % 2 == 0 else reversed(order):
            state = states[weights, step.id]
            if state.status in ("absent", "failed") or not _missing(settings, state, repeat):
                continue
            await _step(settings, step, state, plain, accepted, repeat, out, watch, opener)
            _keep(out, state)
            _write(out, _result(settings, list(states.values()), out))
    result = _result(settings, list(states.values()), out)
    _write(out, result)
    if not any(state.status == "measured" for state in states.values()):
        raise InvalidRun("no step of the ladder could be measured: " + "; ".join(s.reason for s in states.values()))
    return result


async def _step(
    settings: LadderSettings, step: Step, state: StepState, plain: Mapping[str, str],
    accepted: dict[str, Mapping[str, str]], repeat: int, out: Path, watch: Watch, opener: Opener,
) -> None:  # fmt: skip
    """One repeat of one step: start it, look at its words once, run its cells, stop it."""
    candidates = [state.settings] if state.settings else _candidates(settings, step, state, plain, accepted)
    folder = out / f"{state.id}-{state.weights}"
    for number, candidate in enumerate(candidates):
        spec = TargetSpec(step.rung.engine, candidate)
        watch.note(f"repeat {repeat + 1}: {state.label} ({state.weights}): {spec.label}")
        try:
            async with opener(spec, settings.model, folder / f"server-{repeat + 1}.log") as running:
                state.settings, state.info = dict(candidate), running.info
                _accept(accepted, step, candidate, plain)
                await _cells(settings, state, running, repeat, folder, watch)
            state.status = "measured"
            return
        except TargetFailed as error:
            if number + 1 < len(candidates):
                continue
            said = str(error).strip().splitlines()[-1]
            state.status, state.reason = ("absent" if "headrace:" in said else "failed"), said
            watch.note(f"{state.label}: {state.status}: {said}")
        except InvalidRun as error:
            state.status, state.reason = "failed", str(error)
            watch.note(f"{state.label}: failed: {error}")
            return


def _candidates(
    settings: LadderSettings, step: Step, state: StepState, plain: Mapping[str, str],
    accepted: Mapping[str, Mapping[str, str]],
) -> list[dict[str, str]]:  # fmt: skip
    """Settings to try: a stacked step builds on the variants that were accepted for the techniques below it."""
    shared = {
        k: v
        for k, v in settings.common.items()
        if step.rung.engine == "headrace" or k in ("threads", "context", "backend")
    }
    if state.weights != "auto":
        shared["weights"] = state.weights
    if step.stack != "stacked":
        return [{**shared, **candidate} for candidate in step.candidates]
    below: dict[str, str] = dict(plain)
    for rung in all_rungs():
        if rung.technique and rung.place < step.rung.place:
            below |= accepted.get(rung.label, {})
    return [{**shared, **below, **variant} for variant in step.rung.variants]


async def _cells(
    settings: LadderSettings, state: StepState, running: RunningTarget, repeat: int, folder: Path, watch: Watch
) -> None:
    load = RunSettings(
        endpoint=Endpoint("", running.model, "completions", timeout_s=1800.0),
        workload="shared-prefix",
        seed=settings.seed,
    )
    if state.quality is None:
        state.quality = await quality_probe.probe_quality(aimed(load, running).endpoint)
    for users, context in _missing(settings, state, repeat):
        name = f"users-{users}-context-{context}-repeat-{repeat + 1}"
        requests = max(1, round(settings.requests * state.share))
        one = msgspec.structs.replace(
            aimed(load, running),
            workload_options={
                "prefix": str(context - settings.own), "isl": str(settings.own), "osl": str(settings.output),
            },
            requests=requests,
            warmup=1,
            arrivals=ArrivalOptions(concurrency=users, kind="closed"),
            salt=f"{repeat}/{users}/{context}",
            idle_wait_s=settings.idle_wait_s,
            max_client_delay_s=settings.max_client_delay_s,
        )  # fmt: skip
        summary = finished_summary(folder / name)
        if summary is None:
            await running.flush()
            summary = await run(one, folder / name, Watch(record=watch.record), headroom=False)
        if not summary["valid"]:
            raise InvalidRun(f"{name}: {'; '.join(summary['invalid_because'])}")
        state.cells.setdefault(f"{users}x{context}", []).append(str((folder / name).relative_to(folder.parent)))
        _keep(folder.parent, state)


def _missing(settings: LadderSettings, state: StepState, repeat: int) -> list[tuple[int, int]]:
    """The cells of a step that a repeat has not measured yet."""
    return [(u, c) for u, c in settings.cells if len(state.cells.get(f"{u}x{c}", ())) <= repeat]


def _accept(
    accepted: dict[str, Mapping[str, str]], step: Step, settings: Mapping[str, str], plain: Mapping[str, str]
) -> None:
    """Remember which variant of a technique the engine took: stacked steps build on it."""
    if step.stack == "alone" and settings:
        accepted[step.rung.label] = {k: v for k, v in settings.items() if plain.get(k) != v}


def _keep(out: Path, state: StepState) -> None:
    with RecordLog(out / STEPS_FILE) as log:
        log.append(state)


def _known(path: Path) -> list[StepState]:
    """The latest state of each step of an interrupted ladder."""
    if not path.exists():
        return []
    latest = {(state.weights, state.id): state for state in read_lines(path, StepState)}
    return list(latest.values())


def _result(settings: LadderSettings, states: list[StepState], out: Path) -> dict[str, Any]:
    reference = {s.weights: s.quality for s in states if s.id == REFERENCE and s.quality}
    anchor = reference.get(settings.weights[0])
    values = {id(s): _values(s, out) for s in states}
    baselines = {(s.weights, cell): found for s in states if s.id == BASELINE for cell, found in values[id(s)].items()}
    return {
        "schema": "headrace-bench-ladder/1",
        "model": settings.model,
        "settings": msgspec.to_builtins(settings),
        "host": _host_of(states, out),
        "steps": [_step_result(s, values[id(s)], baselines, anchor, settings.run_noise) for s in states],
        "notes": _notes(states, values),
        "valid": any(s.status == "measured" for s in states),
        "invalid_because": [],
    }


def _notes(states: list[StepState], values: Mapping[int, dict[str, list[dict[str, Any]]]]) -> list[str]:
    notes = ["every step runs the same executor, so that the naive loop and the engine differ in scheduling only"]
    for state in states:
        if state.status == "measured" and state.share < 1:
            notes.append(f"{state.label}: {state.share:.0%} of the requests, the rest would take too long")
        if str(state.info.get("cache_before", "")).startswith("not"):
            notes.append(f"{state.label}: cache between cells {state.info['cache_before']}")
    foreign = [s.get("foreign_cores") or 0.0 for cells in values.values() for runs in cells.values() for s in runs]
    if foreign and max(foreign) >= NOTICEABLE_CORES:
        busy = sum(cores >= NOTICEABLE_CORES for cores in foreign)
        notes.append(f"other programs used up to {max(foreign):.2f} cores in {busy} of {len(foreign)} runs")
    return notes


def _values(state: StepState, out: Path) -> dict[str, list[dict[str, Any]]]:
    """Summaries of each cell's repeats."""
    return {cell: [read_summary(out / folder) for folder in folders] for cell, folders in state.cells.items()}


def _step_result(
    state: StepState, cells: dict[str, list[dict[str, Any]]],
    baselines: Mapping[tuple[str, str], list[dict[str, Any]]], anchor: quality_probe.Quality | None, noise: float,
) -> dict[str, Any]:  # fmt: skip
    found = msgspec.to_builtins(state)
    found["cells"] = []
    for cell, summaries in cells.items():
        users, context = cell.split("x")
        entry: dict[str, Any] = {"users": int(users), "context": int(context), "repeats": len(summaries)}
        entry["folders"] = state.cells[cell]
        for key, statistic in _FIGURES:
            values = [s[key][statistic] for s in summaries if s.get(key)]
            if values:
                mean = stats.mean_interval(np.array(values))
                name = key if statistic == "value" else f"{key.removesuffix('_s')}_{statistic}_s"
                entry[name] = {"value": mean.value, "low": mean.low, "high": mean.high}
        foreign = [s["foreign_cores"] for s in summaries if s.get("foreign_cores") is not None]
        entry["foreign_cores"] = max(foreign) if foreign else None
        usage = [s["kv_use"]["peak"] for s in summaries if s.get("kv_use")]
        entry["kv_peak"] = float(np.mean(usage)) if usage else None
        hits = [s["prefix_hit"]["share"] for s in summaries if s.get("prefix_hit")]
        entry["prefix_hit"] = float(np.mean(hits)) if hits else None
        base = baselines.get((state.weights, cell))
        if base and state.id == BASELINE:
            entry["speedup"] = {"value": 1.0, "low": 1.0, "high": 1.0, "basis": "what the others are compared with"}
        elif base:
            a, b = (np.array([s["output_tokens_per_s"]["value"] for s in side]) for side in (base, summaries))
            ratio = stats.unpaired(a, b, noise, float(np.hypot(_log_half(base[0]), _log_half(summaries[0]))))
            entry["speedup"] = {"value": ratio.ratio, "low": ratio.low, "high": ratio.high, "basis": ratio.basis}
        found["cells"].append(entry)
    if state.quality is not None and anchor is not None:
        change = quality_probe.compare(anchor, state.quality)
        found["quality_change"] = {
            "equal_share": change.equal_share,
            "words_until_different": change.words_until_different,
            "perplexity": state.quality.perplexity,
            "perplexity_ratio": change.perplexity_ratio,
        }
    return dict(found)


def _log_half(summary: dict[str, Any]) -> float:
    """Half width, on the log scale, of the interval that the bootstrap within a run gives its throughput."""
    found = summary["output_tokens_per_s"]
    return float(np.log(found["high"] / found["low"])) / 2 if found["low"] > 0 else 0.0


def _host_of(states: list[StepState], out: Path) -> dict[str, Any]:
    for state in states:
        for folders in state.cells.values():
            return dict(read_summary(out / folders[0]).get("host", {}))
    return {}


def _write(out: Path, result: dict[str, Any]) -> None:
    write_atomic(out / LADDER_FILE, msgspec.json.format(msgspec.json.encode(result), indent=1))
