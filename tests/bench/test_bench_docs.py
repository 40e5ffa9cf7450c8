"""docs/bench.md names only verbs, options, workloads, targets and summary keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from headrace.bench.metrics import all_metrics
from headrace.bench.records import Outcome
from headrace.bench.targets import TARGETS
from headrace.bench.workloads import WORKLOADS
from headrace.cli import bench

TEXT = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")


def commands() -> dict[str, set[str]]:
    app = typer.Typer()
    bench.register(app)
    app.callback()(lambda: None)
    group = get_command(app).commands["bench"].commands  # type: ignore[attr-defined]
    return {
        name: {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
        for name, command in group.items()
    }


def test_every_verb_and_option_exists() -> None:
    known = commands()
    every = set().union(*known.values())
    for line in re.findall(r"^headrace bench .*$", TEXT, re.M):
        verb = line.split()[2]
        assert verb in known, verb
        for option in re.findall(r"(?<!\S)(--[a-z-]+)", line):
            assert option in known[verb], f"{verb} {option}"
    for option in re.findall(r"`(--[a-z-]+)", TEXT):
        assert option in every or option in ("--save-result", "--save-detailed"), option


def test_everything_registered_is_described() -> None:
    for name in WORKLOADS.names():
        assert f"`{name}`" in TEXT, name
    for name in TARGETS.names():
        assert name in TEXT, name
    for metric in all_metrics():
        assert f"`{metric.key}`" in TEXT, metric.key
    for outcome in Outcome:
        assert outcome is Outcome.OK or f"`{outcome.value}`" in TEXT, outcome


@pytest.mark.parametrize("anchor", re.findall(r"\]\(#([a-z-]+)\)", TEXT))
def test_links_lead_somewhere(anchor: str) -> None:
    titles = re.findall(r"^## (.*)$", TEXT, re.M)
    assert anchor in {re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-") for title in titles}
