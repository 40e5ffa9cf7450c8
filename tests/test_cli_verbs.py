"""The command line: verbs found by file, options made from the settings, errors on one line."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.cli._declared import ENGINE, of_fields
from headrace.cli.main import build, main, verbs
from headrace.control.params import SamplingParams
from headrace.control.policies import EVICTION, ORDER
from headrace.engine.launch import _CPU, _GPU, BACKENDS
from headrace.spec.accounting import default_block_tokens
from headrace.spec.config import EngineConfig


def run(*arguments: str, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, input=stdin, env=_wide())
    assert done.returncode == code, done.stderr
    return done


def _wide() -> dict[str, str]:
    import os

    return {**os.environ, "COLUMNS": "300", "OMP_NUM_THREADS": "1"}


def test_every_file_is_a_verb_and_help_lists_them_all() -> None:
    assert {"generate", "serve", "chat"} <= set(verbs())
    text = run("--help").stdout
    for verb in verbs():
        assert re.search(rf"^  {verb} +[A-Z]", text, re.MULTILINE), f"{verb} has no line of help"


@pytest.mark.parametrize("verb", ["serve", "generate", "quality", "bench run", "plan rank"])
def test_every_name_is_whole_in_a_narrow_terminal(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.main import get_command

    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*verb.split(), "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    command: Any = get_command(build(verb.split()[0]))
    for name in verb.split():
        command = command.commands[name]
    names = [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)]
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"(^|\s){name}\b", text)] == []


def test_help_imports_no_verb_and_a_verb_no_other() -> None:
    code = (
        "import sys; from headrace.cli.main import build; build({0});"
        "print(sorted(m for m in sys.modules if m.startswith('headrace.cli.') and '._' not in m))"
    )
    for verb, expected in (("None", ["headrace.cli.main"]), ("'serve'", ["headrace.cli.main", "headrace.cli.serve"])):
        out = subprocess.run([sys.executable, "-c", code.format(verb)], capture_output=True, text=True, check=True)
        assert out.stdout.strip() == str(expected)


def test_verbs_that_start_an_engine_load_nothing_heavy_for_their_help() -> None:
    code = (
        "import sys; from headrace.cli.main import main\n"
        "try: main(['{0}', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({{'torch', 'numpy', 'tokenizers', 'uvicorn'}} & set(sys.modules)), file=sys.stderr)"
    )
    for verb in ("generate", "serve", "chat"):
        done = subprocess.run([sys.executable, "-c", code.format(verb)], capture_output=True, text=True, check=True)
        assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("verb", ["generate", "serve", "chat"])
def test_every_engine_setting_is_an_option(verb: str) -> None:
    text = run(verb, "--help").stdout
    for field in fields(EngineConfig):
        flag = {"model": "model", "seed": "--dummy-seed", "options": "--option"}.get(
            field.name, "--" + field.name.replace("_", "-")
        )
        assert flag in text
    if verb != "serve":
        for field in fields(SamplingParams):
            assert "--" + field.name.replace("_", "-").removesuffix("s") in text


def test_version() -> None:
    assert run("--version").stdout.strip() == headrace.__version__


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate", "no-such", "--prompt", "x"], "no-such"),
        (["generate", "smollm2-135m", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["generate", "smollm2-135m", "--prompt", ""], "prompt"),
        (["generate", "smollm2-135m", "--prompt", "x", "--max-model-len", "9999999"], "max_model_len"),
        (["generate", "smollm2-135m", "--prompt", "x", "--backend", "abacus"], "abacus"),
        (["generate", "smollm2-135m", "--prompt", "x", "--order", "loudest"], "loudest"),
        (["generate", "smollm2-135m", "--prompt", "x", "--drafter", "oracle"], "oracle"),
        (["generate", "smollm2-135m", "--prompt", "x", "--option", "nothing"], "NAME=VALUE"),
        (["generate", "smollm2-135m", "--prompt", "x", "--logit-bias", "a=1"], "logit_bias"),
        (["generate", "smollm2-135m", "--prompt", "x", "--kv-bytes", "1", "--num-blocks", "1"], "kv_bytes"),
        (["serve", "no-such"], "no-such"),
        (["generate", "smollm2-135m", "--prompt", "x", "--revision", "main"], "revision"),
        (["serve", "smollm2-135m", "--log-level", "loud"], "log_level"),
        (["serve", "smollm2-135m", "--host", "192.0.2.1"], "host: cannot listen on 192.0.2.1"),
        (["serve", "smollm2-135m", "--chat-template", "/no/such/file"], "chat_template"),
        (["chat", "smollm2-135m", "--chat-template", "/no/such/file"], "chat_template"),
        (["generate", "smollm2-135m", "--chat", "--prompt", "x", "--chat-template", "/no/such/file"], "chat_template"),
        (["generate", "smollm2-135m", "--prompt", "x", "--chat-template", "/no/such/file"], "--chat"),
        (["generate", "smollm2-135m", "--prompt", "x", "--logprobs", "1"], "only with --json"),
        (["chat", "smollm2-135m", "--n", "2"], "n must be 1, not 2"),
        (["chat", "smollm2-135m", "--prompt-logprobs", "0"], "prompt_logprobs"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("headrace: ")
    assert text in lines[0]


def test_a_server_whose_port_is_taken_says_so_before_it_loads_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as caught:
            main(["serve", "smollm2-135m", "--port", str(port), "--log-level", "error"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"headrace: port: cannot listen on 127.0.0.1:{port}: ")


def test_the_help_of_engine_settings_says_what_there_is_and_what_is_taken() -> None:
    """Names and defaults stand in the help as text; this holds them to the code."""
    said = {p.name: p.option.help for _, p in of_fields(ENGINE)}
    for option, registry in (("backend", BACKENDS), ("order", ORDER), ("eviction", EVICTION)):
        for name in registry.names():
            assert re.search(rf"\b{name}\b", said[option]), f"--{option} does not tell of {name}"
    assert f"{_CPU.max_num_seqs} on a CPU, {_GPU.max_num_seqs} on a GPU" in said["max_num_seqs"]
    assert f"{_CPU.max_batched_tokens} on a CPU, {_GPU.max_batched_tokens} on a GPU" in said["max_batched_tokens"]
    assert f"{_GPU.prefill.max_prefill_tokens} on a GPU" in said["max_prefill_tokens"]
    assert f"{_CPU.prefill.step_target_s * 1000:g} on a CPU" in said["step_target_ms"]
    assert f"{_GPU.memory_fraction}, on a CPU {_CPU.memory_fraction} " in said["memory_fraction"]
    assert f"{default_block_tokens('fp16')}, with int4 keys {default_block_tokens('int4')}" in said["block_tokens"]


def test_what_does_not_fit_is_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "smollm2-135m", "--backend", "torch", "--prompt", "x", "--kv-bytes", "1"])
    assert caught.value.code == 1
    assert "set kv_bytes to" in capsys.readouterr().err


def test_an_unknown_verb_or_option_is_code_2() -> None:
    assert "no-such" in run("no-such", code=2).stderr
    assert "--no-such" in run("generate", "x", "--no-such", code=2).stderr


@pytest.mark.model
def test_generate_prints_the_text_as_it_is() -> None:
    common = ["smollm2-135m", "--backend", "torch", "--temperature", "0", "--max-tokens", "8"]
    done = run("generate", *common, "--prompt", "The capital of France is", "--timings")
    assert done.stdout.startswith(" Paris")
    stages = dict(re.findall(r"^(.+?) {2,}([\d.]+) s$", done.stderr, re.MULTILINE))
    whole = float(stages.pop("process start to first token"))
    parts = [float(s) for name, s in stages.items() if "meanwhile" not in name and "whole answer" not in name]
    assert sum(parts) == pytest.approx(whole, rel=0.05)


@pytest.mark.model
def test_generate_as_json_from_stdin_with_several_answers() -> None:
    common = [
        "smollm2-135m",
        "--backend",
        "torch",
        "--max-tokens",
        "5",
        "--n",
        "2",
        "--seed",
        "3",
        "--json",
        "--timings",
    ]
    done = run("generate", *common, "--prompt", "-", "--prompt", "The sea", "--logprobs", "1", stdin="Once upon a time")
    body = json.loads(done.stdout)
    assert body["model"] == "smollm2-135m"
    assert [(c["prompt_index"], c["index"]) for c in body["completions"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for c in body["completions"]:
        assert len(c["token_ids"]) == len(c["logprobs"]) == 5
        assert c["finish_reason"] == "length"
    assert body["timings_s"]["process start to first token"] > 0


DUMMY = ["--load-format", "dummy", "--backend", "torch", "--temperature", "0", "--max-tokens", "9"]


def dummy_model(folder: Path) -> str:
    """A folder with nothing but a config: random weights, a tokenizer of plain bytes, no chat template."""
    config = {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.model
def test_a_chat_template_from_a_file(tmp_path: Path) -> None:
    """What errors about templates advise works for both verbs; the server's is in test_serve_real."""
    common = [dummy_model(tmp_path), *DUMMY]
    file = tmp_path / "own.jinja"
    file.write_text("<{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}>")
    chat = ["--chat", "--prompt", "hello", "--json", "--ignore-eos"]
    refused = run("generate", *common, *chat, code=1)
    assert "--chat-template FILE" in refused.stderr
    answered = json.loads(run("generate", *common, *chat, "--chat-template", str(file)).stdout)
    plain = json.loads(run("generate", *common, "--prompt", "<u:hello;>", "--json", "--ignore-eos").stdout)
    assert answered["completions"][0]["token_ids"] == plain["completions"][0]["token_ids"]
    said = run("chat", *common, "--ignore-eos", "--chat-template", str(file), stdin="hello\n")
    assert plain["completions"][0]["text"].strip()[:3] in said.stdout
    assert "--chat-template FILE" in run("chat", *common, stdin="hello\n").stdout
    file.write_text("{% for %}")
    assert "does not compile" in run("generate", *common, *chat, "--chat-template", str(file), code=1).stderr


@pytest.mark.model
def test_what_the_model_recommends_is_sampled_with_unless_told_otherwise(tmp_path: Path) -> None:
    """`top_k` 1 is greedy whatever the seed; without it, or with one's own, random weights give other tokens."""
    common = [dummy_model(tmp_path), "--load-format", "dummy", "--prompt", "a", "--max-tokens", "12", "--seed", "5"]
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 1}))
    answers = []
    for more in ([], ["--no-generation-config"], ["--top-k", "0"], ["--temperature", "0"]):
        done = run("generate", *common, "--ignore-eos", "--json", *more)
        answers.append(json.loads(done.stdout)["completions"][0]["token_ids"])
    assert answers[0] == answers[3]
    assert answers[1] == answers[2]
    assert answers[0] != answers[1]


@pytest.mark.model
def test_dummy_weights_for_any_config(tmp_path: Path) -> None:
    common = [dummy_model(tmp_path), *DUMMY]
    first, second, third = (
        json.loads(run("generate", *common, "--prompt", "hello", "--json", "--ignore-eos", "--dummy-seed", seed).stdout)
        for seed in ("1", "1", "2")
    )
    ids = [body["completions"][0]["token_ids"] for body in (first, second, third)]
    assert len(ids[0]) == 9
    assert ids[0] == ids[1] != ids[2]
