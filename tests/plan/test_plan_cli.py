"""`headrace plan` as a command: JSON contract, exit codes, and no torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.spec import models

POINTS = Path(__file__).parent / "data" / "validation_points.csv"


def run(capsys, *arguments):
    """Exit code, stdout and stderr of the command run in this process."""
    code = 0
    try:
        main(["plan", *arguments])
    except SystemExit as stop:
        code = stop.code or 0
    out = capsys.readouterr()
    return code, out.out, out.err


def test_fit_contract(capsys):
    code, out, _ = run(
        capsys, "fit", "mistral-7b", "--gpu", "h100-sxm-80", "--gpus", "1", "--tp", "1", "--weights", "bf16", "--kv",
        "bf16", "--context", "8192", "--engine", "vllm", "--memory-fraction", "0.9", "--max-batched-tokens", "8192",
        "--json",
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)
    assert found["fits"] is True
    assert found["kv_bytes_per_token"] == 131_072
    assert {
        "limit", "weights_bytes", "kv_fixed_bytes_per_request", "activation_bytes", "overhead_bytes", "kv_pool_bytes",
        "kv_pool_tokens", "max_users",
    } <= set(found)  # fmt: skip
    assert "explain" not in found


def test_fit_explains(capsys):
    code, out, _ = run(
        capsys, "fit", "deepseek-v3", "--gpu", "h200-sxm-141", "--gpus", "8", "--explain", "--users", "4"
    )
    assert code == 0
    assert "latent layers" in out
    assert "longest context for 4 users" in out


def test_fit_says_no(capsys):
    code, out, _ = run(capsys, "fit", "llama-3.1-70b", "--gpu", "a100-sxm-40", "--json")
    assert code == 0
    assert json.loads(out)["fits"] is False


def test_perf_contract(capsys):
    code, out, err = run(
        capsys, "perf", "gpt-oss-120b", "--gpu", "h100-sxm-80", "--gpus", "4", "--tp", "4", "--ep", "4", "--weights",
        "mxfp4", "--kv", "bf16", "--engine", "vllm", "--isl", "1024", "--osl", "1024", "--concurrency", "16", "--json",
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)
    for name in ("ttft_ms", "tpot_ms", "output_tokens_per_s_per_gpu", "usd_per_million_output_tokens"):
        assert set(found[name]) == {"value", "low", "high", "grade"}
        assert found[name]["low"] <= found[name]["value"] <= found[name]["high"]
    assert "price" in err  # the staleness warning is a log line, not part of the answer


def test_sensitivity(capsys):
    code, out, _ = run(capsys, "perf", "llama-3.1-8b", "--concurrency", "8", "--sensitivity", "--json")
    assert code == 0
    assert "GPU price" in {s["what"] for s in json.loads(out)["sensitivity"]}
    code, _, err = run(capsys, "perf", "llama-3.1-8b", "--gpu", "mi355x-288", "--sensitivity", "--json")
    assert code == 2
    assert "price" in err


def test_rank_contract(capsys):
    code, out, _ = run(
        capsys, "rank", "llama-3.1-8b", "--preset", "premium-chat", "--gpu", "h100-sxm-80", "--gpu", "t4-16",
        "--gpus", "1", "--price", "h100=2.5", "--json",
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)
    assert found["candidates"][0]["gpu"] == "h100-sxm-80"
    assert all(r["reason"] and r["change"] for r in found["rejected"])


def test_simulate(capsys):
    code, out, _ = run(
        capsys, "simulate", "llama-3.1-8b", "--requests", "12", "--isl", "200", "--osl", "8", "--arrivals", "poisson",
        "--rate", "5", "--ttft-ms", "500", "--json",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["requests"] == 12


def test_validate_contract(capsys, tmp_path):
    lines = POINTS.read_text().splitlines()
    small = tmp_path / "points.csv"
    small.write_text("\n".join(lines[:60]) + "\n")
    code, out, _ = run(capsys, "validate", str(small), "--json")
    assert code == 0
    found = json.loads(out)
    assert {"n", "answered", "median_error", "wrong_fit", "by_quantity"} <= set(found["memory"])
    assert {"weights", "kv_gib", "kv_tokens"} == set(found["memory"]["by_quantity"])
    for name in ("ttft", "tpot", "throughput"):
        assert {"n", "answered", "mape", "median", "coverage90"} == set(found[name])
    assert isinstance(found["unknown_models"], list)
    assert isinstance(found["worst"], list)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("fit", "llama-9"), "llama-9"),
        (("fit", "llama-3.1-8b", "--gpu", "h900"), "h900"),
        (("fit", "llama-3.1-8b", "--memory-fraction", "3"), "memory_fraction"),
        (("fit", "llama-3.1-8b", "--users", "0"), "users"),
        (("perf", "llama-3.1-8b", "--isl", "0"), "isl"),
        (("perf", "llama-3.1-8b", "--acceptance", "1"), "acceptance"),
        (("rank", "llama-3.1-8b", "--preset", "luxury"), "luxury"),
        (("rank", "llama-3.1-8b", "--price", "h100"), "price"),
        (("rank", "llama-3.1-8b", "--pp", "0"), "pp"),
        (("rank", "llama-3.1-8b", "--dp", "2"), "replicas"),
        (("rank", "llama-3.1-8b", "--gpus", "0"), "gpus"),
        (("fit", "llama-3.1-8b", "--context", "0"), "context"),
        (("fit", "llama-3.1-8b", "--gpus", "0"), "gpus"),
        (("simulate", "llama-3.1-8b", "--arrivals", "never"), "arrivals"),
        (("rank", "llama-3.1-8b", "--isl", "0"), "isl"),
        (("rank", "llama-3.1-8b", "--rate", "-1"), "rate"),
        (("rank", "llama-3.1-8b", "--ttft-ms", "0"), "ttft_ms"),
        (("rank", "llama-3.1-8b", "--tpot-ms", "nan"), "tpot_ms"),
        (("rank", "llama-3.1-8b", "--price", "h100-sxm-80=nan"), "price"),
        (("rank", "llama-3.1-8b", "--weights", "int3"), "int3"),
        (("rank", "llama-3.1-8b", "--kv", "int3"), "int3"),
        (("rank", "llama-3.1-8b", "--engine", "naive"), "naive"),
        (("fit", "llama-3.1-8b", "--report", f"{__file__}/report.html"), __file__),
        (("fit", "llama-3.1-8b", "--report", str(Path(__file__).parent)), "is a folder"),
        (("validate", "/nowhere.csv"), "nowhere"),
        (("simulate", "llama-3.1-8b", "--spread", "nan"), "spread"),
        (("web", "--port", "99999"), "--port"),
        (("report", "llama-3.1-8b", "--isl", "0", "--out", "never.html"), "isl"),
        (("simulate", "llama-3.1-8b", "--spread", "1.5", "--arrivals", "poisson"), "spread"),
        (("perf", "llama-3.1-8b", "--engine-version", "newest"), "engine_version"),
        (("simulate", "llama-3.1-8b", "--isl", "0"), "isl"),
        (("simulate", "llama-3.1-8b", "--osl", "-1", "--arrivals", "poisson"), "osl"),
        (("simulate", "llama-3.1-8b", "--concurrency", "0"), "concurrency"),
        (("simulate", "llama-3.1-8b", "--rate", "inf", "--arrivals", "poisson"), "rate"),
        (("simulate", "llama-3.1-8b", "--speed", "inf", "--arrivals", "trace"), "speed"),
        (("perf", "llama-3.1-8b", "--price", "inf"), "price"),
        (("perf", "llama-3.1-8b", "--isl", "1000000000000"), "isl"),
        (("perf", "llama-3.1-8b", "--isl", "1000000", "--max-batched-tokens", "1"), "max_batched_tokens"),
        (("rank", "llama-3.1-8b", "--ttft-ms", "inf"), "ttft_ms"),
        (("fit", "llama-3.1-8b", "--max-num-seqs", "1000000000000"), "max_num_seqs"),
        (("perf", "llama-3.1-8b", "--concurrency", "1000000000000"), "concurrency"),
        (("fit", "llama-3.1-8b", "--engine", "dynamo"), "vllm"),
    ],
)
def test_bad_input_is_exit_code_two_with_the_field(capsys, arguments, named):
    code, out, err = run(capsys, *arguments, *(("--json",) if arguments[0] not in ("refit", "report", "web") else ()))
    assert code == 2
    assert out == ""
    assert named in err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "martian"}, "martian"),
        ({"num_hidden_layers": -3}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": "many"}, "num_attention_heads"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_a_config_that_cannot_be_planned_is_bad_input(capsys, tmp_path, change, named):
    config = models.find("llama-3.1-8b").config
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    code, out, err = run(capsys, "fit", str(tmp_path), "--json")
    assert (code, out) == (2, "")
    assert named in err


def test_points_that_are_no_text_are_refused(capsys, tmp_path):
    (tmp_path / "points.csv").write_bytes(bytes(range(128, 256)))
    code, _, err = run(capsys, "validate", str(tmp_path / "points.csv"))
    assert code == 2
    assert "points.csv is not UTF-8 text" in err


def test_catalogs_are_listed(capsys):
    code, out, _ = run(capsys, "gpus")
    assert code == 0
    assert "mi355x-288" in out
    code, out, _ = run(capsys, "models", "--json")
    assert "deepseek-r1" in json.loads(out)


def test_planning_loads_no_torch():
    program = """
import sys
from headrace.cli.main import main
try:
    main(["plan", "perf", "llama-3.1-8b", "--concurrency", "2", "--json"])
except SystemExit:
    pass
print([m for m in sys.modules if m.split(".")[0] in ("torch", "transformers")], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().endswith("[]")


def test_calibrate_writes_an_entry(capsys, tmp_path, monkeypatch):
    from headrace.plan import ceilings

    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))
    monkeypatch.setattr(ceilings, "SIZE_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "SIDE", 64)
    monkeypatch.setattr(ceilings, "_torch_flops", lambda seconds: 0.0)
    code = 0
    try:
        main(["calibrate", "--seconds", "0.01", "--json"])
    except SystemExit as stop:
        code = stop.code or 0
    assert code == 0
    assert json.loads(capsys.readouterr().out)["bandwidth_gbs"] > 0
    assert (tmp_path / "gpus" / "cpu.toml").is_file()
    code, out, _ = run(capsys, "fit", "smollm2-135m", "--gpu", "cpu", "--engine", "llama-cpp", "--json")
    assert json.loads(out)["fits"] is True


def test_the_verbs_share_the_deployment_options(capsys):
    shared = (
        "--gpu",
        "h200-sxm-141",
        "--engine",
        "sglang",
        "--engine-version",
        "0.5.9",
        "--max-num-seqs",
        "8",
        "--json",
    )
    _, fit, _ = run(capsys, "fit", "llama-3.1-8b", "--context", "1024", *shared)
    assert json.loads(fit)["max_users"] == 8
    _, perf, _ = run(capsys, "perf", "llama-3.1-8b", "--concurrency", "16", *shared)
    assert json.loads(perf)["running"] == 8
    code, _, _ = run(capsys, "simulate", "llama-3.1-8b", "--requests", "4", "--osl", "4", *shared)
    assert code == 0


def test_rank_takes_stages_and_replicas(capsys):
    code, out, _ = run(
        capsys, "rank", "qwen3-30b-a3b", "--preset", "offline-batch", "--gpu", "h100-sxm-80", "--gpus", "4", "--pp", "2",
        "--dp", "2", "--json",
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)
    assert {(c["pp"], c["dp"]) for c in found["candidates"] + found["rejected"]} == {(2, 2)}


def test_rank_lists_each_deployment_once_with_interval_and_grade_and_says_what_it_leaves_out(capsys):
    ask = (
        "rank",
        "deepseek-v3",
        "--engine",
        "sglang",
        "--users",
        "16",
        "--gpu",
        "h200-sxm-141",
        "--gpu",
        "b200-sxm-180",
    )
    _, shown, _ = run(capsys, *ask, "--gpus", "8", "--gpus", "4")
    lines = shown.splitlines()
    ranked = [line.split(". ", 1)[1] for line in lines if line[:2].strip().isdigit() and "/token" in line]
    assert ranked
    assert len(set(ranked)) == len(ranked)
    assert all(re.search(r"\$[0-9.]+/M \([0-9.]+ to [0-9.]+\)  .*/token, (fitted|guess)$", line) for line in ranked)
    _, found, _ = run(capsys, *ask, "--gpus", "8", "--gpus", "4", "--json")
    every = json.loads(found)
    for kind in ("candidates", "rejected"):
        assert (f"and {len(every[kind]) - 15} more (--json lists all)" in shown) == (len(every[kind]) > 15)
    assert max(map(len, (every["candidates"], every["rejected"]))) > 15
