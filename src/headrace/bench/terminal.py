"""What a run looks like in the terminal: a live line on stderr, and the figures at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.bench.records import Outcome, RequestRecord
from headrace.bench.run import Watch

SAID_EVERY_S = 30.0
"""How often a log is told how far a run is."""


@contextmanager
def live(total: int | None) -> Iterator[Watch]:
    """Notes as lines, and one that follows the run: on a terminal always, else written anew every `SAID_EVERY_S`. All on stderr."""
    console = Console(stderr=True)
    seen = {"done": 0, "ok": 0, "tokens": 0.0, "started_s": time.monotonic(), "said_s": time.monotonic()}
    last: list[float] = []

    def line() -> Text:
        passed_s = max(time.monotonic() - seen["started_s"], 1e-9)
        of = f"/{total}" if total else ""
        failed = seen["done"] - seen["ok"]
        parts = [f"{seen['done']:.0f}{of} requests", f"{seen['tokens'] / passed_s:.0f} tok/s"]
        if last:
            recent = sorted(last[-50:])
            parts.append(f"TTFT {recent[len(recent) // 2] * 1e3:.0f} ms")
        if failed:
            parts.append(f"[{failed:.0f} failed]")
        return Text(" · ".join(parts))

    with (
        Live(line(), console=console, refresh_per_second=4, transient=True)
        if console.is_terminal
        else _quiet() as shown
    ):

        def record(ended: RequestRecord) -> None:
            if not seen["done"]:
                seen["started_s"] = time.monotonic() - ended.end_s
            seen["done"] += 1
            if ended.outcome is Outcome.OK:
                seen["ok"] += 1
                seen["tokens"] += ended.tokens_out
                if ended.event_s:
                    last.append(ended.event_s[0] - ended.intended_s)
            if shown is not None:
                shown.update(line())
            elif time.monotonic() - seen["said_s"] >= SAID_EVERY_S:
                seen["said_s"] = time.monotonic()
                console.print(line(), soft_wrap=True)

        said: set[str] = set()

        def note(text: str) -> None:
            if text not in said:  # the runs of a series say many things again
                said.add(text)
                console.print(text, style="dim", highlight=False)

        yield Watch(note=note, record=record)


@contextmanager
def _quiet() -> Iterator[None]:
    yield None


_ROWS = (
    ("TTFT", "ttft_s"),
    ("ITL", "itl_s"),
    ("TPOT", "tpot_s"),
    ("E2E", "e2e_s"),
)
_RATES = (
    ("output tokens/s", "output_tokens_per_s"),
    ("prompt tokens/s", "input_tokens_per_s"),
    ("requests/s", "requests_per_s"),
    ("goodput requests/s", "goodput_per_s"),
    ("$ per million output tokens", "usd_per_million_output_tokens"),
)


def print_summary(summary: dict[str, Any], out: Path) -> None:
    """The figures of a run, of each point of a sweep, or of a search."""
    console = Console()
    if "points" in summary:
        _print_points(console, summary)
    elif "rate_rps" in summary:
        upper = f", fails at {summary['fails_at_rps']:.3g}" if summary["fails_at_rps"] else ""
        console.print(
            f"highest rate that keeps {summary['slo']}: {summary['rate_rps']:.3g} requests/s{upper} {summary['note']}"
        )
    else:
        _print_run(console, summary)
    console.print(f"{out}", style="dim", highlight=False)


def _print_run(console: Console, summary: dict[str, Any]) -> None:
    requests = summary["requests"]
    console.print(
        f"{summary['model']} · {summary['workload']} · {requests['ok']} of {requests['sent']} requests in "
        f"{summary['duration_s']:.1f} s"
    )
    table = Table("ms", "mean", "p50", "p90", "p99", "95 % of the mean", box=None, pad_edge=False)
    for name, key in _ROWS:
        if figures := summary.get(key):
            spread = figures.get("mean_interval")
            shown = f"{spread[0] * 1e3:.2f} – {spread[1] * 1e3:.2f}" if spread else ""
            table.add_row(name, *(_in_ms(figures, s, 2) for s in ("mean", "p50", "p90", "p99")), shown)
    console.print(table)
    for name, key in _RATES:
        if rate := summary.get(key):
            interval = f" ({rate['low']:.4g} – {rate['high']:.4g})" if rate["low"] < rate["high"] else ""
            console.print(f"{name}: {rate['value']:.4g}{interval}", highlight=False)
    if slo := summary.get("slo"):
        console.print(f"SLO {slo['objective']}: {'kept' if slo['kept'] else 'missed: ' + '; '.join(slo['misses'])}")
    for row in summary.get("plan", {}).get("figures", []):
        console.print(
            f"plan {row['name']}: {row['planned']:.4g}, measured {row['measured']:.4g}, ratio {row['ratio']:.2f}"
        )
    for outcome, count in requests["by_outcome"].items():
        if outcome != Outcome.OK.value:
            first: dict[str, Any] = next((f for f in summary["failures"] if f["outcome"] == outcome), {})
            status, said = first.get("http_status"), first.get("error") or ""
            told = f"{status} {said}" if status not in (None, 0, 200) else said
            console.print(
                f"{outcome}: {count}" + f", the first: {told}" * bool(told), style="red", highlight=False, markup=False
            )
    for note in summary["notes"]:
        console.print(note, style="dim", highlight=False)


def _print_points(console: Console, summary: dict[str, Any]) -> None:
    table = Table(
        summary["x_name"], "tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "failed", box=None, pad_edge=False
    )
    for point in summary["points"]:
        one = point["summary"]
        times = [_ms(one, key, name) for key in ("ttft_s", "itl_s") for name in ("p50", "p99")]
        rate = (one["output_tokens_per_s"] or {}).get("value", 0.0)
        table.add_row(f"{point['x']:g}", f"{rate:.4g}", *times, str(one["requests"]["failed"]))
    console.print(table)


def _ms(summary: dict[str, Any], key: str, name: str) -> str:
    return _in_ms(summary.get(key) or {}, name, 1)


def _in_ms(figures: dict[str, float], name: str, decimals: int) -> str:
    """A time in seconds, told in ms; results that were taken over need not have every statistic."""
    return f"{figures[name] * 1e3:.{decimals}f}" if name in figures else "-"


def print_comparison(found: dict[str, Any]) -> None:
    """Ratios of B over A with intervals, and the verdict."""
    console = Console()
    console.print(f"A {found['a']['label']}\nB {found['b']['label']}", highlight=False)
    table = Table("figure", "A", "B", "B/A", "95 %", "verdict", box=None, pad_edge=False)
    for f in found["figures"]:
        spread = f"{f['low']:.3f} – {f['high']:.3f}"
        table.add_row(f["metric"], f"{f['a']:.4g}", f"{f['b']:.4g}", f"{f['ratio']:.3f}", spread, f["verdict"])
    console.print(table)
    console.print(
        f"{found['verdict']} on {found['primary']}; smallest effect that could have been seen: {found['smallest_effect']:.1%}"
    )
    for warning in found["warnings"]:
        console.print(warning, style="yellow", highlight=False)


def print_ladder(found: dict[str, Any]) -> None:
    """Throughput, speed-up and latency of each step in each cell."""
    console = Console()
    table = Table("step", "users", "context", "tok/s", "against naive", "TTFT ms", "ITL ms", box=None, pad_edge=False)
    for step in found["steps"]:
        if step["status"] != "measured":
            table.add_row(step["label"], "", "", step["status"], step["reason"][:60], "", "")
        for cell in step["cells"]:
            speed = cell.get("speedup")
            table.add_row(
                step["label"],
                str(cell["users"]),
                str(cell["context"]),
                f"{cell['output_tokens_per_s']['value']:.4g}",
                f"{speed['value']:.2f} ({speed['low']:.2f} – {speed['high']:.2f})" if speed else "",
                f"{cell['ttft_mean_s']['value'] * 1e3:.4g}",
                f"{cell['itl_mean_s']['value'] * 1e3:.4g}" if "itl_mean_s" in cell else "",
            )
    console.print(table)
