"""A page of charts and tables in one HTML file that needs nothing from anywhere."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from headrace.base.files import data_dir, write_atomic
from headrace.bench.charts import Chart


def vega_bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script. Bundling takes seconds, so the result is kept in the data folder."""
    import vl_convert

    version = vl_convert.get_vegalite_versions()[-1]
    kept = data_dir() / "cache" / f"vega-{metadata.version('vl-convert-python')}-{version}.js"
    if kept.exists():
        return kept.read_text(encoding="utf-8")
    script: str = vl_convert.javascript_bundle(None, vl_version=version)  # type: ignore[arg-type]
    try:
        write_atomic(kept, script)
    except OSError:  # a read-only home costs time, not the report
        return script
    return script


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, numeric: bool = True) -> str:
    """An HTML table; the first column is text, the others are right-aligned where `numeric`."""
    kind = ' class="numbers"' if numeric else ""
    titles = "".join(f"<th>{html.escape(str(text))}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table{kind}><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def cards(items: Sequence[tuple[str, str, str]]) -> str:
    """Headline figures: (name, value, interval)."""
    parts = (
        f'<div class="card"><div class="name">{html.escape(name)}</div><div class="value">{html.escape(value)}</div>'
        f'<div class="spread">{html.escape(spread)}</div></div>'
        for name, value, spread in items
    )
    return f'<div class="cards">{"".join(parts)}</div>'


def section(title: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>" if body else ""


def figures(charts: Sequence[Chart]) -> str:
    """Places for charts; the page's script draws them."""
    parts = (
        f'<figure><div id="chart-{html.escape(c.name)}"></div><figcaption>{html.escape(c.caption)}</figcaption></figure>'
        for c in charts
    )
    return f'<div class="charts">{"".join(parts)}</div>' if charts else ""


def banner(kind: str, text: str) -> str:
    """A coloured line: kind is good, bad or plain."""
    return f'<p class="banner {kind}">{html.escape(text)}</p>'


def write_page(path: Path, title: str, subtitle: str, body: str, charts: Sequence[Chart]) -> None:
    """Write the page with every script and style inside it."""
    specs = json.dumps({c.name: c.spec for c in charts}).replace("</", "<\\/")
    style = files("headrace.bench").joinpath("page.css").read_text(encoding="utf-8")
    bundle = vega_bundle().replace("</script", "<\\/script") if charts else ""
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><style>{style}</style></head>
<body><main><header><h1>{html.escape(title)}</h1><p class="subtitle">{html.escape(subtitle)}</p></header>
{body}</main>
<script>{bundle}</script>
<script>
const specs = {specs};
const options = {{actions: {{export: true, source: false, compiled: false, editor: false}}, renderer: "svg"}};
const draw = Object.entries(specs).map(([name, spec]) =>
  vegaEmbed(document.getElementById("chart-" + name), spec, options));
Promise.all(draw).then(
  () => document.body.setAttribute("data-drawn", String(draw.length)),
  (error) => document.body.setAttribute("data-failed", String(error)));
</script></body></html>
"""
    write_atomic(path, text)


def write_pngs(folder: Path, charts: Sequence[Chart], scale: float = 2.0) -> list[Path]:
    """Each chart as a PNG file `NAME.png` in `folder`."""
    import vl_convert

    written = []
    for chart in charts:
        path = folder / f"{chart.name}.png"
        write_atomic(path, vl_convert.vegalite_to_png(chart.spec, scale=scale))
        written.append(path)
    return written
