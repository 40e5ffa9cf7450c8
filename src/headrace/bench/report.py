"""The HTML report of a folder: a run, its repeats, a sweep, a comparison or a ladder."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.base.errors import InvalidInput
from headrace.bench import page
from headrace.bench.charts import Chart, comparison_charts, load_charts, pair_chart, run_charts
from headrace.bench.compare import COMPARISON_FILE, FIGURES, SERIES_FILE, Series, read_series
from headrace.bench.metrics import all_metrics
from headrace.bench.records import REPORT_FILE, SAMPLES_FILE, SUMMARY_FILE, read_json, read_records, read_samples
from headrace.bench.slo import Slo
from headrace.bench.stored import read_summary

Content = tuple[str, str, str, list[Chart]]


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of whatever it holds, and return its path."""
    title, subtitle, body, charts = content(folder)
    page.write_page(folder / REPORT_FILE, title, subtitle, body, charts)
    return folder / REPORT_FILE


def content(folder: Path) -> Content:
    """Title, subtitle, body and charts of a folder's report."""
    if (folder / "ladder.json").exists():
        from headrace.bench.ladder_report import ladder_content

        return ladder_content(folder)
    if (folder / COMPARISON_FILE).exists():
        return _comparison(folder)
    if (folder / SERIES_FILE).exists():
        series = read_series(folder)
        return _repeats(folder, series) if series.kind == "repeats" else _sweep(folder, series)
    if (folder / SUMMARY_FILE).exists():
        return _run(folder)
    raise InvalidInput(f"{folder} holds no finished run", field="DIR")


def _run(folder: Path) -> Content:
    summary = read_summary(folder)
    path = folder / "records.jsonl"
    records = read_records(path) if path.exists() else []
    slo = Slo.parse(summary["slo"]["objective"]) if summary.get("slo") else None
    charts = run_charts(records, read_samples(folder / SAMPLES_FILE), slo)
    return f"{summary['model']} on {summary['workload']}", _subtitle(summary), _body(summary, charts), charts


def _repeats(folder: Path, series: Series) -> Content:
    summary = read_summary(folder)
    first = folder / str(series.runs[0]["folder"])
    slo = Slo.parse(summary["slo"]["objective"]) if summary.get("slo") else None
    charts = run_charts(read_records(first / "records.jsonl"), read_samples(first / SAMPLES_FILE), slo)
    rows = [
        [run["label"], *(_cell(read_summary(folder / str(run["folder"])), f.key, f.statistic) for f in FIGURES[:9])]
        for run in series.runs
    ]
    each = page.section("Each run", page.table(["run", *(f.name for f in FIGURES[:9])], rows))
    title = f"{summary['model']} on {summary['workload']}, {len(series.runs)} runs"
    return (
        title,
        f"{_subtitle(summary)} · intervals between runs; charts of the first run",
        _body(summary, charts, each),
        charts,
    )


def _sweep(folder: Path, series: Series) -> Content:
    points = [(float(run["x"]), read_summary(folder / str(run["folder"]))) for run in series.runs]
    slo = Slo.parse(series.facts["slo"]) if series.facts.get("slo") else None
    charts = load_charts(points, series.x_name, slo)
    body = ""
    if "max_rate_rps" in series.facts:
        fails = series.facts.get("fails_at_rps")
        upper = f"; {fails:.3g} does not" if fails else ""
        body += page.banner(
            "plain", f"{series.facts['max_rate_rps']:.3g} requests/s keeps {series.facts['slo']}{upper}"
        )
    body += page.section("Against load", page.figures(charts))
    head = [
        series.x_name,
        "tok/s",
        "requests/s",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "ITL p50 ms",
        "ITL p99 ms",
        "ok",
        "failed",
        "valid",
    ]
    rows = [
        [
            f"{x:.4g}",
            *(_cell(s, key, "value") for key in ("output_tokens_per_s", "requests_per_s")),
            *(_cell(s, key, name) for key in ("ttft_s", "itl_s") for name in ("p50", "p99")),
            s["requests"]["ok"],
            s["requests"]["failed"],
            "yes" if s["valid"] else "no",
        ]
        for x, s in points
    ]
    body += page.section("Points", page.table(head, rows))
    body += _settings(points[0][1])
    first = points[0][1]
    return f"{first['model']}: {series.title}", _subtitle(first), body, charts


def _comparison(folder: Path) -> Content:
    found = read_json(folder / COMPARISON_FILE, dict[str, Any])
    charts = comparison_charts(found)
    primary = next(f for f in FIGURES if f.name == found["primary"])
    runs = [
        (k + 1, found[side]["label"], summary[primary.key][primary.statistic])
        for side in ("a", "b")
        for k, run in enumerate(found[side]["runs"])
        if (summary := _summary_if_there(folder, run))
    ]
    if found["interleaved"] and runs:
        charts.append(pair_chart(runs, f"{found['primary']}, run by run", found["primary"]))
    good = {"PASS": "good", "BETTER": "good", "FAIL": "bad", "WORSE": "bad"}.get(found["verdict"], "plain")
    margin = f" with a margin of {found['margin']:.0%}" if found.get("margin") else ""
    body = page.banner(
        good,
        f"{found['verdict']} on {found['primary']}{margin}: B/A {found['ratio']:.3f} ({found['low']:.3f} – {found['high']:.3f}); "
        f"smallest effect that could have been seen {found['smallest_effect']:.1%}",
    )
    body += "".join(page.banner("bad", warning) for warning in found["warnings"])
    body += page.section("Ratios", page.figures(charts))
    rows = [
        [
            f["metric"],
            _short(f["a"]),
            _short(f["b"]),
            f"{f['ratio']:.3f}",
            f"{f['low']:.3f} – {f['high']:.3f}",
            f["better"],
            f["verdict"],
            f["basis"],
        ]
        for f in found["figures"]
    ]
    body += page.section(
        "Figures", page.table(["figure", "A", "B", "B/A", "95 %", "better is", "verdict", "basis"], rows)
    )
    caches = [[side.upper(), found[side].get("cache_before_runs", "")] for side in "ab"]
    if any(said for _, said in caches):
        body += page.section(
            "Prefix cache between runs (no run has another's words)", page.table(["", "it was"], caches, numeric=False)
        )
    how = "interleaved A B B A" if found["interleaved"] else "not interleaved"
    return "Comparison", f"A: {found['a']['label']} · B: {found['b']['label']} · {how}", body, charts


def _summary_if_there(folder: Path, run: str) -> dict[str, Any] | None:
    """A run's summary by the path stored with the comparison, or beside it where the folder has moved."""
    for place in (Path(run), folder / Path(run).name):
        if (place / SUMMARY_FILE).exists():
            return read_summary(place)
    return None


def _subtitle(summary: dict[str, Any]) -> str:
    host = summary.get("host", {})
    parts = [
        summary.get("engine") or "engine unknown",
        summary["created"],
        host.get("processor", ""),
        host.get("cores", "") and f"{host['cores']} cores",
    ]
    return " · ".join(part for part in parts if part)


def _body(summary: dict[str, Any], charts: Sequence[Chart], more: str = "") -> str:
    requests = summary["requests"]
    body = ""
    if not summary["valid"]:
        body += "".join(page.banner("bad", f"Not valid: {reason}") for reason in summary["invalid_because"])
    if slo := summary.get("slo"):
        kept = "kept" if slo["kept"] else "missed: " + "; ".join(slo["misses"])
        body += page.banner("good" if slo["kept"] else "bad", f"{slo['objective']} {kept}")
    body += page.cards(_headline(summary))
    body += page.section("Charts", page.figures(charts))
    body += more + _plan(summary) + page.section("Every figure", _figure_table(summary))
    outcomes = [[name, count] for name, count in requests["by_outcome"].items()]
    outcomes += [
        [n.replace("_", " "), requests[n]] for n in ("unsent", "too_long_skipped", "too_long_clipped") if requests[n]
    ]
    body += page.section("Requests", page.table(["outcome", "count"], outcomes))
    if summary["failures"]:
        rows = [[f["index"], f["outcome"], f["http_status"], f["error"]] for f in summary["failures"]]
        body += page.section("Failures", page.table(["request", "outcome", "HTTP", "error"], rows, numeric=False))
    if headroom := summary.get("headroom"):
        rows = [[k.replace("_", " "), v if not isinstance(v, float) else f"{v:.4g}"] for k, v in headroom.items()]
        body += page.section("Headroom of the client, on the golden server", page.table(["figure", "value"], rows))
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in summary["notes"])
    return body + page.section("Notes", f"<ul>{notes}</ul>" if notes else "") + _settings(summary)


def _headline(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    items = []
    for name, key, statistic, factor, unit in (
        ("Output", "output_tokens_per_s", "value", 1.0, "tok/s"),
        ("TTFT p50", "ttft_s", "p50", 1e3, "ms"),
        ("TTFT p99", "ttft_s", "p99", 1e3, "ms"),
        ("ITL p50", "itl_s", "p50", 1e3, "ms"),
        ("ITL p99", "itl_s", "p99", 1e3, "ms"),
        ("E2E p50", "e2e_s", "p50", 1.0, "s"),
        ("$ / M output tokens", "usd_per_million_output_tokens", "value", 1.0, ""),
    ):
        found = summary.get(key)
        if not found or statistic not in found:
            continue
        low, high = (
            (found["low"], found["high"]) if statistic == "value" else found.get(f"{statistic}_interval", (None, None))
        )
        spread = f"{_short(low * factor)} – {_short(high * factor)}" if low is not None and low == low else ""
        items.append((name, f"{_short(found[statistic] * factor)} {unit}".strip(), spread))
    return items


def _figure_table(summary: dict[str, Any]) -> str:
    rows: list[list[str]] = []
    for metric in all_metrics():
        found = summary.get(metric.key)
        if found is None:
            continue
        if "p99" in found:
            factor, unit = (1e3, "ms") if metric.unit == "s" else (1.0, metric.unit)
            cells = [_short(found[name] * factor) if name in found else "" for name in ("mean", "p50", "p90", "p99")]
            spread = found.get("mean_interval")
            rows.append([f"{metric.what}, {unit}", *cells, _spread(spread, factor), str(found.get("count", ""))])
        elif "value" in found:
            rows.append(
                [
                    f"{metric.what}, {metric.unit}",
                    _short(found["value"]),
                    "",
                    "",
                    "",
                    _spread([found["low"], found["high"]], 1.0),
                    "",
                ]
            )
        else:
            said = ", ".join(
                f"{k} {_short(v) if isinstance(v, float) else v}" for k, v in found.items() if v is not None
            )
            rows.append([metric.what, said, "", "", "", "", ""])
    return page.table(["figure", "mean or value", "p50", "p90", "p99", "95 % of the mean", "count"], rows)


def _plan(summary: dict[str, Any]) -> str:
    plan = summary.get("plan")
    if not plan:
        return ""
    rows = [
        [
            f["name"],
            _short(f["planned"]),
            f"{_short(f['low'])} – {_short(f['high'])}",
            f["grade"],
            _short(f["measured"]),
            f"{f['ratio']:.2f}",
            "yes" if f["within"] else "no",
        ]
        for f in plan["figures"]
    ]
    head = ["figure", "planned", "90 % interval", "grade", "measured", "measured / planned", "within"]
    return page.section(f"Plan beside measurement: {plan['subject']}", page.table(head, rows))


def _settings(summary: dict[str, Any]) -> str:
    text = html.escape(json.dumps(summary.get("settings", {}), indent=1))
    return page.section("Settings", f"<details><summary>As resolved</summary><pre>{text}</pre></details>")


def _cell(summary: dict[str, Any], key: str, statistic: str) -> str:
    found = summary.get(key)
    if not found or statistic not in found:
        return "–"
    return _short(found[statistic] * (1e3 if key.endswith("_s") and statistic != "value" else 1.0))


def _spread(pair: Sequence[float] | None, factor: float) -> str:
    return f"{_short(pair[0] * factor)} – {_short(pair[1] * factor)}" if pair and pair[0] == pair[0] else ""


def _short(value: float) -> str:
    """Four significant digits without an exponent for everyday sizes."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
