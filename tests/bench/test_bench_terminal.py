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


def test_a_log_is_told_now_and_then_how_far_a_run_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "SAID_EVERY_S", 0.0)
    with terminal.live(2) as watch:
        watch.record(ended(0))
        watch.record(ended(1, Outcome.CUT))
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[0].startswith("1/2 requests")
    assert lines[1].startswith("2/2 requests")
    assert "[1 failed]" in lines[1]


def test_of_each_kind_of_failure_the_first_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    failures = [
        {"index": 3, "outcome": "http_error", "http_status": 429, "error": '{"message": "[b]slow down"}'},
        {"index": 4, "outcome": "cut", "http_status": 200, "error": "the stream ended"},
        {"index": 5, "outcome": "cut", "http_status": 200, "error": "another"},
    ]
    requests = {"ok": 0, "sent": 3, "by_outcome": {"http_error": 1, "cut": 2, "timeout": 1}}
    summary = {
        "model": "m",
        "workload": "w",
        "duration_s": 1.0,
        "requests": requests,
        "failures": failures,
        "notes": [],
    }
    terminal._print_run(Console(), summary)
    said = capsys.readouterr().out
    assert 'http_error: 1, the first: 429 {"message": "[b]slow down"}' in said
    assert "cut: 2, the first: the stream ended" in said
    assert "timeout: 1\n" in said


def test_nothing_but_notes_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.live(1) as watch:
        watch.note("hello")
        watch.record(ended(0))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.strip() == "hello"
