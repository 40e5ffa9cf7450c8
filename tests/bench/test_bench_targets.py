"""Targets: launch lines as snapshots for engines that cannot run here, refused settings, the life of a started process."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from headrace.base.errors import InvalidInput
from headrace.bench.scrape import parse_metrics, recognise, sample_of
from headrace.bench.targets import TARGETS, LaunchLine, TargetSpec, find_target, free_port, parse_target
from headrace.bench.targets import _process as process
from headrace.bench.targets._dynamo import lines
from headrace.spec.engine_facts import engines
from headrace.spec.engine_serving import launch_facts, metric_names

PY = sys.executable
SNAPSHOTS: dict[str, tuple[dict[str, str], str]] = {
    "vllm": (
        {"context": "4096", "slots": "64", "prefix_cache": "off", "kv_precision": "fp8", "args": "--enforce-eager"},
        "vllm serve org/m --host 127.0.0.1 --port 9000 --max-model-len 4096 --max-num-seqs 64"
        " --no-enable-prefix-caching --kv-cache-dtype fp8 --enforce-eager",
    ),
    "sglang": (
        {"context": "4096", "prefix_cache": "off", "tensor_parallel": "2", "memory_fraction": "0.8"},
        f"{PY} -m sglang.launch_server --model-path org/m --host 127.0.0.1 --port 9000 --enable-metrics"
        " --context-length 4096 --disable-radix-cache --tp-size 2 --mem-fraction-static 0.8",
    ),
    "tensorrt-llm": (
        {"context": "4096", "slots": "64", "memory_fraction": "0.9"},
        "trtllm-serve org/m --host 127.0.0.1 --port 9000 --backend pytorch --max_seq_len 4096 --max_batch_size 64"
        " --kv_cache_free_gpu_memory_fraction 0.9",
    ),
    "dynamo": (
        {"context": "4096", "prefix_cache": "on"},
        f"{PY} -m headrace.bench.targets._dynamo org/m 9000 {PY} --max-model-len 4096 --enable-prefix-caching",
    ),
    "transformers": (
        {"dtype": "float32", "continuous_batching": "on"},
        "transformers serve org/m --host 127.0.0.1 --port 9000 --dtype float32 --continuous-batching",
    ),
    "headrace": (
        {"context": "2048", "prefix_cache": "off", "kv_precision": "int8", "drafter": "ngram", "threads": "2"},
        f"{PY} -m headrace.cli.main serve org/m --host 127.0.0.1 --port 9000 --max-model-len 2048 --no-prefix-cache"
        " --kv int8 --drafter ngram --threads 2",
    ),
    "naive": (
        {"kv_cache": "off", "context": "512"},
        f"{PY} -m headrace.engine.naive org/m --host 127.0.0.1 --port 9000 --no-kv-cache --max-model-len 512",
    ),
    "llama-cpp": (
        {"bin": "/opt/llama-server", "slots": "4", "context": "1024", "flash_attention": "on", "threads": "2"},
        "/opt/llama-server -m x.gguf --host 127.0.0.1 --port 9000 --metrics --slot-save-path"
        f" {tempfile.gettempdir()}/ -np 4 -c 4096 -fa on -t 2 -tb 2",
    ),
}


def test_every_target_has_a_snapshot() -> None:
    assert set(TARGETS.names()) == set(SNAPSHOTS)


@pytest.mark.parametrize("name", sorted(SNAPSHOTS))
def test_launch_lines(name: str) -> None:
    settings, expected = SNAPSHOTS[name]
    model = "x.gguf" if name == "llama-cpp" else "org/m"
    line = find_target(name).launch_line(model, 9000, settings)
    assert " ".join(line.argv) == expected
    assert line.argv[0]
    if name == "vllm":
        assert line.env == {"VLLM_SERVER_DEV_MODE": "1"}


def test_every_engine_has_a_flush_or_says_why_not() -> None:
    found = {name: target.flush_calls({}) for name, target in TARGETS}
    assert found == {
        "headrace": ("POST /reset_prefix_cache",),
        "vllm": ("POST /reset_prefix_cache",),
        "sglang": ("POST /flush_cache",),
        "dynamo": ("POST /clear_kv_blocks",),
        "llama-cpp": tuple(f"POST /slots/{slot}?action=erase" for slot in range(8)),
        "naive": (),
        "transformers": (),
        "tensorrt-llm": (),
    }
    assert len(find_target("llama-cpp").flush_calls({"slots": "3"})) == 3
    assert all(target.facts.no_flush for name, target in TARGETS if not found[name])


@pytest.mark.parametrize(
    ("calls", "why", "says", "asked"),
    [
        (("POST /slots/0?action=erase", "POST /slots/1?action=erase"), "", "emptied with POST /slots/0", 2),
        (("POST /flush",), "host memory stays", "emptied with POST /flush; host memory stays", 1),
        (("POST /missing",), "", "not emptied: POST /missing was answered with 404", 0),
        ((), "there is no call for it", "not emptied: there is no call for it", 0),
    ],
)
async def test_results_say_whether_the_cache_was_emptied(
    calls: tuple[str, ...], why: str, says: str, asked: int
) -> None:
    seen: list[str] = []

    async def erase(request: web.Request) -> web.Response:
        seen.append(request.path_qs)
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/slots/{slot}", erase)
    app.router.add_post("/flush", erase)
    async with TestServer(app) as server:
        target = process.RunningTarget(str(server.make_url("")).rstrip("/"), "m", {}, calls, why)
        assert await target.flush() == says.startswith("emptied")
    assert target.info["cache_before"].startswith(says)
    assert len(set(seen)) == len(seen) == asked


def test_every_launch_line_listens_on_this_host_only() -> None:
    for name, (settings, _) in SNAPSHOTS.items():
        line = find_target(name).launch_line("x.gguf", 9000, settings)
        assert "127.0.0.1" in line.argv or name == "dynamo"
    frontend, worker = lines("org/m", "9000", "python", ["--x"])
    assert frontend[frontend.index("--http-host") + 1] == "127.0.0.1"
    assert worker[-1] == "--x"


@pytest.mark.parametrize("name", sorted(SNAPSHOTS))
def test_a_setting_that_an_engine_lacks_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="no setting 'colour'"):
        find_target(name).launch_line("x.gguf", 9000, {"colour": "red"})


def test_the_environment_can_be_set() -> None:
    line = find_target("vllm").launch_line("m", 1, parse_target("vllm:env.LD_PRELOAD=/a.so:/b.so,args=--x").settings)
    assert line.env == {"VLLM_SERVER_DEV_MODE": "1", "LD_PRELOAD": "/a.so:/b.so"}
    assert line.argv[-1] == "--x"


def test_bad_values_are_refused() -> None:
    with pytest.raises(InvalidInput, match="on or off"):
        find_target("vllm").launch_line("m", 1, {"prefix_cache": "maybe"})
    with pytest.raises(InvalidInput, match="whole numbers"):
        find_target("llama-cpp").launch_line("x.gguf", 1, {"context": "long"})
    with pytest.raises(InvalidInput, match="unknown target"):
        find_target("nope")
    with pytest.raises(InvalidInput, match="setting=value"):
        parse_target("vllm:fast")


def test_target_texts() -> None:
    assert parse_target("http://h:1").url == "http://h:1"
    spec = parse_target("llama-cpp:bin=/x/y,prefix-cache=off")
    assert (spec.name, spec.settings) == ("llama-cpp", {"bin": "/x/y", "prefix_cache": "off"})
    assert spec.label == "llama-cpp:bin=/x/y,prefix_cache=off"


def test_facts_of_every_engine_can_be_read() -> None:
    for engine, facts in engines().items():
        if "launch" in facts.sections:
            found = launch_facts(engine)
            assert found.source
            assert all(
                "{value}" in " ".join(a) or "." in n or "{context" in " ".join(a) for n, a in found.flags.items()
            )
        if "metrics" in facts.sections:
            assert metric_names()[engine].source


@pytest.mark.parametrize(
    ("engine", "page", "expected"),
    [
        (
            "vllm",
            'vllm:num_requests_running{model_name="m"} 3\nvllm:num_requests_waiting{model_name="m"} 2.0\n'
            'vllm:kv_cache_usage_perc{model_name="m"} 0.25\nvllm:prefix_cache_queries_total{model_name="m"} 1e3\n'
            'vllm:prefix_cache_hits_total{model_name="m"} 400',
            (3.0, 2.0, 0.25, 1000.0, 400.0),
        ),
        (
            "headrace",
            "# HELP x\nheadrace:num_requests_running 1\nheadrace:num_requests_waiting 0\nheadrace:kv_cache_usage_perc 0.5\n"
            "headrace:prefix_cache_queries_total 10\nheadrace:prefix_cache_hits_total 5",
            (1.0, 0.0, 0.5, 10.0, 5.0),
        ),
        (
            "sglang",
            "sglang:num_running_reqs 4\nsglang:num_queue_reqs 1\nsglang:token_usage 0.1\nsglang:prompt_tokens_total 90\n"
            'sglang:cached_tokens_total{cache_source="device"} 20\nsglang:cached_tokens_total{cache_source="host"} 10',
            (4.0, 1.0, 0.1, 90.0, 30.0),
        ),
        ("llama-cpp", "llamacpp:requests_processing 2\nllamacpp:requests_deferred 7", (2.0, 7.0, None, None, None)),
        ("tensorrt-llm", "trtllm_kv_cache_utilization 0.75", (None, None, 0.75, None, None)),
        (
            "dynamo",
            'dynamo_frontend_inflight_requests{model="m"} 12\ndynamo_frontend_queued_requests{model="m"} 3',
            (12.0, 3.0, None, None, None),
        ),
    ],
)
def test_metric_pages_are_recognised(engine: str, page: str, expected: tuple[float | None, ...]) -> None:
    found = recognise(parse_metrics(page))
    assert found is not None
    assert found[0] == engine
    sample = sample_of(parse_metrics(page), found[1], 1.5)
    assert (sample.running, sample.waiting, sample.kv_usage, sample.prefix_queries, sample.prefix_hits) == expected


def test_a_strange_page_is_nobodys() -> None:
    assert recognise(parse_metrics('up 1\nbroken\nx{a="b"} NaN-ish')) is None


SERVER = """
import http.server, json, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "tiny"}]}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *a): pass
print("hello from the engine", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""


def fake(monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]) -> None:
    def line(_self: object, _model: str, port: int, _settings: object) -> LaunchLine:
        return LaunchLine(tuple(part.format(port=port) for part in argv), {})

    monkeypatch.setattr("headrace.bench.targets.EngineTarget.launch_line", line)


async def test_an_engine_is_started_asked_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "engine.py"
    script.write_text(SERVER)
    fake(monkeypatch, (PY, str(script), "{port}"))
    async with process.open_target(TargetSpec("vllm", {}), "m", tmp_path / "log") as running:
        assert running.model == "tiny"
        assert running.info["engine"] == "vllm"
        assert running.info["ready_s"] > 0
        port = int(running.url.rsplit(":", 1)[1])
    import socket

    with socket.socket() as closed:
        assert closed.connect_ex(("127.0.0.1", port)) != 0
    assert b"hello from the engine" in (tmp_path / "log").read_bytes()


@pytest.mark.model
async def test_our_own_server_is_started_and_emptied(tmp_path: Path) -> None:
    """The real one: what a first request left in its prefix cache is not there after a flush."""
    spec = parse_target("headrace:context=256,threads=1")
    async with (
        process.open_target(spec, "smollm2-135m", tmp_path / "log") as running,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120.0)) as session,
    ):

        async def cached() -> int:
            asked = {"model": running.model, "prompt": list(range(1000, 1100)), "max_tokens": 1}
            async with session.post(running.url + "/v1/completions", json=asked) as response:
                return int((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [await cached() > 0 for _ in range(2)] == [False, True]
        assert await running.flush()
        assert await cached() == 0
        assert running.info["cache_before"] == "emptied with POST /reset_prefix_cache"


async def test_an_engine_that_ends_early_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, (PY, "-c", "import sys; print('no such model'); sys.exit(4)"))
    with pytest.raises(process.TargetFailed, match=r"code 4(.|\n)*no such model"):
        async with process.open_target(TargetSpec("vllm", {}), "m", tmp_path / "log"):
            pass


async def test_a_program_that_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(process.TargetFailed, match="not installed here"):
        async with process.open_target(TargetSpec("vllm", {"bin": "/nowhere/vllm"}), "m", tmp_path / "log"):
            pass


def test_free_ports_are_free() -> None:
    assert free_port() != 0
