"""Charts of runs and series as Vega-Lite specifications, made with Altair from plain rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from headrace.bench.metrics import request_e2e_s, request_itl_s, request_ttft_s
from headrace.bench.records import Outcome, RequestRecord, ServerSample
from headrace.bench.slo import Slo

WIDTH, HEIGHT = 480, 240
_MOST_ROWS = 1_500
_PERCENTS = np.concatenate([np.linspace(0, 99, 100), np.linspace(99.1, 100, 10)])
COLOURS = {"blue": "#2f6db5", "orange": "#e07b2e", "green": "#3a8f5c", "red": "#c8373c", "grey": "#8a8f98"}
_OK_COLOURS = alt.Scale(
    domain=["first token", "decode", "failed"], range=[COLOURS["orange"], COLOURS["blue"], COLOURS["red"]]
)


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with a name for its file, a caption, and its Vega-Lite specification."""

    name: str
    caption: str
    spec: dict[str, Any]


def _chart(name: str, caption: str, chart: Any) -> Chart:
    chart = (
        chart.configure_view(stroke=None)
        .configure_axis(labelFontSize=11, titleFontSize=11)
        .configure_legend(orient="top", title=None, labelFontSize=11, symbolLimit=12)
    )
    return Chart(name, caption, chart.to_dict())


def _rows(rows: Sequence[dict[str, Any]]) -> Any:
    return alt.Data(values=list(rows))


def _thin(items: Sequence[Any]) -> list[Any]:
    step = max(1, -(-len(items) // _MOST_ROWS))
    return list(items[::step])


def run_charts(records: Sequence[RequestRecord], samples: Sequence[ServerSample], slo: Slo | None) -> list[Chart]:
    """Charts of one run, those without data left out."""
    ok = [r for r in records if r.outcome is Outcome.OK]
    found = []
    if ok:
        found += _distributions(ok, slo)
        found.append(_throughput(ok))
    if records:
        found.append(_timeline(records))
    found += _server(samples)
    return found


def _distributions(ok: Sequence[RequestRecord], slo: Slo | None) -> list[Chart]:
    kinds: list[tuple[str, str, str, Callable[[RequestRecord], Any]]] = [
        ("ttft", "time to first token", "from the intended send", request_ttft_s),
        ("ttft", "time to first token", "from the real send", lambda r: r.event_s[0] - r.sent_s),
        ("itl", "inter-token latency", "per token", request_itl_s),
        ("itl", "inter-token latency", "per chunk", lambda r: np.diff(np.array(r.event_s))),
        ("e2e", "end-to-end latency", "from the intended send", request_e2e_s),
    ]
    charts = []
    for metric in ("ttft", "itl", "e2e"):
        rows: list[dict[str, Any]] = []
        title = ""
        for name, text, series, value in kinds:
            if name != metric:
                continue
            title = text
            values = np.concatenate([np.atleast_1d(value(r)) for r in ok]) * 1e3
            if len(values):
                at = np.percentile(values, _PERCENTS)
                rows += [
                    {"ms": float(v), "share": float(p), "from": series} for v, p in zip(at, _PERCENTS, strict=True)
                ]
        if not rows:
            continue
        line = (
            alt.Chart(_rows(rows))
            .mark_line(interpolate="step-after")
            .encode(
                x=alt.X("ms:Q", title=f"{title}, ms", scale=alt.Scale(zero=False, nice=True)),
                y=alt.Y("share:Q", title="% of requests" if metric != "itl" else "% of tokens"),
                color=alt.Color("from:N", scale=alt.Scale(range=[COLOURS["blue"], COLOURS["orange"]])),
                tooltip=[alt.Tooltip("ms:Q", format=".2f"), alt.Tooltip("share:Q", format=".1f"), "from:N"],
            )
        )
        layers = [line, *_slo_marks(slo, metric, vertical=True)]
        chart = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)
        charts.append(_chart(f"{metric}-distribution", f"{title[0].upper()}{title[1:]}: share at or below", chart))
    return charts


def _slo_marks(slo: Slo | None, metric: str, *, vertical: bool) -> list[Any]:
    if slo is None:
        return []
    limits = [{"limit": o.limit_s * 1e3, "text": f"SLO {o.statistic}"} for o in slo.objectives if o.metric == metric]
    if not limits:
        return []
    base = alt.Chart(_rows(limits))
    place: dict[str, Any] = {"x": "limit:Q"} if vertical else {"y": "limit:Q"}
    rule = base.mark_rule(color=COLOURS["red"], strokeDash=[5, 4]).encode(**place)
    where: dict[str, Any] = {"y": alt.value(10), **place} if vertical else {"x": alt.value(WIDTH - 4), **place}
    text = base.mark_text(color=COLOURS["red"], align="right", dx=-4, dy=-6, fontSize=11).encode(text="text:N", **where)
    return [rule, text]


def _timeline(records: Sequence[RequestRecord]) -> Chart:
    rows = []
    for r in _thin(sorted(records, key=lambda r: r.intended_s)):
        shared = {"request": r.index, "outcome": r.outcome.value, "tokens": r.tokens_out}
        if r.outcome is Outcome.OK:
            rows.append({"from": r.intended_s, "to": r.event_s[0], "part": "first token", **shared})
            rows.append({"from": r.event_s[0], "to": r.event_s[-1], "part": "decode", **shared})
        else:
            rows.append({"from": r.intended_s, "to": max(r.end_s, r.intended_s), "part": "failed", **shared})
    count = len({row["request"] for row in rows})
    chart = (
        alt.Chart(_rows(rows))
        .mark_bar(height=max(1.0, min(8.0, 0.8 * 360 / max(count, 1))))
        .encode(
            x=alt.X("from:Q", title="seconds of the run"),
            x2="to:Q",
            y=alt.Y(
                "request:O",
                title="request, in order of its intended send",
                sort=None,
                axis=alt.Axis(labels=False, ticks=False),
            ),
            color=alt.Color("part:N", scale=_OK_COLOURS),
            tooltip=[
                "request:O",
                "part:N",
                "outcome:N",
                "tokens:Q",
                alt.Tooltip("from:Q", format=".3f"),
                alt.Tooltip("to:Q", format=".3f"),
            ],
        )
        .properties(width=WIDTH, height=360)
    )
    return _chart("timeline", "Each request: waiting for its first token, then decoding", chart)


def _throughput(ok: Sequence[RequestRecord]) -> Chart:
    at = np.concatenate([np.array(r.event_s) for r in ok])
    tokens = np.concatenate([np.array(r.event_tokens) for r in ok])
    end_s = float(at.max())
    edges = np.linspace(0.0, end_s, 61)
    sums, _ = np.histogram(at, edges, weights=tokens)
    width_s = edges[1] - edges[0]
    active = [sum(r.sent_s <= t < r.end_s for r in ok) for t in edges[:-1] + width_s / 2]
    rows = [
        {"s": float(t), "rate": float(v / width_s), "active": a}
        for t, v, a in zip(edges[:-1] + width_s / 2, sums, active, strict=True)
    ]
    base = alt.Chart(_rows(rows)).encode(x=alt.X("s:Q", title="seconds of the run"))
    rate = base.mark_area(opacity=0.35, color=COLOURS["blue"], line={"color": COLOURS["blue"]}).encode(
        y=alt.Y("rate:Q", title="output tokens/s", axis=alt.Axis(titleColor=COLOURS["blue"])),
        tooltip=[alt.Tooltip("s:Q", format=".2f"), alt.Tooltip("rate:Q", format=".0f"), "active:Q"],
    )
    running = base.mark_line(color=COLOURS["grey"], strokeDash=[4, 3], interpolate="step").encode(
        y=alt.Y("active:Q", title="requests in flight", axis=alt.Axis(titleColor=COLOURS["grey"]))
    )
    chart = alt.layer(rate, running).resolve_scale(y="independent").properties(width=WIDTH - 45, height=HEIGHT)
    return _chart("throughput", "Output tokens per second, and requests in flight", chart)


def _server(samples: Sequence[ServerSample]) -> list[Chart]:
    charts = []
    kept = _thin(list(samples))
    requests = [
        {"s": s.at_s, "n": value, "what": what}
        for s in kept
        for what, value in (("running", s.running), ("waiting", s.waiting))
        if value is not None
    ]
    if len(requests) > 2:
        chart = (
            alt.Chart(_rows(requests))
            .mark_line(interpolate="step-after")
            .encode(
                x=alt.X("s:Q", title="seconds of the run"),
                y=alt.Y("n:Q", title="requests in the server"),
                color=alt.Color("what:N", scale=alt.Scale(range=[COLOURS["blue"], COLOURS["orange"]])),
            )
            .properties(width=WIDTH, height=HEIGHT)
        )
        charts.append(_chart("queue", "Requests running and waiting, as the server reports", chart))
    usage = [{"s": s.at_s, "percent": 100 * s.kv_usage} for s in kept if s.kv_usage is not None]
    if len(usage) > 2 and any(row["percent"] for row in usage):
        chart = (
            alt.Chart(_rows(usage))
            .mark_area(opacity=0.35, color=COLOURS["green"], line={"color": COLOURS["green"]})
            .encode(
                x=alt.X("s:Q", title="seconds of the run"),
                y=alt.Y("percent:Q", title="KV cache in use, %", scale=alt.Scale(domain=[0, 100])),
            )
            .properties(width=WIDTH, height=HEIGHT)
        )
        charts.append(_chart("kv", "KV cache in use, as the server reports", chart))
    return charts


def load_charts(points: Sequence[tuple[float, dict[str, Any]]], x_name: str, slo: Slo | None) -> list[Chart]:
    """Latency and throughput against load; `points` are (load, summary)."""
    label = {"rate": "offered requests per second", "concurrency": "concurrent users"}.get(x_name, x_name)
    charts = []
    for key, title in (
        ("ttft_s", "time to first token"),
        ("itl_s", "inter-token latency"),
        ("e2e_s", "end-to-end latency"),
    ):
        rows = [
            {"x": x, "ms": s[key][name] * 1e3, "what": name, "low": low * 1e3, "high": high * 1e3}
            for x, s in points
            if s.get(key)
            for name in ("p50", "p90", "p99")
            for low, high in [s[key].get(f"{name}_interval", [s[key][name]] * 2)]
        ]
        if rows:
            chart = alt.layer(
                *_curve(rows, label, f"{title}, ms"), *_slo_marks(slo, key.removesuffix("_s"), vertical=False)
            )
            charts.append(
                _chart(
                    f"{key}-load",
                    f"{title[0].upper()}{title[1:]} against load",
                    chart.properties(width=WIDTH, height=HEIGHT),
                )
            )
    rows = [
        {"x": x, "ms": r["value"], "what": what, "low": r["low"], "high": r["high"]}
        for x, s in points
        for what, key in (("output tokens/s", "output_tokens_per_s"),)
        if (r := s.get(key))
    ]
    if rows:
        chart = alt.layer(*_curve(rows, label, "output tokens/s")).properties(width=WIDTH, height=HEIGHT)
        charts.append(_chart("throughput-load", "Output tokens per second against load", chart))
    if x_name == "rate":
        rows = [
            {"x": x, "ms": r["value"], "what": what, "low": r["low"], "high": r["high"]}
            for x, s in points
            for what, key in (("answered", "requests_per_s"), ("within the SLO", "goodput_per_s"))
            if (r := s.get(key))
        ]
        if rows:
            chart = alt.layer(*_curve(rows, label, "requests/s")).properties(width=WIDTH, height=HEIGHT)
            charts.append(_chart("answered-load", "Requests per second answered against offered", chart))
    return charts


def _curve(rows: Sequence[dict[str, Any]], x_title: str, y_title: str) -> list[Any]:
    base = alt.Chart(_rows(rows)).encode(
        x=alt.X("x:Q", title=x_title, scale=alt.Scale(zero=False, nice=True)),
        color=alt.Color(
            "what:N", sort=None, scale=alt.Scale(range=[COLOURS["blue"], COLOURS["orange"], COLOURS["red"]])
        ),
    )
    line = base.mark_line(point=True).encode(
        y=alt.Y("ms:Q", title=y_title), tooltip=["x:Q", alt.Tooltip("ms:Q", format=".4g"), "what:N"]
    )
    spread = base.mark_rule(opacity=0.6).encode(y="low:Q", y2="high:Q")
    return [line, spread]


def comparison_charts(found: dict[str, Any]) -> list[Chart]:
    """B over A for each figure, oriented so that right of 1 is better for B, with the margin."""
    rows = []
    for f in found["figures"]:
        ratio, low, high = f["ratio"], f["low"], f["high"]
        if f["better"] == "lower":
            ratio, low, high = 1 / ratio, 1 / high, 1 / low
        rows.append({"metric": f["metric"], "ratio": ratio, "low": low, "high": high, "verdict": f["verdict"]})
    order = [row["metric"] for row in rows]
    base = alt.Chart(_rows(rows)).encode(y=alt.Y("metric:N", sort=order, title=None, axis=alt.Axis(labelLimit=220)))
    shade = {"BETTER": "green", "PASS": "green", "INCONCLUSIVE": "grey", "WORSE": "red", "FAIL": "red"}
    used = [verdict for verdict in shade if any(row["verdict"] == verdict for row in rows)]
    colours = alt.Scale(domain=used, range=[COLOURS[shade[verdict]] for verdict in used])
    x_title = "B is worse  ←  ratio  →  B is better"
    scale = alt.Scale(type="log", nice=False, padding=12)
    spread = base.mark_rule(strokeWidth=2).encode(
        x=alt.X("low:Q", scale=scale, title=x_title), x2="high:Q", color=alt.Color("verdict:N", scale=colours)
    )
    dots = base.mark_point(filled=True, size=80).encode(
        x=alt.X("ratio:Q", scale=scale, title=x_title),
        color=alt.Color("verdict:N", scale=colours),
        tooltip=[
            "metric:N",
            alt.Tooltip("ratio:Q", format=".3f"),
            alt.Tooltip("low:Q", format=".3f"),
            alt.Tooltip("high:Q", format=".3f"),
            "verdict:N",
        ],
    )
    bars = [{"at": 1.0}] + ([{"at": 1 - found["margin"]}] if found.get("margin") else [])
    rule = alt.Chart(_rows(bars)).mark_rule(strokeDash=[5, 4], color=COLOURS["grey"]).encode(x="at:Q")
    chart = alt.layer(rule, spread, dots).properties(width=WIDTH, height=max(160, 26 * len(rows)))
    return [_chart("comparison", "Each figure with its 95 % interval", chart)]


def pair_chart(values: Sequence[tuple[int, str, float]], title: str, unit: str) -> Chart:
    """The runs of an interleaved comparison in order; `values` are (pair, side label, value)."""
    rows = [{"pair": pair, "side": side, "value": value} for pair, side, value in values]
    chart = (
        alt.Chart(_rows(rows))
        .mark_line(point=True)
        .encode(
            x=alt.X("pair:O", title="pair"),
            y=alt.Y("value:Q", title=unit, scale=alt.Scale(zero=False)),
            color=alt.Color(
                "side:N",
                sort=None,
                scale=alt.Scale(range=[COLOURS["blue"], COLOURS["orange"]]),
                legend=alt.Legend(labelLimit=380),
            ),
        )
        .properties(width=WIDTH, height=HEIGHT)
    )
    return _chart("pairs", title, chart)


def bar_chart(name: str, caption: str, rows: Sequence[dict[str, Any]], y_title: str, labels: Sequence[str]) -> Chart:
    """Bars with intervals: rows of label, value, low, high. `labels`: all of a page, so that colours stay."""
    order = list(dict.fromkeys(row["label"] for row in rows))
    base = alt.Chart(_rows(rows)).encode(
        x=alt.X("label:N", sort=order, title=None, axis=alt.Axis(labelAngle=-35, labelLimit=180))
    )
    bars = base.mark_bar(opacity=0.85).encode(
        y=alt.Y("value:Q", title=y_title),
        color=alt.Color("label:N", scale=alt.Scale(domain=list(labels), scheme="tableau10"), legend=None),
        tooltip=["label:N", *(alt.Tooltip(f"{end}:Q", format=".4g") for end in ("value", "low", "high"))],
    )
    spread = base.mark_rule(color="black").encode(y="low:Q", y2="high:Q")
    return _chart(name, caption, alt.layer(bars, spread).properties(width=WIDTH, height=HEIGHT))


def line_chart(
    name: str, caption: str, rows: Sequence[dict[str, Any]], x_title: str, y_title: str, labels: Sequence[str]
) -> Chart:
    """Lines with intervals: rows of x, value, low, high and label. `labels`: all of a page, so that colours stay."""
    ticks = sorted({row["x"] for row in rows})
    base = alt.Chart(_rows(rows)).encode(
        x=alt.X("x:Q", title=x_title, scale=alt.Scale(zero=False, nice=True), axis=alt.Axis(values=ticks)),
        color=alt.Color(
            "label:N",
            scale=alt.Scale(domain=list(labels), scheme="tableau10"),
            legend=alt.Legend(columns=3, labelLimit=200),
        ),
    )
    line = base.mark_line(point=True).encode(
        y=alt.Y("value:Q", title=y_title), tooltip=["label:N", "x:Q", alt.Tooltip("value:Q", format=".4g")]
    )
    spread = base.mark_rule(opacity=0.5).encode(y="low:Q", y2="high:Q")
    return _chart(name, caption, alt.layer(line, spread).properties(width=WIDTH, height=HEIGHT))
