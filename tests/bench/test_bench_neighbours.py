"""Other programs' use of the host: our own tree is not counted, a busy stranger is, and a comparison says so."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from headrace.bench import compare, neighbours

BUSY = {
    "schema": "1",
    "created": "2026-11-30T00:00:00Z",
    "model": "m",
    "workload": "w",
    "invalid_because": [],
    "notes": [],
    "requests": {
        "sent": 1,
        "ok": 1,
        "failed": 0,
        "by_outcome": {},
        "unsent": 0,
        "too_long_skipped": 0,
        "too_long_clipped": 0,
    },
    "failures": [],
    "duration_s": 1.0,
    "foreign_cores": 0.8,
    "output_tokens_per_s": {"value": 10.0, "low": 9.0, "high": 11.0},
    "valid": True,
    "host": {},
}


def looks(monkeypatch: pytest.MonkeyPatch, *seen: tuple[float, float, float]) -> None:
    values = iter(seen)
    monkeypatch.setattr(neighbours.Neighbours, "_look", staticmethod(lambda: next(values)))


def test_what_is_ours_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    looks(monkeypatch, (100.0, 10.0, 0.0), (115.0, 18.0, 10.0))
    assert neighbours.Neighbours().cores() == pytest.approx(0.7)


def test_never_below_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looks(monkeypatch, (100.0, 10.0, 0.0), (101.0, 12.0, 10.0))
    assert neighbours.Neighbours().cores() == 0.0


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc on this system")
def test_our_own_work_and_that_of_our_children_counts_as_ours() -> None:
    before = neighbours._own_s()
    child = os.fork()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert neighbours._own_s() - before >= 0.5


@pytest.mark.parametrize(("cores", "warned"), [(0.8, True), (0.05, False), (None, False)])
def test_a_comparison_warns(tmp_path: Path, cores: float | None, warned: bool) -> None:
    for side in "ab":
        (tmp_path / side).mkdir()
        (tmp_path / side / "summary.json").write_text(json.dumps(BUSY | {"foreign_cores": cores}))
    found = compare.compare_folders(tmp_path / "a", tmp_path / "b", margin=None)
    assert any("other programs" in warning for warning in found["warnings"]) == warned


async def test_waiting_ends_when_the_host_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_PROBE_S", 0.0)
    looks(monkeypatch, (0, 0, 0), (9, 0, 10), (9, 0, 10), (9.1, 0, 20))
    assert await neighbours.wait_until_idle(60.0) == pytest.approx(0.01)
