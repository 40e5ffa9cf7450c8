"""Two sets of finished runs beside each other: ratios with intervals, a verdict, and what makes it less than certain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.base.errors import InvalidInput
from headrace.bench import stats
from headrace.bench.neighbours import NOTICEABLE_CORES
from headrace.bench.records import META_FILE, read_json, read_records
from headrace.bench.stored import read_summary

SERIES_FILE = "series.json"
COMPARISON_FILE = "comparison.json"
RUN_NOISE = 0.03


@dataclass(frozen=True, slots=True)
class Figure:
    """A compared figure: where it stands in a summary, and which direction is better."""

    key: str
    statistic: str
    higher_is_better: bool

    @property
    def name(self) -> str:
        return self.key if self.statistic == "value" else f"{self.key.removesuffix('_s')}_{self.statistic}_s"


FIGURES = (
    Figure("output_tokens_per_s", "value", True),
    Figure("requests_per_s", "value", True),
    Figure("goodput_per_s", "value", True),
    Figure("ttft_s", "mean", False),
    Figure("ttft_s", "p50", False),
    Figure("ttft_s", "p99", False),
    Figure("itl_s", "mean", False),
    Figure("itl_s", "p99", False),
    Figure("tpot_s", "mean", False),
    Figure("e2e_s", "mean", False),
    Figure("e2e_s", "p99", False),
    Figure("usd_per_million_output_tokens", "value", False),
)


class Series(msgspec.Struct, kw_only=True):
    """`series.json` of a folder with several runs. `x`: what varies (a rate, a concurrency), None for repeats."""

    schema: str = "headrace-bench-series/1"
    kind: str
    title: str = ""
    x_name: str = ""
    runs: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}


def read_series(folder: Path) -> Series:
    """What a folder with several runs says of them."""
    return read_json(folder / SERIES_FILE, Series)


def read_runs(folder: Path) -> list[Path]:
    """The run folders of a folder: itself, or the runs of its repeats."""
    if (folder / SERIES_FILE).exists():
        series = read_series(folder)
        if series.kind != "repeats":
            raise InvalidInput(f"{folder} is a {series.kind}, not a run or its repeats", field="DIR")
        return [folder / run["folder"] for run in series.runs]
    return [folder]


def check_metric(name: str) -> None:
    """Raise InvalidInput unless `name` is a figure that runs are compared by."""
    if name not in {figure.name for figure in FIGURES}:
        raise InvalidInput(f"unknown figure {name!r}", field="--metric", remedy=", ".join(f.name for f in FIGURES))


class _Meta(msgspec.Struct):
    settings: dict[str, Any]


def compare_folders(
    a: Path, b: Path, *, margin: float | None, noise: float = RUN_NOISE, primary: str = "output_tokens_per_s"
) -> dict[str, Any]:
    """Compare finished runs of two folders; they were not interleaved, and the result says so."""
    return compare_runs(read_runs(a), read_runs(b), str(a), str(b), margin=margin, noise=noise, primary=primary)


def compare_runs(
    a: list[Path], b: list[Path], label_a: str, label_b: str, *, margin: float | None, noise: float = RUN_NOISE,
    primary: str = "output_tokens_per_s", interleaved: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """B against A. `interleaved`: run k of A and run k of B were neighbours, in the order A B, B A, …"""
    check_metric(primary)
    summaries = [read_summary(folder) for folder in a], [read_summary(folder) for folder in b]
    figures = []
    for figure in FIGURES:
        values = [[_value(s, figure) for s in side] for side in summaries]
        if any(value is None or value <= 0 for side in values for value in side):
            continue
        va, vb = (np.array(side, dtype=float) for side in values)
        paired = interleaved and len(va) >= stats.MIN_PAIRS and len(va) % 2 == 0
        estimate = stats.paired(va, vb) if paired else stats.unpaired(va, vb, noise, _within(summaries, figure))
        figures.append(
            {
                "metric": figure.name,
                "better": "higher" if figure.higher_is_better else "lower",
                "a": float(np.exp(np.log(va).mean())),
                "b": float(np.exp(np.log(vb).mean())),
                "ratio": estimate.ratio,
                "low": estimate.low,
                "high": estimate.high,
                "verdict": stats.verdict(estimate, higher_is_better=figure.higher_is_better, margin=margin),
                "smallest_effect": estimate.smallest_effect,
                "basis": estimate.basis,
            }
        )
    chosen = next((f for f in figures if f["metric"] == primary), None)
    if chosen is None:
        raise InvalidInput(f"{primary} was not measured in every run", field="--metric")
    work = _same_work(a, b)
    return {
        "schema": "headrace-bench-comparison/1",
        "a": _side(label_a, a, summaries[0]),
        "b": _side(label_b, b, summaries[1]),
        "interleaved": interleaved,
        "margin": margin,
        "primary": primary,
        "verdict": chosen["verdict"],
        "ratio": chosen["ratio"],
        "low": chosen["low"],
        "high": chosen["high"],
        "smallest_effect": chosen["smallest_effect"],
        "same_work": not work,
        "figures": figures,
        "warnings": [*_warnings(summaries, interleaved), *work],
    }


def _side(label: str, runs: list[Path], summaries: list[dict[str, Any]]) -> dict[str, Any]:
    caches = {(s.get("settings") or {}).get("target", {}).get("cache_before", "") for s in summaries} - {""}
    return {
        "label": label,
        "runs": [str(path) for path in runs],
        "model": summaries[0].get("model"),
        "cache_before_runs": "; ".join(sorted(caches)),
    }


def _value(summary: dict[str, Any], figure: Figure) -> float | None:
    found = summary.get(figure.key)
    value = (found or {}).get(figure.statistic)
    return None if value is None else float(value)


def _within(summaries: tuple[list[dict[str, Any]], ...], figure: Figure) -> float:
    """Half width, on the log scale, that the bootstrap within the first run of each side leaves; both sides together."""
    widths: list[float] = []
    for side in summaries:
        found = side[0][figure.key]
        low, high = (
            (found["low"], found["high"]) if "low" in found else found.get(f"{figure.statistic}_interval", (0, 0))
        )
        widths.append(float(np.log(high / low)) / 2 if low > 0 else 0.0)
    return float(np.hypot(widths[0], widths[1]))


def _warnings(summaries: tuple[list[dict[str, Any]], ...], interleaved: bool) -> list[str]:
    found = (
        []
        if interleaved
        else ["the runs were not interleaved: a change of the machine between them counts as a difference"]
    )
    for side, name in zip(summaries, "AB", strict=True):
        for summary in side:
            if not summary.get("valid", True):
                found.append(f"a run of {name} is not valid: {'; '.join(summary['invalid_because'])}")
    foreign = [summary.get("foreign_cores") or 0.0 for side in summaries for summary in side]
    if max(foreign) >= NOTICEABLE_CORES:
        busy = sum(cores >= NOTICEABLE_CORES for cores in foreign)
        found.append(
            f"other programs used up to {max(foreign):.2f} cores in {busy} of {len(foreign)} runs: engines suffer from that "
            "unequally, which interleaving does not undo"
        )
    cached = [[(s.get("tokens") or {}).get("cached_undeclared") or 0 for s in side] for side in summaries]
    if any(map(any, cached)):
        found.append(
            f"prompt tokens came from a prefix cache that earlier runs had filled, {sum(cached[0]):,.0f} in A and "
            f"{sum(cached[1]):,.0f} in B: they were not computed (flush the cache before each run, or give each another --salt)"
        )
    hosts = {str(sorted(summary.get("host", {}).items())) for side in summaries for summary in side}
    if len(hosts) > 1:
        found.append("the runs are from different hosts")
    return found


def _same_work(a: list[Path], b: list[Path]) -> list[str]:
    """Differences in what was asked of the two sides, one line each."""
    shapes = []
    for folder in (a[0], b[0]):
        if not (folder / "records.jsonl").exists():
            return ["no records to check that both did the same work"]
        shapes.append(
            [(r.index, r.prompt_tokens_declared, r.output_tokens_asked) for r in read_records(folder / "records.jsonl")]
        )
    found = []
    if shapes[0] != shapes[1]:
        found.append(f"the work differs: {len(shapes[0])} and {len(shapes[1])} requests, not of the same lengths")
    loads = [_load(folder) for folder in (a[0], b[0])]
    found += [
        f"{key} differs: {loads[0][key]} and {loads[1][key]}" for key in loads[0] if loads[0][key] != loads[1].get(key)
    ]
    return found


def _load(folder: Path) -> dict[str, Any]:
    if not (folder / META_FILE).exists():
        return {}
    settings = read_json(folder / META_FILE, _Meta).settings
    return {key: settings.get(key) for key in ("workload", "workload_options", "arrivals", "seed", "scale")}
