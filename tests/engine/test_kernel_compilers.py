"""Kernels that other processes compile are those that threads compile; processes that die, hang or are refused cost no kernel."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import kernel_device  # noqa: F401  (before any kernel)
import pytest

KERNELS = 4


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict:
    """What `compiled_apart` says of each of its scenarios."""
    compiled = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TRITON_CACHE_DIR")
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compiled_apart.py"), str(tmp_path_factory.mktemp("apart"))],
        capture_output=True, text=True, check=False, timeout=300, env=compiled,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def scenario(told, request) -> dict:
    found = told[request.param]
    assert "failed" not in found, found["failed"]
    return found


def named(name: str):
    return pytest.mark.parametrize("scenario", [name], indirect=True)


ALL = ["processes", "killed", "stopped", "too_long", "first_copy_gone", "first_copy_stopped", "no_fork", "cached"]


@pytest.mark.parametrize("scenario", ALL, indirect=True)
def test_every_kernel_is_launched_and_is_the_one_that_threads_compile(told, scenario):
    assert len(told["threads"]["cubins"]) == KERNELS
    assert scenario["cubins"] == told["threads"]["cubins"]
    assert scenario["launched"] >= KERNELS


@pytest.mark.parametrize(
    "scenario", [*ALL, "few_cores", "interpreted", "refused", "not_found", "sockets"], indirect=True
)
def test_no_process_stays(scenario):
    assert scenario["left"] == []


@named("processes")
def test_all_are_compiled_elsewhere(scenario):
    assert scenario["compiled"] == KERNELS
    assert scenario["here"] == scenario["lost"] == 0
    assert scenario["copies"] == 2
    assert not scenario["warnings"]
    assert scenario["note"] == "4 kernels were compiled by 2 processes"


@named("cached")
def test_nothing_begins_where_the_cache_has_all(scenario):
    assert scenario["copies"] == scenario["compiled"] == scenario["here"] == 0
    assert scenario["note"] == "kernels came from the cache"


@named("killed")
def test_killed_processes_are_replaced_by_threads(scenario):
    assert (scenario["compiled"], scenario["here"], scenario["lost"]) == (1, KERNELS - 1, 2)
    assert all("has died or took too long" in line for line in scenario["warnings"])
    assert len(scenario["warnings"]) == 2
    assert "2 were lost" in scenario["note"]


@named("stopped")
def test_a_process_that_hangs_is_left(scenario):
    assert (scenario["compiled"], scenario["here"], scenario["lost"]) == (1, KERNELS - 1, 1)
    assert "did not answer" in scenario["warnings"][0]


@named("too_long")
def test_a_process_ends_itself_where_a_kernel_takes_too_long(scenario):
    assert (scenario["compiled"], scenario["here"], scenario["lost"]) == (0, KERNELS, 1)


@pytest.mark.parametrize("scenario", ["first_copy_gone", "first_copy_stopped"], indirect=True)
def test_processes_that_never_begin(scenario):
    assert (scenario["compiled"], scenario["here"], scenario["lost"]) == (0, KERNELS, 2)
    assert len(scenario["warnings"]) == 2


@named("no_fork")
def test_a_system_that_refuses_processes(scenario):
    assert scenario["here"] == KERNELS
    assert "cannot be copied (out of processes)" in scenario["note"]


@named("few_cores")
def test_few_cores_have_no_use_for_them(scenario):
    assert "of 2 cores there are too few" in scenario["note"]


@named("interpreted")
def test_the_interpreter_has_no_use_for_them(scenario):
    assert (scenario["copies"], scenario["launched"]) == (0, 0)
    assert "TRITON_INTERPRET lets nothing be compiled" in scenario["note"]


@named("refused")
def test_a_kernel_that_does_not_compile_says_so_where_it_is_launched(scenario):
    assert "too small" in scenario["said"]
    assert (scenario["compiled"], scenario["lost"]) == (KERNELS, 0)
    assert "too small" in scenario["warnings"][0]


@named("not_found")
def test_a_kernel_that_copies_do_not_have_is_compiled_by_a_thread(scenario):
    assert (scenario["compiled"], scenario["here"], scenario["launched"]) == (0, 1, 1)
    assert not scenario["warnings"]


@named("orphaned")
def test_copies_end_with_a_process_that_is_killed(scenario):
    assert (scenario["copies"], scenario["left"]) == (2, [])


@named("sockets")
def test_copies_hold_no_socket_open(scenario):
    assert scenario["closed"]


@named("keys")
def test_names_in_the_cache_do_not_depend_on_the_order(scenario):
    one, other = scenario["told"]
    assert one == other
    assert one[0] > 50
    assert len(set(one[1].values())) == 3


def test_a_runner_compiles_while_they_serve_and_captures_without_them():
    from headrace.engine.cuda.runner import Runner

    order = []

    @contextlib.contextmanager
    def serving():
        order.append("serve")
        yield
        order.append("end")

    runner = SimpleNamespace(
        _cuda=True, _one_group=True, _compile=lambda *given: order.append(("compile", *given)),
        _warm_up_decode=lambda graphs: order.append("decode"), warm_up_mixed=lambda graphs: order.append("mixed"),
    )  # fmt: skip
    Runner.warm_up(runner, graphs=False, compilers=SimpleNamespace(serving=serving, count=7))
    assert order == ["serve", ("compile", True, 7), "end", "decode", "mixed"]
    order.clear()
    Runner.warm_up(runner, graphs=False)
    assert order == [("compile", True, 0), "decode", "mixed"]


@pytest.mark.parametrize(("told", "cores"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 64), (None, 64)])
def test_cores_are_those_that_the_control_group_has_time_for(tmp_path, monkeypatch, told, cores):
    from headrace.engine.kernels import compilers

    if told is not None:
        (tmp_path / "cpu.max").write_text(told + "\n")
    monkeypatch.setattr(compilers, "CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(compilers.os, "sched_getaffinity", lambda pid: set(range(64)))
    assert compilers.usable_cores() == cores
