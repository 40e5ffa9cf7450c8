"""What a run looks like in the terminal: progress on stderr only, figures on stdout, notes once."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from headrace.bench import terminal
from headrace.bench.records import Outcome, RequestRecord


def ended(index: int, outcome: Outcome = Outcome.OK) -> RequestRecord:
    return RequestRecord(
        index=index,
        intended_s=0.0,
        sent_s=0.0,
        end_s=1.0,
        event_s=[0.25, 0.5],
        event_tokens=[1.0, 1.0],
        output_tokens=2,
        outcome=outcome,
    )


def test_progress_follows_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    real = Console

    def console(**_given: Any) -> Console:
        return real(file=screen, force_terminal=True, width=100)

    monkeypatch.setattr(terminal, "Console", console)
    with terminal.live(3) as watch:
        watch.note("getting ready")
        watch.note("getting ready")
        for index in range(2):
            watch.record(ended(index))
        watch.record(ended(2, Outcome.CUT))
    text = screen.getvalue()
    assert text.count("getting ready") == 1
    assert "3/3 requests" in text
    assert "TTFT 250 ms" in text
    assert "[1 failed]" in text


def test_nothing_but_notes_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.live(1) as watch:
        watch.note("hello")
        watch.record(ended(0))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.strip() == "hello"
