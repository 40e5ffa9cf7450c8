"""The command: JSON on stdout, exit codes 0, 2 and 3, the option named; one whole way through real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import typer

from headrace.bench.planned import beside, read_prediction
from headrace.bench.targets import free_port
from headrace.cli.bench import _finish
from headrace.spec.prediction import Figure, Prediction


def bench(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "headrace.cli.main", "bench", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env={**os.environ, **(env or {})})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    line = [
        sys.executable,
        "-m",
        "headrace.cli.main",
        "bench",
        "golden",
        "--port",
        str(port),
        "--ttft-ms",
        "5",
        "--itl-ms",
        "1",
    ]
    server = subprocess.Popen([*line, "--tokens-per-chunk", "1"], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    assert "golden server" in server.stderr.readline()
    yield f"http://127.0.0.1:{port}"
    server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0


def test_the_whole_way(url: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    plan = tmp_path / "plan.json"
    figure = {"value": 8.0, "low": 4.0, "high": 16.0, "grade": "fitted"}
    plan.write_text(json.dumps({"subject": "golden on nothing", "ttft_ms": figure, "tpot_ms": figure, "more": 1}))
    done = bench(
        "run", "--url", url, "--model", "golden", "--workload", "azure-conv", "--requests", "6", "--concurrency", "3",
        "--seed", "0", "--out", str(out), "--json", "--scale", "0.02", "--max-client-delay", "2000", "--plan", str(plan),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((out / "summary.json").read_text())
    for key in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
        assert {"mean", "p50", "p90", "p99"} <= summary[key].keys()
    assert {"value", "low", "high"} <= summary["output_tokens_per_s"].keys()
    assert summary["requests"]["ok"] == 6
    assert summary["headroom"]["ok"]
    assert [row["name"] for row in summary["plan"]["figures"]] == ["ttft_ms", "tpot_ms"]
    page = (out / "report.html").read_text()
    assert "vegaEmbed" in page
    assert "golden on nothing" in page
    assert 'src="http' not in page
    assert 'href="http' not in page

    again = bench("compare", str(out), str(out), "--json", "--margin", "5%")
    found = json.loads(again.stdout)
    assert (found["ratio"], found["interleaved"], found["same_work"]) == (1.0, False, True)
    assert found["verdict"] in ("PASS", "INCONCLUSIVE")
    assert bench("compare", str(out), str(out), "--out", str(tmp_path / "c")).returncode == 0
    assert (tmp_path / "c" / "report.html").exists()
    written = bench("report", str(out), "--png").stdout.split()
    assert len(written) > 3
    assert all(Path(path).read_bytes()[:4] == b"\x89PNG" for path in written[1:])

    full = bench("run", "--url", url, "--out", str(out))
    assert full.returncode == 2
    assert "--out" in full.stderr


@pytest.mark.parametrize("verb", ["run", "sweep", "ab"])
def test_a_killed_command_is_resumed(url: str, tmp_path: Path, verb: str) -> None:
    out = tmp_path / verb
    load = ["--isl", "8", "--osl", "40", "--requests", "12", "--warmup", "0", "--no-headroom", "--model", "golden"]
    key = ["--api-key", "top-secret", "--header", "X-Api-Key: hidden", "--header", "X-Open: seen"]
    arguments = {
        "run": ["run", "--url", url, "--concurrency", "1"],
        "sweep": ["run", "--url", url, "--concurrency", "1,2,3"],
        "ab": ["ab", "--a", url, "--b", url + "/", "--concurrency", "2", "--pairs", "4", "--margin", "50%"],
    }[verb]
    line = [sys.executable, "-m", "headrace.cli.main", "bench", *arguments, *load, *key, "--out", str(out), "--json"]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    records = out / {"run": "records.jsonl", "sweep": "concurrency-2/records.jsonl", "ab": "b-2/records.jsonl"}[verb]
    while not (records.exists() and records.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, process.stderr
        time.sleep(0.01)
    process.kill()
    process.communicate()
    stored = b"".join(path.read_bytes() for path in out.rglob("*.json*"))
    assert b"top-secret" not in stored
    assert b"hidden" not in stored
    before = records.read_bytes()[: records.read_bytes().rfind(b"\n") + 1]
    done = bench("resume", str(out), "--json")
    assert done.returncode == 2
    assert "X-Api-Key" in done.stderr
    done = bench("resume", str(out), "--json", "--header", "X-Api-Key: hidden", "--api-key", "top-secret")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if verb == "run":
        assert records.read_bytes().startswith(before), "what was recorded is not touched"
        assert found["requests"]["ok"] == 12
        assert found["resumed_at_s"]
    elif verb == "sweep":
        assert [p["summary"]["requests"]["ok"] for p in found["points"]] == [12, 12, 12]
    else:
        assert found["interleaved"]
        assert found["margin"] == 0.5
    if verb != "run":
        aside = records.parent.with_name(records.parent.name + ".interrupted-1")
        assert (aside / records.name).read_bytes().startswith(before)
    assert (out / "report.html").exists()


@pytest.mark.parametrize("resumable", [True, False])
def test_a_resume_is_offered_where_there_is_one(resumable: bool, capsys: pytest.CaptureFixture[str]) -> None:
    async def told_to_end() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
        return {}

    with pytest.raises(typer.Exit):
        _finish(told_to_end(), resumable=resumable)
    said = capsys.readouterr().err
    assert "ended by SIGTERM" in said
    assert ("bench resume" in said) is resumable


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_told_to_end_stops_what_it_started(url: str, tmp_path: Path, number: signal.Signals) -> None:
    """A started engine (here a script in the place of llama-server) does not outlive the command."""
    server = tmp_path / "llama-server"
    server.write_text(
        f"#!{sys.executable}\nimport os, sys\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'headrace.cli.main', 'bench', 'golden', '--ttft-ms', '200', "
        "'--port', sys.argv[sys.argv.index('--port') + 1]])\n"
    )
    server.chmod(0o755)
    out = tmp_path / "run"
    line = [
        sys.executable, "-m", "headrace.cli.main", "bench", "run", "--target", f"llama-cpp:bin={server}", "--model", "x.gguf",
        "--no-headroom", "--requests", "10000", "--concurrency", "2", "--osl", "2", "--out", str(out),
    ]  # fmt: skip
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with SIGINT ignored, which would be inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not ((out / "records.jsonl").exists() and (out / "records.jsonl").read_bytes()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 128 + number
    assert "Traceback" not in said
    assert f"ended by {number.name}" in said
    assert "bench resume" in said
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert not json.loads((out / "run.json").read_text())["finished"], "it can be resumed"


def test_an_invalid_run_is_code_3_and_says_why(tmp_path: Path) -> None:
    done = bench("run", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "x"), "--json")
    assert done.returncode == 3
    assert "not valid" in done.stderr
    assert done.stdout == ""
    missing = bench("run", "--target", "vllm:bin=/nowhere/vllm", "--model", "m", "--out", str(tmp_path / "y"))
    assert missing.returncode == 3
    assert "not installed here" in missing.stderr


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["run"], "--out"),
        (["run", "--out", "OUT"], "--url"),
        (["run", "--out", "OUT", "--url", "ftp://x"], "--url"),
        (["run", "--out", "OUT", "--url", "http://h:abc"], "--url"),
        (["run", "--out", "OUT", "--url", "http://h:99999"], "--url"),
        (["run", "--out", "OUT", "--url", "http://h", "--concurrency", "1,2,0"], "--concurrency"),
        (["run", "--out", "OUT", "--url", "http://h", "--rate", "1,-2"], "--rate"),
        (["run", "--out", "OUT", "--url", "http://h", "--find-max", "--slo", "e2e_p90<2s", "--rate", "1:5"], "--rate"),
        (["run", "--out", "OUT", "--url", "http://h", "--workload", "file", "--file", "/nowhere"], "--file"),
        (["run", "--out", "OUT", "--target", "headrace", "--model", "m", "--workload", "nope"], "--workload"),
        (["ab", "--out", "OUT", "--a", "headrace", "--b", "naive", "--rate", "0"], "--rate"),
        (["run", "--out", "OUT", "--url", "http://h", "--workload", "nope"], "--workload"),
        (["run", "--out", "OUT", "--url", "http://h", "--set", "colour=red"], "--set colour"),
        (["run", "--out", "OUT", "--url", "http://h", "--isl", "x"], "--set isl"),
        (["run", "--out", "OUT", "--url", "http://h", "--rate", "1", "--concurrency", "2"], "--concurrency"),
        (["run", "--out", "OUT", "--url", "http://h", "--requests", "0"], "--requests"),
        (["run", "--out", "OUT", "--url", "http://h", "--usd-per-hour", "-1"], "--usd-per-hour"),
        (["run", "--out", "OUT", "--url", "http://h", "--too-long", "cut"], "--too-long"),
        (["run", "--out", "OUT", "--url", "http://h", "--endpoint", "embeddings"], "--endpoint"),
        (["run", "--out", "OUT", "--url", "http://h", "--slo", "fast"], "--slo"),
        (["run", "--out", "OUT", "--url", "http://h", "--find-max"], "--slo"),
        (["run", "--out", "OUT", "--url", "http://h", "--header", "x"], "--header"),
        (["run", "--out", "OUT", "--url", "http://h", "--plan", "/nowhere"], "--plan"),
        (["run", "--out", "OUT", "--url", "http://h", "--model", "mistral-7b", "--plan", "abacus"], "--plan"),
        (["run", "--out", "OUT", "--url", "http://h", "--model", "no/model", "--plan", "h100-sxm-80"], "--plan"),
        (["run", "--out", "OUT", "--url", "http://h", "--model", "mistral-7b", "--plan", "h100-sxm-80:x=1"], "--plan"),
        (["run", "--out", "OUT", "--url", "http://h", "--rate", "1,2", "--plan", "h100-sxm-80"], "--plan"),
        (["run", "--out", "OUT", "--url", "http://h", "--rate", "1,2", "--repeats", "2"], "--repeats"),
        (["ab", "--out", "OUT", "--a", "http://h", "--b", "http://i", "--pairs", "3"], "--pairs"),
        (["ab", "--out", "OUT", "--a", "http://h", "--b", "http://i", "--margin", "lots"], "--margin"),
        (["compare", "/nowhere", "/nowhere"], "DIR"),
        (["ladder", "m", "--out", "OUT", "--users", "x"], "--users"),
        (["golden", "--port", "70000"], "--port"),
        (["golden", "--itl-ms", "-1"], "--itl-ms"),
        (["golden", "--usage", "x"], "--usage"),
        (["offline", "m", "--isl", "9:3"], "--isl"),
        (["resume", "/nowhere"], "DIR"),
        (["import", "/nowhere", "--out", "OUT"], "FILE"),
    ],
)
def test_bad_input_is_code_2_and_names_the_option(arguments: list[str], option: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from headrace.base.errors import InvalidInput
    from headrace.cli.main import build

    given = [str(tmp_path / "o") if a == "OUT" else a for a in arguments]
    result = CliRunner().invoke(build("bench"), ["bench", *given])
    if isinstance(result.exception, InvalidInput):  # what `main` turns into code 2 and this text
        assert option in str(result.exception)
    else:
        assert result.exit_code == 2
        assert option in result.output


@pytest.mark.parametrize(("option", "value"), [("--pairs", "3"), ("--pairs", "2"), ("--metric", "speed")])
def test_a_comparison_that_cannot_be_judged_is_refused_before_anything_is_started(
    option: str, value: str, tmp_path: Path
) -> None:
    from headrace.base.errors import InvalidInput
    from headrace.cli.main import build

    targets = [
        "bench",
        "ab",
        "--a",
        "headrace",
        "--b",
        "headrace",
        "--model",
        "smollm2-135m",
        "--out",
        str(tmp_path / "o"),
    ]
    with pytest.raises(InvalidInput) as refused:
        build("bench")([*targets, option, value])
    assert refused.value.field == option
    assert not (tmp_path / "o").exists()


def test_a_command_that_was_refused_does_not_use_up_its_folder(tmp_path: Path) -> None:
    from headrace.base.errors import InvalidInput
    from headrace.cli.main import build

    command = ["bench", "run", "--url", "http://127.0.0.1:1", "--out", str(tmp_path / "o")]
    for wrong in ("nope", "never"):
        with pytest.raises(InvalidInput, match=wrong) as refused:
            build("bench")([*command, "--workload", wrong])
        assert refused.value.field == "--workload"
    assert not (tmp_path / "o").exists()
    for _ in range(2):  # nobody answers there: that is known only once the run has begun
        with pytest.raises(SystemExit):
            build("bench")(command)
        assert [path.name for path in (tmp_path / "o").iterdir()] == ["job.json"]
    (tmp_path / "o" / "records.jsonl").write_text("")
    with pytest.raises(InvalidInput, match="not a new or empty folder"):
        build("bench")(command)


def test_a_request_without_a_time_ends_a_run_by_times_with_code_2(url: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "a", "arrived_at": 1}\n{"prompt": "b"}\n')
    load = ["--workload", "file", "--file", str(mine), "--arrivals", "trace", "--no-headroom", "--warmup", "0"]
    done = bench("run", "--url", url, "--model", "golden", *load, "--out", str(tmp_path / "o"))
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("headrace: --arrivals: session 1 has no arrival time")


def test_code_2_in_a_real_process(tmp_path: Path) -> None:
    done = bench("run", "--url", "http://h", "--workload", "nope", "--out", str(tmp_path / "o"))
    assert done.returncode == 2
    assert "--workload" in done.stderr
    assert "azure-conv" in done.stderr


def test_the_planner_is_asked_for_the_run_that_was_made() -> None:
    from headrace.bench.planned import traffic_of
    from headrace.cli.bench import _prediction

    summary = {
        "requests": {"ok": 10}, "tokens": {"prompt": 10_240, "output": 1280}, "duration_s": 10.0,
        "e2e_s": {"mean": 4.0, "count": 40}, "prefix_hit": {"share": 0.25},
    }  # fmt: skip
    assert traffic_of(summary) == {"isl": 1024, "osl": 128, "concurrency": 16, "prefix_hit_rate": 0.25}
    found = _prediction("h100-sxm-80:weights=fp8", "mistral-7b", "vllm")(summary)
    assert found.ttft_ms is not None
    assert "fp8" in found.subject


def test_lists() -> None:
    assert "agentic-branching" in bench("workloads").stdout
    assert "trtllm-serve" in bench("targets").stdout


def test_bench_loads_no_torch() -> None:
    code = (
        "import sys, headrace.bench.run, headrace.bench.series, headrace.bench.report, headrace.bench.ladder, "
        "headrace.bench.offline, headrace.bench.importers, headrace.cli.bench, headrace.bench.targets._process\n"
        "from headrace.bench.workloads import WORKLOADS\nfrom headrace.bench.metrics import METRICS\n"
        "list(WORKLOADS), list(METRICS)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_a_plan_beside_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    prediction = Prediction(
        "x", ttft_ms=Figure(50, 40, 60, "fitted"), output_tokens_per_s=Figure(100, 90, 105, "guess")
    )
    path.write_bytes(msgspec.json.encode(prediction))
    found = beside({"ttft_s": {"mean": 0.055}, "output_tokens_per_s": {"value": 120.0}}, read_prediction(path))
    first, second = found["figures"]
    assert (first["measured"], first["within"]) == (pytest.approx(55.0), True)
    assert first["ratio"] == pytest.approx(1.1)
    assert (second["ratio"], second["within"], second["grade"]) == (pytest.approx(1.2), False, "guess")
