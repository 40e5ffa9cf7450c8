"""One HTML file with every chart inside it, and the same charts as PNG and SVG."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import HeadraceError, InvalidInput
from headrace.base.files import write_atomic
from headrace.base.units import format_bytes
from headrace.plan import charts
from headrace.plan.deployment import Inputs, describe, resolve
from headrace.plan.fit import fit
from headrace.plan.perf import perf
from headrace.plan.search import Candidate, Need, Rejected, layout_name, rank, tornado
from headrace.spec import hardware
from headrace.spec.prediction import Figure, readable
from headrace.spec.workload import preset

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:62rem;padding:1rem;color:#1d2430;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;width:100%;font-size:.92rem}
td,th{border-bottom:1px solid #dde3ea;padding:.3rem .5rem;text-align:left}td.n{text-align:right;font-variant-numeric:tabular-nums}
figure{margin:1rem 0;overflow-x:auto}svg{max-width:100%;height:auto}.note{color:#5a6472;font-size:.9rem}
"""


def write_report(
    inputs: Inputs, out: Path, preset_name: str = "premium-chat", pictures: Path | None = None
) -> list[Path]:
    """Write the report to `out`, and each picture as PNG and SVG into `pictures`. Returns the files written."""
    chosen = preset(preset_name)
    if out.is_dir():
        raise InvalidInput(f"{out} is a folder", field="report", remedy=f"name a file, such as {out / 'plan.html'}")
    resolve(inputs)  # what is wrong with the question is said, not replaced
    changes: dict[str, Any] = {"isl": inputs.isl or chosen.isl, "osl": inputs.osl or chosen.osl}
    inputs = msgspec.structs.replace(inputs, **changes, concurrency=inputs.concurrency or 16)
    memory = fit(inputs, (inputs.isl or 0) + (inputs.osl or 0))
    times = perf(inputs)
    prices = {} if inputs.gpu_price_usd_h is None else {hardware.find(inputs.gpu).id: inputs.gpu_price_usd_h}
    need = Need.from_preset(inputs.model, chosen, isl=inputs.isl, osl=inputs.osl, engine=inputs.engine, prices=prices)
    ranking = rank(need)
    named: list[tuple[str, Any]] = [
        ("memory", charts.memory_bar(memory)),
        ("kv", charts.kv_chart(inputs)),
        ("load", charts.load_chart(inputs, chosen.slo)),
        ("roofline", charts.roofline_chart(inputs)),
    ]
    if charts.pareto_rows(ranking):
        named.append(("pareto", charts.pareto_chart(ranking)))
    try:
        swings = tornado(inputs)
    except HeadraceError:
        swings = ()
    if swings:
        named.append(("sensitivity", charts.tornado_chart(swings)))
    drawn = {name: _svg(chart, name) for name, chart in named}
    body = [f"<h1>{html.escape(describe(resolve(inputs)))}</h1>"]
    body.append(
        f"<p>{memory.context:,} tokens per request, {inputs.concurrency} in flight. "
        f"<b>{'Fits' if memory.fits else 'Does not fit'}</b>: {html.escape(memory.reason)}."
        f"{'' if memory.fits else ' Times and dollars are those it would have if it did.'}</p>"
    )
    body.append(_figures(times, memory.figures))
    body.append(_section("Memory", drawn["memory"]))
    body.append(_table(("item", "bytes", "how"), ((i.name, format_bytes(i.nbytes), i.how) for i in memory.items)))
    body.append(
        "<details><summary>Derivation</summary><pre>" + html.escape("\n".join(memory.explain)) + "</pre></details>"
    )
    body.append(_section("KV cache", drawn["kv"]) + _section("Latency against load", drawn["load"]))
    body.append(_section("Roofline", drawn["roofline"]))
    body.append(_section(f"Ranking for {chosen.name}: {chosen.description}", drawn.get("pareto", "")))
    body.append(_ranking(ranking))
    if "sensitivity" in drawn:
        body.append(_section("Sensitivity", drawn["sensitivity"]))
    notes = dict.fromkeys((*memory.notes, *times.notes, *ranking.notes))
    body.append("<h2>Notes</h2><ul class=note>" + "".join(f"<li>{html.escape(n)}</li>" for n in notes) + "</ul>")
    page = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    page += f"<title>Headrace plan</title><style>{STYLE}</style><body>{''.join(body)}</body></html>"
    write_atomic(out, page)
    written = [out]
    if pictures is not None:
        for name, chart in named:
            write_atomic(pictures / f"{name}.svg", drawn[name])
            write_atomic(pictures / f"{name}.png", _png(chart))
            written += [pictures / f"{name}.svg", pictures / f"{name}.png"]
    return written


def _svg(chart: Any, prefix: str) -> str:
    """The chart as SVG whose element ids are unique within a page."""
    import vl_convert

    text: str = vl_convert.vegalite_to_svg(chart.to_dict())
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{prefix}-", text)


def _png(chart: Any) -> bytes:
    import vl_convert

    data: bytes = vl_convert.vegalite_to_png(chart.to_dict(), scale=2)
    return data


def _section(title: str, picture: str) -> str:
    figure = f"<figure>{picture}</figure>" if picture else ""
    return f"<h2>{html.escape(title)}</h2>{figure}"


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _figures(times: Any, memory: dict[str, Figure]) -> str:
    named = {
        "time to first token (ms)": times.ttft_ms,
        "time per output token (ms)": times.tpot_ms,
        "output tokens/s per GPU": times.output_tokens_per_s_per_gpu,
        "$ per million output tokens": times.usd_per_million_output_tokens,
        "users that fit": memory["max_users"],
    }
    rows = []
    for name, f in named.items():
        if f is None:
            rows.append((name, "no price known", "", ""))
        else:
            rows.append((name, readable(f.value), f"{readable(f.low)} to {readable(f.high)}", f.grade))
    return _table(("figure", "value", "90 % interval", "known by"), iter(rows))


def _ranking(ranking: Any) -> str:
    def usd(c: Any) -> str:
        figure = c.usd_per_million_output_tokens
        return "no price" if figure is None else f"{figure.value:.2f} ({figure.low:.2f} to {figure.high:.2f})"

    best = _table(
        ("deployment", "batch", "$/M output", "TTFT ms", "ms per token"),
        (
            (
                _deployment(c),
                str(c.concurrency),
                usd(c),
                f"{c.ttft_ms.value:.0f}",
                f"{c.tpot_ms.value:.1f}",
            )
            for c in ranking.candidates[:12]
        ),
    )
    worst = _table(
        ("rejected", "why", "smallest change"),
        ((_deployment(r), r.reason, r.change) for r in ranking.rejected),
    )
    return best + f"<details><summary>{len(ranking.rejected)} rejected</summary>{worst}</details>"


def _deployment(cut: Candidate | Rejected) -> str:
    return f"{cut.gpus} x {cut.gpu} {layout_name(cut)}, {cut.weights}, KV {cut.kv}"
