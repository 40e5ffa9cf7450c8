"""The planner's pictures, as Altair charts over rows computed by fit, perf and rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import msgspec

from headrace.base.units import GIB
from headrace.plan.calibration import shipped
from headrace.plan.costs.work import compute_precision
from headrace.plan.deployment import Inputs, resolve
from headrace.plan.fit import Fit, make_pool, rank_memory
from headrace.plan.perf import LOADS, engine_efficiency, perf_deployment
from headrace.plan.search import Ranking
from headrace.plan.workload import traffic, units
from headrace.spec.workload import Slo

WIDTH, HEIGHT = 560, 260


def _chart(rows: Sequence[dict[str, Any]], title: str) -> Any:
    return alt.Chart(alt.Data(values=list(rows)), title=title, width=WIDTH, height=HEIGHT)


def memory_rows(fit: Fit) -> list[dict[str, Any]]:
    """One row per item of the bill, weights joined, in GiB."""
    grouped: dict[str, float] = {}
    for item in fit.items:
        name = item.name.split(":")[0]
        if not item.inside:
            name += " (outside fraction)"
        grouped[name] = grouped.get(name, 0.0) + item.nbytes / GIB
    rest = fit.usable_bytes / GIB - sum(grouped.values())
    if rest > 0:
        grouped["unused"] = rest
    return [{"part": name, "gib": round(gib, 3), "order": i} for i, (name, gib) in enumerate(grouped.items())]


def memory_bar(fit: Fit) -> Any:
    """Stacked bar of one GPU's memory with a line at what the card has."""
    bar = (
        _chart(memory_rows(fit), f"Memory of one GPU: {fit.subject}")
        .mark_bar()
        .encode(
            x=alt.X("sum(gib):Q", title="GiB"),
            color=alt.Color("part:N", sort=None, title=None, scale=alt.Scale(scheme="tableau10")),
            order="order:Q",
            tooltip=["part:N", "gib:Q"],
        )
    )
    limit = (
        alt.Chart(alt.Data(values=[{"gib": fit.usable_bytes / GIB}]))
        .mark_rule(strokeDash=[4, 3], size=2)
        .encode(x="gib:Q")
    )
    return (bar + limit).properties(height=70)


def kv_rows(inputs: Inputs) -> list[dict[str, Any]]:
    """KV GiB per rank for contexts x users."""
    d = resolve(inputs)
    memory = rank_memory(d)
    pool = make_pool(d, memory.pool, memory.caches)
    longest = min(d.model.spec.max_context, 131_072)
    contexts = [1 << k for k in range(10, longest.bit_length()) if 1 << k <= longest]
    return [
        {
            "context": c,
            "users": str(u),
            "gib": round(pool.request_bytes(c) * u / GIB, 4),
            "pool": max(0.0, memory.pool / GIB),
        }
        for c in contexts
        for u in (1, 8, 32, 128)
    ]


def kv_chart(inputs: Inputs) -> Any:
    """KV memory against context for several numbers of users, with the pool's size."""
    rows = kv_rows(inputs)
    lines = (
        _chart(rows, "KV cache per GPU against context")
        .mark_line(point=True)
        .encode(
            x=alt.X("context:Q", scale=alt.Scale(type="log", base=2), title="context (tokens)"),
            y=alt.Y("gib:Q", scale=alt.Scale(type="log"), title="GiB per GPU"),
            color=alt.Color("users:N", sort=["1", "8", "32", "128"], title="users"),
        )
    )
    pool = [{"gib": rows[0]["pool"]}] if rows and rows[0]["pool"] > 0 else []
    return lines + alt.Chart(alt.Data(values=pool)).mark_rule(strokeDash=[4, 3], color="crimson").encode(y="gib:Q")


def load_rows(inputs: Inputs) -> list[dict[str, Any]]:
    """TTFT and time per token, with intervals, against concurrency."""
    rows = []
    for load in LOADS:
        p = perf_deployment(resolve(msgspec.structs.replace(inputs, concurrency=load)))
        for metric, figure in (("TTFT", p.ttft_ms), ("time per token", p.tpot_ms)):
            rows.append({"load": load, "metric": metric, "ms": figure.value, "low": figure.low, "high": figure.high})
    return rows


def load_chart(inputs: Inputs, slo: Slo) -> Any:
    """TTFT and time per token against load; the band is the 90 % interval, the dashed line the service level."""
    rows = load_rows(inputs)
    panels = []
    for metric, limit in (("TTFT", slo.ttft_ms), ("time per token", slo.tpot_ms)):
        own = [r for r in rows if r["metric"] == metric]
        x = alt.X("load:Q", scale=alt.Scale(type="log", base=2), title="requests in flight")
        base = _chart(own, f"{metric} against load")
        band = base.mark_area(opacity=0.25).encode(
            x=x, y=alt.Y("low:Q", scale=alt.Scale(type="log"), title="ms"), y2="high:Q"
        )
        panel = band + base.mark_line(point=True).encode(x=x, y=alt.Y("ms:Q", scale=alt.Scale(type="log")))
        if limit is not None:
            panel += (
                alt.Chart(alt.Data(values=[{"ms": limit}]))
                .mark_rule(strokeDash=[4, 3], color="crimson")
                .encode(y="ms:Q")
            )
        panels.append(panel.properties(width=WIDTH // 2 - 30, height=HEIGHT))
    return alt.hconcat(*panels)


def roofline_rows(inputs: Inputs) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(points of the roof, points of prefill and decode): FLOP per byte against TFLOP/s."""
    d = resolve(inputs)
    t = traffic(d)
    from headrace.plan.costs.roofline import step_seconds

    e, _ = engine_efficiency(d, shipped().main)
    peak, bandwidth = float(t.peaks.weight_flops), float(t.peaks.bandwidth)
    ridge = peak / bandwidth
    marks: list[dict[str, Any]] = []
    for name, w in (("prefill", t.loop.prefill), ("decode", t.loop.decode)):
        flops = w.gemm_flops + w.gemm16_flops + w.expert_flops + w.prefill_attention_flops + w.decode_attention_flops
        moved = w.gemm_bytes + w.expert_bytes + w.decode_attention_bytes + w.state_bytes
        seconds = float(step_seconds(w, t.peaks, e))
        marks.append({"phase": name, "intensity": flops / moved, "tflops": flops / seconds / 1e12})
    roof = [
        {"intensity": x, "tflops": min(peak, bandwidth * x) / 1e12}
        for x in (0.5, 2, ridge / 4, ridge, ridge * 4, max(ridge * 8, 8192, *(2 * mark["intensity"] for mark in marks)))
    ]
    return roof, marks


def roofline_chart(inputs: Inputs) -> Any:
    """The card's roof with where prefill and decode of this run lie (modelled points)."""
    d = resolve(inputs)
    roof, marks = roofline_rows(inputs)
    x = alt.X("intensity:Q", scale=alt.Scale(type="log"), title="FLOP per byte of memory traffic")
    y = alt.Y("tflops:Q", scale=alt.Scale(type="log"), title="TFLOP/s")
    unit = compute_precision(d.weights, units(d.gpu))
    title = f"Roofline of {d.gpu.name} ({unit}, datasheet); points are modelled"
    line = _chart(roof, title).mark_line().encode(x=x, y=y)
    points = (
        alt.Chart(alt.Data(values=marks))
        .mark_point(size=140, filled=True)
        .encode(x=x, y=y, color=alt.Color("phase:N", title=None))
    )
    text = alt.Chart(alt.Data(values=marks)).mark_text(dy=-14).encode(x=x, y=y, text="phase:N")
    return line + points + text


def pareto_rows(ranking: Ranking) -> list[dict[str, Any]]:
    """Latency against cost of all candidates; `front` marks those that nothing beats on both."""
    rows: list[dict[str, Any]] = [
        {
            "gpu": c.gpu,
            "label": f"{c.gpus} x {c.gpu} {c.weights}",
            "usd": c.usd_per_million_output_tokens.value,
            "tpot": c.tpot_ms.value,
        }
        for c in ranking.candidates
        if c.usd_per_million_output_tokens is not None
    ]
    best = math.inf
    for row in sorted(rows, key=lambda r: (r["usd"], r["tpot"])):
        row["front"] = row["tpot"] < best
        best = min(best, row["tpot"])
    return rows


def pareto_chart(ranking: Ranking) -> Any:
    """Time per token against $/M output tokens; filled points are not beaten on both."""
    return (
        _chart(pareto_rows(ranking), "Latency against cost of what meets the service levels")
        .mark_point(size=70)
        .encode(
            x=alt.X("usd:Q", scale=alt.Scale(type="log"), title="$ per million output tokens"),
            y=alt.Y("tpot:Q", title="ms per token"),
            color=alt.Color("gpu:N", title=None, scale=alt.Scale(scheme="tableau20")),
            fill=alt.condition(
                "datum.front",
                alt.Color("gpu:N", title=None, scale=alt.Scale(scheme="tableau20")),
                alt.value("transparent"),
            ),
            tooltip=["label:N", "usd:Q", "tpot:Q"],
        )
    )


def tornado_chart(swings: Sequence[Any]) -> Any:
    """What moves the price of a token."""
    rows = [{"what": s.what, "low": s.low, "high": s.high} for s in swings]
    bars = (
        _chart(rows, "What moves $ per million output tokens")
        .mark_bar()
        .encode(
            x=alt.X("low:Q", title="$ per million output tokens"), x2="high:Q", y=alt.Y("what:N", sort=None, title=None)
        )
    )
    return bars + alt.Chart(alt.Data(values=[{"base": swings[0].base}])).mark_rule().encode(x="base:Q")
