"""Scoring the planner against measured points. Predictions see `Inputs`; only the scoring sees `Answers`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import HeadraceError
from headrace.base.units import GIB
from headrace.plan.calibration import CalibrationSet, key_of, shipped
from headrace.plan.deployment import Inputs, resolve
from headrace.plan.fit import fit
from headrace.plan.perf import perf
from headrace.plan.points import Point, read_points
from headrace.spec.prediction import Figure


class Predicted(msgspec.Struct, frozen=True):
    """What the planner predicts for one point; `error` when it could not answer."""

    fits: bool | None = None
    weights_gib: float | None = None
    kv_gib: float | None = None
    kv_tokens: float | None = None
    ttft_ms: Figure | None = None
    tpot_ms: Figure | None = None
    output_tps_per_gpu: Figure | None = None
    error: str = ""


def predict_point(kind: str, inputs: Inputs, context: int, calibration: CalibrationSet | None = None) -> Predicted:
    """The prediction for a question; no measured answer can reach it."""
    try:
        if kind == "memory":
            memory = fit(inputs, context)
            return Predicted(
                fits=memory.fits,
                weights_gib=memory.weights_bytes / GIB,
                kv_gib=memory.kv_pool_bytes / GIB,
                kv_tokens=float(memory.kv_pool_tokens),
            )
        times = perf(inputs, calibration)
        return Predicted(
            ttft_ms=times.ttft_ms, tpot_ms=times.tpot_ms, output_tps_per_gpu=times.output_tokens_per_s_per_gpu
        )
    except HeadraceError as error:
        return Predicted(error=str(error))


def validate_file(path: Path, calibration: CalibrationSet | None = None) -> dict[str, Any]:
    """Scores of the planner on a file of points."""
    return validate(read_points(path), calibration)


def validate(points: Sequence[Point], calibration: CalibrationSet | None = None) -> dict[str, Any]:
    """Errors as fractions. Points of unknown models or GPUs are listed, not counted."""
    chosen = calibration or shipped()
    known = [p for p in points if not p.unknown_model and not p.unknown_gpu]
    predicted = [
        Predicted(error=p.unreadable) if p.unreadable else predict_point(p.kind, p.inputs, p.context, chosen)
        for p in known
    ]
    worst: list[dict[str, Any]] = []
    families: dict[str, dict[str, list[float]]] = {}
    report: dict[str, Any] = {"memory": _memory(known, predicted, worst)}
    for name, answer, figure in METRICS:
        report[name] = _metric(name, answer, figure, known, predicted, worst, families)
    report["by_family"] = {
        family: {name: {"n": len(e), "mape": _round(statistics.fmean(e))} for name, e in errors.items()}
        for family, errors in sorted(families.items())
    }
    report["unknown_models"] = sorted({p.unknown_model for p in points if p.unknown_model})
    report["unknown_gpus"] = sorted({p.unknown_gpu for p in points if p.unknown_gpu})
    report["unknown_rows"] = len(points) - len(known)
    report["unanswered"] = [{"id": p.id, "error": q.error} for p, q in zip(known, predicted, strict=True) if q.error]
    answered = (p for p, q in zip(known, predicted, strict=True) if p.kind != "memory" and not q.error)
    report["cross_validated_rows"] = sum(key_of(resolve(p.inputs)) in chosen.rows for p in answered)
    worst.sort(key=lambda entry: -entry["error"])
    report["worst"] = worst[:15]
    return report


METRICS: tuple[tuple[str, str, str], ...] = (
    ("ttft", "ttft_ms", "ttft_ms"),
    ("tpot", "tpot_ms", "tpot_ms"),
    ("throughput", "output_tps_per_gpu", "output_tps_per_gpu"),
)


def _round(value: float) -> float:
    return round(value, 4)


def _metric(
    name: str,
    answer: str,
    figure: str,
    points: Sequence[Point],
    predicted: Sequence[Predicted],
    worst: list[dict[str, Any]],
    families: dict[str, dict[str, list[float]]],
) -> dict[str, Any]:
    errors: list[float] = []
    covered = asked = 0
    for p, q in zip(points, predicted, strict=True):
        truth: float | None = getattr(p.answers, answer)
        if p.kind == "memory" or truth is None:
            continue
        asked += 1
        guess: Figure | None = getattr(q, figure)
        if guess is None:
            continue
        error = abs(guess.value - truth) / truth
        errors.append(error)
        families.setdefault(p.family, {}).setdefault(name, []).append(error)
        covered += guess.low <= truth <= guess.high
        worst.append(
            {"id": p.id, "model": p.inputs.model, "metric": name, "predicted": _round(guess.value), "measured": truth}
            | {"error": _round(error)}
        )
    return {
        "n": asked,
        "answered": len(errors),
        "mape": _round(statistics.fmean(errors)) if errors else None,
        "median": _round(statistics.median(errors)) if errors else None,
        "coverage90": _round(covered / len(errors)) if errors else None,
    }


def _memory(points: Sequence[Point], predicted: Sequence[Predicted], worst: list[dict[str, Any]]) -> dict[str, Any]:
    quantities: tuple[tuple[str, Callable[[Any], float | None]], ...] = (
        ("weights", lambda x: x.weights_gib),
        ("kv_gib", lambda x: x.kv_gib),
        ("kv_tokens", lambda x: x.kv_tokens),
    )
    everything: list[float] = []
    by_quantity: dict[str, Any] = {}
    rows = [(p, q) for p, q in zip(points, predicted, strict=True) if p.kind == "memory"]
    for name, get in quantities:
        errors = []
        asked = 0
        for p, q in rows:
            truth, guess = get(p.answers), get(q)
            if truth is None:
                continue
            asked += 1
            if guess is None:
                continue
            error = abs(guess - truth) / truth
            errors.append(error)
            worst.append(
                {"id": p.id, "model": p.inputs.model, "metric": name, "predicted": _round(guess), "measured": truth}
                | {"error": _round(error)}
            )
        everything += errors
        by_quantity[name] = {
            "n": asked,
            "answered": len(errors),
            "median_error": _round(statistics.median(errors)) if errors else None,
            "max_error": _round(max(errors)) if errors else None,
        }
    verdicts = [(p, q) for p, q in rows if p.answers.fits is not None and q.fits is not None]
    wrong = [p.id for p, q in verdicts if p.answers.fits != q.fits]
    return {
        "n": len(rows),
        "answered": sum(1 for _, q in rows if not q.error),
        "median_error": _round(statistics.median(everything)) if everything else None,
        "wrong_fit": len(wrong),
        "wrong_fit_ids": wrong,
        "by_quantity": by_quantity,
    }


def error_table(report: Mapping[str, Any], calibration: CalibrationSet | None = None) -> str:
    """The scores as the Markdown tables of the documentation; the last are what the calibration says of measured families."""
    chosen = calibration or shipped()
    memory = report["memory"]
    lines = [
        "| what | rows | answered | median error | mean error (MAPE) | 90 % interval covers |",
        "|---|---|---|---|---|---|",
    ]
    for name, label in (("weights", "weights"), ("kv_gib", "KV pool, GiB"), ("kv_tokens", "KV pool, tokens")):
        q = memory["by_quantity"][name]
        lines.append(f"| {label} | {q['n']} | {q['answered']} | {q['median_error']:.1%} | | |")
    for name, label in (("ttft", "TTFT"), ("tpot", "time per token"), ("throughput", "throughput at saturation")):
        m = report[name]
        lines.append(
            f"| {label} | {m['n']} | {m['answered']} | {m['median']:.1%} | {m['mape']:.1%} | {m['coverage90']:.1%} |"
        )
    lines += ["", "| family left out | TTFT MAPE | time per token MAPE | throughput MAPE |", "|---|---|---|---|"]
    for family, errors in report["by_family"].items():
        cells = [
            f"{errors[name]['mape']:.1%} ({errors[name]['n']})" if name in errors else "" for name, _, _ in METRICS
        ]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    for left_out, tier in (
        ("family measured, cell left out", chosen.seen),
        ("cell measured, load left out", chosen.near),
    ):
        lines += ["", f"| {left_out} | median error | MAPE |", "|---|---|---|"]
        for name, label in (("ttft", "TTFT"), ("tpot", "time per token"), ("throughput", "throughput at saturation")):
            band = getattr(tier, name)
            lines.append(f"| {label} | {band.median:.1%} | {band.mape:.1%} |")
    return "\n".join(lines)
