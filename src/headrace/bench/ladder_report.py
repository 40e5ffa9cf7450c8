"""The ladder as a page: bars per step, lines against users and context, quality beside speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.bench import page
from headrace.bench.charts import Chart, bar_chart, line_chart
from headrace.bench.records import read_json


def ladder_content(folder: Path) -> tuple[str, str, str, list[Chart]]:
    """Title, subtitle, body and charts of a ladder's report."""
    ladder = read_json(folder / "ladder.json", dict[str, Any])
    measured = [s for s in ladder["steps"] if s["status"] == "measured"]
    charts = _charts(ladder, measured)
    body = "".join(page.banner("plain", note) for note in ladder["notes"])
    body += page.section("Charts", page.figures(charts))
    body += page.section("Steps", _steps_table(ladder["steps"]))
    for users, context in _cells(measured):
        body += page.section(f"{users} users, context {context}", _cell_table(measured, users, context))
    absent = [
        [_name(s), s["stack"], s["status"], s["reason"]] for s in ladder["steps"] if s["status"] in ("absent", "failed")
    ]
    body += page.section(
        "Not measured", page.table(["step", "stack", "status", "why"], absent, numeric=False) if absent else ""
    )
    host = ladder.get("host", {})
    settings = ladder["settings"]
    subtitle = (
        f"{host.get('processor', '')} · {host.get('cores', '')} cores · {settings['requests']} requests per cell, "
        f"{settings['output']} output tokens, prompts that share all but {settings['own']} tokens · "
        f"{settings['repeats']} repeats, steps in rotating order, cache emptied before each cell where there is one"
    )
    return f"Optimization ladder: {ladder['model']}", subtitle, body, charts


def _name(step: dict[str, Any]) -> str:
    return step["label"] if step["weights"] == "auto" else f"{step['label']} [{step['weights']}]"


def _cells(steps: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return sorted({(c["users"], c["context"]) for s in steps for c in s["cells"]})


def _charts(ladder: dict[str, Any], measured: list[dict[str, Any]]) -> list[Chart]:
    users, contexts = ladder["settings"]["users"], ladder["settings"]["contexts"]
    most, first = users[-1], contexts[0]
    charts: list[Chart] = []
    labels = [_name(s) for s in measured]
    for key, title, factor, unit in (
        ("output_tokens_per_s", "Output tokens per second", 1.0, "tok/s"),
        ("ttft_mean_s", "Mean time to first token", 1e3, "ms"),
        ("itl_mean_s", "Mean inter-token latency", 1e3, "ms"),
    ):
        for count in dict.fromkeys((users[0], most)):
            rows = [
                _row(s, c, key, factor)
                for s in measured
                for c in s["cells"]
                if (c["users"], c["context"]) == (count, first) and key in c
            ]
            if rows:
                served = "serial: one user" if count == 1 else f"{count} users at once"
                charts.append(bar_chart(f"{key}-{count}", f"{title}, {served}, context {first}", rows, unit, labels))
    for key, title, factor, unit in (
        ("output_tokens_per_s", "Output tokens per second", 1.0, "tok/s"),
        ("ttft_mean_s", "Mean time to first token", 1e3, "ms"),
        ("itl_mean_s", "Mean inter-token latency", 1e3, "ms"),
        ("kv_peak", "Peak share of the KV cache in use", 100.0, "%"),
    ):
        for axis, fixed, at in (("users", "context", first), ("context", "users", most)):
            rows = [
                _row(s, c, key, factor) | {"x": c[axis]}
                for s in measured
                for c in s["cells"]
                if c[fixed] == at and c.get(key) is not None
            ]
            if len({row["x"] for row in rows}) > 1:
                words = "concurrent users" if axis == "users" else "context, tokens"
                charts.append(
                    line_chart(f"{key}-by-{axis}", f"{title} against {axis} ({fixed} {at})", rows, words, unit, labels)
                )
    return charts


def _row(step: dict[str, Any], cell: dict[str, Any], key: str, factor: float) -> dict[str, Any]:
    found = cell[key]
    if not isinstance(found, dict):
        found = {"value": found, "low": found, "high": found}
    value = found["value"] * factor
    low, high = (found[end] * factor if found[end] is not None else value for end in ("low", "high"))
    return {"label": _name(step), "value": value, "low": max(low, 0.0), "high": high}


def _steps_table(steps: list[dict[str, Any]]) -> str:
    rows = []
    for s in steps:
        change = s.get("quality_change") or {}
        ratio = change.get("perplexity_ratio")
        rows.append(
            [
                _name(s),
                s["stack"],
                s["status"],
                f"{change['equal_share']:.0%}" if change else "–",
                f"{change['words_until_different']:.1f}" if change else "–",
                f"{change['perplexity']:.3f}" if change.get("perplexity") else "–",
                f"{ratio:.4f}" if ratio else "–",
                ", ".join(f"{k}={v}" for k, v in s["settings"].items()),
            ]
        )
    head = [
        "step",
        "stack",
        "status",
        "equal greedy answers",
        "words until different",
        "perplexity",
        "against engine",
        "settings",
    ]
    return page.table(head, rows, numeric=False)


def _cell_table(steps: list[dict[str, Any]], users: int, context: int) -> str:
    rows = []
    for s in steps:
        for c in s["cells"]:
            if (c["users"], c["context"]) != (users, context):
                continue
            speed = c.get("speedup")
            rows.append(
                [
                    _name(s),
                    _interval(c.get("output_tokens_per_s"), 1.0),
                    f"{speed['value']:.2f}× ({speed['low']:.2f} – {speed['high']:.2f})" if speed else "–",
                    _interval(c.get("ttft_mean_s"), 1e3),
                    _interval(c.get("itl_mean_s"), 1e3),
                    f"{c['kv_peak']:.1%}" if c["kv_peak"] is not None else "–",
                    f"{c['prefix_hit']:.0%}" if c["prefix_hit"] is not None else "–",
                ]
            )
    head = ["step", "output tok/s", "against naive", "TTFT mean, ms", "ITL mean, ms", "KV peak", "prefix hits"]
    return page.table(head, rows)


def _interval(found: dict[str, Any] | None, factor: float) -> str:
    if not found:
        return "–"
    spread = (
        ""
        if found["low"] is None or found["low"] != found["low"]
        else f" ({found['low'] * factor:.4g} – {found['high'] * factor:.4g})"
    )
    return f"{found['value'] * factor:.4g}{spread}"
