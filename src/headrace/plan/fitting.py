"""Fitting the roofline's efficiencies to measured points, and the intervals from what the fit gets wrong.

A mixed-effects fit in logarithms: shared physical parameters (per engine and generation), plus offsets of each group of
runs (a campaign, a family on an engine, an engine build, a card: `group_names`), all drawn towards zero. Offsets absorb what is
peculiar to one measuring campaign, so that it does not bend the physics; a family never measured gets none of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np

from headrace.plan.calibration import (
    EFFECTS,
    METRICS,
    Band,
    Calibration,
    CalibrationSet,
    Effects,
    Fold,
    Tier,
    group_names,
    key_of,
)
from headrace.plan.closed_loop import Loop, Times, closed_loop
from headrace.plan.costs.roofline import (
    BASE,
    CEILING,
    ENGINE_TERMS,
    FRACTIONS,
    GENERATION_TERMS,
    Efficiency,
    Peaks,
    fastest_seconds,
    kernel_path,
    terms,
)
from headrace.plan.costs.work import Work
from headrace.plan.deployment import resolve
from headrace.plan.neighbours import (
    CONTRADICTED,
    LARGEST,
    NOISE,
    ROUNDS,
    Run,
    campaign_name,
    likeness,
    position,
    shift,
)
from headrace.plan.points import Point
from headrace.plan.workload import Traffic, traffic

SIGMA = {"ttft": 0.35, "tpot": 0.06, "throughput": 0.15}
"""Spread of one measurement around the model, in logarithms; what weighs the metrics against each other."""

PRIOR = {
    "base": 0.4,
    "engine": 0.06,
    "engine_eager": 0.4,
    "generation": 0.2,
    "path": 0.8,
    "wave": 0.25,
}
"""Prior standard deviations of the parameters, in logarithms."""

OFFSET = {
    "ttft": (0.09, 0.09, 0.09, 0.09, 0.45, 0.0),
    "tpot": (0.1, 0.05, 0.03, 0.03, 0.2, 0.3),
    "throughput": (0.1, 0.05, 0.03, 0.03, 0.2, 0.3),
    "wave": (0.01,) * 6,
}
"""Prior standard deviations of the offsets, in the order of `group_names`. A campaign's deviation is put down to its build
(and, for the speed of steps, its card) before its family, so that other families on the same build and card profit."""

SKEWED = ("ttft", "throughput")
"""Metrics whose errors are long-tailed: fitted by relative error, which outliers below the prediction cannot dominate."""
FAR = 2.0
"""Predictions more than this too high, in logarithms, are outliers: they no longer pull."""
LIMIT = 5.0
"""Parameters stay within this many prior standard deviations."""
TOLERANCE = 1e-4
"""The fit ends when a step lowers its cost by less than this fraction; errors no longer move in the third digit."""

Array = np.ndarray[Any, np.dtype[np.float64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Table:
    """Measured points as arrays, one entry per point."""

    points: tuple[Point, ...]
    traffics: tuple[Traffic, ...]
    decode: Work
    alone: Work
    prefill: Work
    peaks: Peaks
    counts: dict[str, Array]
    ranks: Array
    keys: tuple[tuple[str, str, str], ...]
    key_of: Array
    groups: tuple[str, ...]
    group_of: tuple[Array, ...]
    campaigns: tuple[str, ...]
    positions: tuple[tuple[float, ...], ...]
    observed: dict[str, Array]

    def __len__(self) -> int:
        return len(self.points)


def _stack(objects: Sequence[Any], kind: Any) -> Any:
    return kind(**{f.name: np.array([float(getattr(o, f.name)) for o in objects]) for f in fields(kind)})


def table(points: Sequence[Point]) -> Table:
    """All performance points that can be predicted."""
    chosen = [p for p in points if p.kind == "perf" and not (p.unknown_model or p.unknown_gpu or p.unreadable)]
    deployments = [resolve(p.inputs) for p in chosen]
    traffics = [traffic(d) for d in deployments]
    keys = [(d.engine, d.gpu.generation, d.weights) for d in deployments]
    names = sorted(set(keys))
    named = [group_names(p.family, d) for p, d in zip(chosen, deployments, strict=True)]
    groups = sorted({g for names_of in named for g in names_of})
    counts = tuple(f.name for f in fields(Loop) if f.name not in ("decode", "alone", "prefill"))

    def column(values: Sequence[float | None]) -> Array:
        return np.array([math.nan if v is None else float(v) for v in values])

    ttft = column([p.answers.ttft_ms for p in chosen]) / 1e3
    tpot = column([p.answers.tpot_ms for p in chosen]) / 1e3
    return Table(
        points=tuple(chosen),
        traffics=tuple(traffics),
        decode=_stack([t.loop.decode for t in traffics], Work),
        alone=_stack([t.loop.alone for t in traffics], Work),
        prefill=_stack([t.loop.prefill for t in traffics], Work),
        peaks=_stack([t.peaks for t in traffics], Peaks),
        counts={name: column([getattr(t.loop, name) for t in traffics]) for name in counts},
        ranks=column([float(d.layout.ranks) for d in deployments]),
        keys=tuple(names),
        key_of=np.array([names.index(k) for k in keys]),
        groups=tuple(groups),
        group_of=tuple(np.array([groups.index(of[level]) for of in named]) for level in range(len(named[0]))),
        campaigns=tuple(campaign_name(p.family, d) for p, d in zip(chosen, deployments, strict=True)),
        positions=tuple(
            position(d, x.loop.running + x.loop.waiting, d.inputs.isl or 1, d.inputs.osl or 1)
            for d, x in zip(deployments, traffics, strict=True)
        ),
        observed={
            "ttft": ttft,
            "tpot": tpot,
            "throughput": column([p.answers.output_tps_per_gpu for p in chosen]),
        },
    )


def _names(t: Table) -> list[str]:
    engines = sorted({e for e, _, _ in t.keys})
    generations = sorted({g for _, g, _ in t.keys} - {"hopper"})
    return [
        *BASE,
        *(f"engine.{e}.{term}" for e in engines for term in ENGINE_TERMS),
        *(f"generation.{g}.{term}" for g in generations for term in GENERATION_TERMS),
        *(f"path.{e}.{path}.moe_s" for e in engines for path in ("16bit", "fp8", "block8", "4bit")),
    ]


def _spread(name: str) -> float:
    if name.endswith(("wave", "prompt_s")):
        return PRIOR["wave"]
    if name.startswith("engine.") and ".eager_" in name:
        return PRIOR["engine_eager"]
    return PRIOR[name.split(".")[0]] if "." in name else PRIOR["base"]


def _design(t: Table, names: Sequence[str]) -> Array:
    """Which parameters multiply which efficiency, [efficiencies, keys, parameters], zeros and ones: what `efficiency` sums."""
    design = np.zeros((len(BASE), len(t.keys), len(names)))
    place = {name: i for i, name in enumerate(names)}
    for i, name in enumerate(BASE):
        for j, (engine, generation, weights) in enumerate(t.keys):
            for term in terms(name, engine, generation, kernel_path(weights)):
                if term in place:
                    design[i, j, place[term]] += 1.0
    return design


def _efficiencies(t: Table, design: Array, parameters: Array) -> tuple[Efficiency, Array]:
    """Efficiencies of every point, and the slopes of their logarithms to their parameters' sums, [efficiencies, points]."""
    raw = np.array(list(BASE.values()))[:, None] * np.exp(design @ parameters)
    fraction = np.array([name in FRACTIONS for name in BASE])[:, None]
    reached = np.tanh(raw / CEILING)
    value = np.where(fraction, CEILING * reached, raw)
    slope = np.where(fraction, raw / CEILING * (1.0 - reached**2) / reached, 1.0)
    return Efficiency(**dict(zip(BASE, value[:, t.key_of], strict=True))), slope[:, t.key_of]


def _times(t: Table, e: Efficiency) -> Times:
    loop = Loop(decode=t.decode, alone=t.alone, prefill=t.prefill, **t.counts)
    return closed_loop(loop, t.peaks, e)


def _logs(t: Table, e: Efficiency) -> Array:
    """Logarithms of the three metrics, [3, points]."""
    times = _times(t, e)
    rate = t.counts["running"] * t.counts["osl"] / times.cycle_s / t.ranks
    logs: Array = np.log(np.stack([times.ttft_s, times.tpot_s, rate]))
    return logs


def _sum_groups(t: Table, effects: Array) -> Array:
    """Offsets of each point, [4, points], from those of the groups, [4, groups]."""
    total = np.zeros((len(EFFECTS), len(t)))
    for members in t.group_of:
        total += effects[:, members]
    return total


def fit(t: Table, mask: Mask, iterations: int = 40, known: Calibration | None = None) -> Calibration:
    """Parameters and effects from the points where `mask` is true.

    With `known`, what it holds stands as it is (the physics, generations, kernel paths), and only parameters of engines that
    it does not know are fitted, together with the offsets.
    """
    from scipy.optimize import least_squares

    names = _names(t)
    base, groups = len(names), len(t.groups)
    spread = np.array([_spread(n) for n in names])
    given = np.zeros(len(names))
    if known is not None:
        given = np.array([known.parameters.get(n, 0.0) for n in names])
        measured = {n.split(".")[1] for n in known.parameters if n.startswith("engine.")}
        spread[[not n.startswith("engine.") or n.split(".")[1] in measured for n in names]] = 0.0
    offsets = np.zeros((len(EFFECTS), groups))
    for level, members in enumerate(t.group_of):
        offsets[:, np.unique(members)] = [[OFFSET[which][level]] for which in EFFECTS]
    start = np.zeros(offsets.shape)
    for j, group in enumerate(t.groups):
        if known is not None and group in known.effects:
            start[:, j] = [getattr(known.effects[group], which) for which in EFFECTS]
            offsets[:, j] = 0.0
    prior = np.concatenate([spread, offsets.ravel()])
    origin = np.concatenate([given, start.ravel()])
    observed = np.log(np.stack([t.observed[m] for m in METRICS]))
    seen = np.isfinite(observed) & mask
    sigma = np.array([SIGMA[m] for m in METRICS])[:, None]
    skewed = np.array([m in SKEWED for m in METRICS])[:, None]

    design = _design(t, names)

    def model(z: Array) -> tuple[Array, Efficiency, Array]:
        x = origin + np.clip(z, -LIMIT, LIMIT) * prior
        effects = x[base:].reshape(len(EFFECTS), groups)
        e, slope = _efficiencies(t, design, x[:base])
        total = _sum_groups(t, effects)
        e = replace(e, wave=e.wave * np.exp(total[3]))
        return _logs(t, e) + total[:3], e, slope

    def residuals(z: Array) -> Array:
        logs, _, _ = model(z)
        error = logs - observed
        return np.concatenate([(np.where(skewed, np.expm1(np.minimum(error, FAR)), error) / sigma)[seen], z])

    def jacobian(z: Array) -> Array:
        at, e, slope_of_fraction = model(z)
        error = at - observed
        # The slope of expm1(error); beyond FAR the residual no longer moves.
        slope_of_skewed = np.where(error < FAR, np.exp(np.minimum(error, FAR)), 0.0)
        gain = np.where(skewed, slope_of_skewed, 1.0) / sigma
        step = 1e-4
        data = np.zeros((int(seen.sum()), len(z)))
        plain = _logs(t, e)
        for i, name in enumerate(BASE):
            moved = replace(e, **{name: getattr(e, name) * math.exp(step)})
            by_name = (_logs(t, moved) - plain) / step
            if name == "wave":
                by_wave = by_name
            data[:, :base] += (
                ((by_name * slope_of_fraction[i] * gain)[seen])[:, None]
                * np.broadcast_to(design[i][t.key_of], (*at.shape, base))[seen]
            )
        data[:, :base] *= prior[:base]
        columns = np.broadcast_to(np.arange(at.shape[1]), at.shape)[seen]
        rows = np.arange(len(columns))
        for which in range(len(EFFECTS)):
            slope = np.zeros_like(at)
            if which < len(METRICS):
                slope[which] = 1.0
            else:
                slope = by_wave
            flat = (slope * gain)[seen]
            for members in t.group_of:
                place = base + which * groups + members[columns]
                data[rows, place] += flat * prior[place]
        return np.concatenate([data, np.eye(len(z))])

    found = least_squares(
        residuals,
        np.zeros(len(prior)),
        jac=jacobian,
        loss="soft_l1",
        max_nfev=iterations,
        tr_solver="lsmr",
        ftol=TOLERANCE,
    ).x
    found = origin + np.clip(found, -LIMIT, LIMIT) * prior
    effects = found[base:].reshape(len(EFFECTS), groups)
    return Calibration(
        parameters={n: round(float(v), 4) for n, v in zip(names, found[:base], strict=True) if abs(v) > 1e-4},
        effects={
            g: Effects(**{m: round(float(effects[i, j]), 4) for i, m in enumerate(EFFECTS)})
            for j, g in enumerate(t.groups)
            if np.abs(effects[:, j]).max() > 1e-3
        },
    )


def predict(t: Table, c: Calibration) -> dict[str, Array]:
    """Predictions of all points (seconds, tokens per second and GPU)."""
    names = _names(t)
    e, _ = _efficiencies(t, _design(t, names), np.array([c.parameters.get(n, 0.0) for n in names]))
    none = Effects()
    effects = np.array([[getattr(c.effects.get(g, none), which) for g in t.groups] for which in EFFECTS])
    total = _sum_groups(t, effects)
    logs = _logs(t, replace(e, wave=e.wave * np.exp(total[3]))) + total[:3]
    for i, m in enumerate(METRICS):
        logs[i] += [shift(c.runs.get(name, ()), at, m) for name, at in zip(t.campaigns, t.positions, strict=True)]
    return {m: np.exp(logs[i]) for i, m in enumerate(METRICS)}


def kriging_weights(at: Sequence[Sequence[float]], errors: Array) -> Array:
    """Weights with which measured runs at these positions, with these errors of the fit in logarithms, move their neighbours.

    Noise is heavy-tailed (Student's t, by reweighting): what leaving a run out says of its error decides how much it counts.
    """
    alike = np.array([[likeness(a, b) for b in at] for a in at]).reshape(len(at), len(at))
    clipped = np.clip(errors, -LARGEST, LARGEST)
    noise = np.full(len(at), NOISE)
    for _ in range(ROUNDS):
        precision = np.linalg.inv(alike + np.diag(noise))
        found: Array = precision @ clipped
        left_out = found / np.diag(precision)
        noise = NOISE * (1.0 + (left_out / CONTRADICTED) ** 2)
    return found


def with_runs(t: Table, c: Calibration, mask: Mask) -> Calibration:
    """The calibration with the errors that it makes on the points of `mask`, as weights of measured runs.

    A run that took less time per token than the datasheet's peaks allow was no such run, and speaks for no other.
    """
    predicted = predict(t, c)
    least = fastest_seconds(t.decode, t.peaks) / t.counts["tokens_per_step"]
    mask = mask & ~(t.observed["tpot"] < least)
    runs: dict[str, list[Run]] = {}
    for name in sorted({t.campaigns[i] for i in np.flatnonzero(mask)}):
        rows = [i for i in np.flatnonzero(mask) if t.campaigns[i] == name]
        weights = {m: np.zeros(len(rows)) for m in METRICS}
        for m in METRICS:
            error = np.log(t.observed[m][rows] / predicted[m][rows])
            seen = np.flatnonzero(np.isfinite(error))
            if len(seen):
                weights[m][seen] = kriging_weights([t.positions[rows[k]] for k in seen], error[seen])
        runs[name] = [
            Run(
                tuple(round(x, 4) for x in t.positions[row]),
                **{m: round(float(weights[m][k]), 5) for m in METRICS},
            )
            for k, row in enumerate(rows)
        ]
    return msgspec.structs.replace(c, runs=runs)


def tier(t: Table, predicted: dict[str, Array], keep: Mask) -> Tier:
    """Shift and interval of each metric from cross-validated predictions of the points in `keep`.

    The shift is the factor that minimises the mean relative error; the interval is split-conformal at 90 %: the
    5 % and 95 % order statistics of observed / predicted, with the finite-sample correction.
    """
    bands: dict[str, Band] = {}
    for m in METRICS:
        seen = np.isfinite(t.observed[m]) & np.isfinite(predicted[m]) & keep
        ratio = np.sort(t.observed[m][seen] / predicted[m][seen])
        n = len(ratio)
        if n < 10:
            bands[m] = Band(1.0, 0.3, 3.0, n)
            continue
        # The minimiser of sum |s / ratio - 1| is a weighted median of the ratios with weights 1 / ratio.
        weight = np.cumsum(1.0 / ratio)
        shift = float(ratio[int(np.searchsorted(weight, weight[-1] / 2))])
        lower = max(0, math.floor((n + 1) * 0.05) - 1)
        upper = min(n - 1, math.ceil((n + 1) * 0.95) - 1)
        errors = np.abs(shift / ratio - 1.0)
        bands[m] = Band(
            round(shift, 4),
            round(float(ratio[lower]), 4),
            round(float(ratio[upper]), 4),
            n,
            round(float(errors.mean()), 4),
            round(float(np.median(errors)), 4),
        )
    return Tier(**bands)


def _cross_validate(t: Table, folds: Array) -> tuple[dict[str, Array], dict[str, Calibration]]:
    """Predictions of every fold by a model that did not see it, and those models."""
    predicted = {m: np.full(len(t), math.nan) for m in METRICS}
    models: dict[str, Calibration] = {}
    for name in sorted({str(f) for f in folds}):
        inside = folds == name
        models[name] = fit(t, ~inside)
        out = predict(t, with_runs(t, models[name], ~inside))
        for m in METRICS:
            predicted[m][inside] = out[m][inside]
    return predicted, models


def _places(cells: Sequence[str], t: Table) -> tuple[list[int], Mask]:
    """The place of each point among the loads of its cell, and whether it is the only one there."""
    order = sorted(range(len(t)), key=lambda i: (cells[i], t.positions[i]))
    place = [0] * len(t)
    for before, i in zip([None, *order], order, strict=False):
        place[i] = place[before] + 1 if before is not None and cells[before] == cells[i] else 0
    return place, np.array([cells.count(c) == 1 for c in cells])


def with_engine(c: CalibrationSet, points: Sequence[Point]) -> CalibrationSet:
    """The calibration with engines that it does not know, from runs of theirs. What it holds already stands as it is, so that no
    score on the others' points changes."""
    t = table(points)
    everything = np.ones(len(t), dtype=bool)
    found = with_runs(t, fit(t, everything, known=c.main), everything)
    main = Calibration(
        parameters={**found.parameters, **c.main.parameters},
        effects={**found.effects, **c.main.effects},
        runs={**found.runs, **c.main.runs},
    )
    families = {f"{p.family}|{t.keys[k][0]}" for p, k in zip(t.points, t.key_of, strict=True)}
    return msgspec.structs.replace(c, main=main, families=sorted({*c.families, *families}))


def calibrate(points: Sequence[Point], cell_folds: int = 5, run_folds: int = 5) -> CalibrationSet:
    """The full calibration: the model from all points, one per left-out family, and the intervals.

    Tier `unseen` (a family without measurements on the engine) has its intervals from leaving out whole families; tier
    `seen` from leaving out whole cells (a campaign at one tensor-parallel size); tier `near` from leaving out every
    fifth run of a cell, in the order of its loads.
    """
    t = table(points)
    families = np.array([p.family for p in t.points])
    everything = np.ones(len(t), dtype=bool)
    main = with_runs(t, fit(t, everything), everything)
    by_family, models = _cross_validate(t, families)
    cells = [f"{t.groups[g]}|{tr.model.tp}" for g, tr in zip(t.group_of[0], t.traffics, strict=True)]
    number = {cell: str(i % cell_folds) for i, cell in enumerate(sorted(set(cells)))}
    by_cell, _ = _cross_validate(t, np.array([number[c] for c in cells]))
    place, alone = _places(cells, t)
    by_place, _ = _cross_validate(t, np.array([str(i % run_folds) for i in place]))
    unseen = tier(t, by_family, everything)
    folds = {family: Fold(model, tier(t, by_family, families != family)) for family, model in models.items()}
    return CalibrationSet(
        main=main,
        near=tier(t, by_place, ~alone),
        seen=tier(t, by_cell, everything),
        unseen=unseen,
        folds=folds,
        rows={key_of(resolve(p.inputs)): p.family for p in t.points},
        families=sorted({f"{p.family}|{k[0]}" for p, k in zip(t.points, (t.keys[i] for i in t.key_of), strict=True)}),
    )
