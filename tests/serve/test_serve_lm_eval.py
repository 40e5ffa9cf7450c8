"""What `lm_eval --model local-completions` sends, and what it counts on in the answers.

It sends token ids in batches with `echo`, `logprobs: 1`, `max_tokens: 1`, and sums `token_logprobs[context:-1]`: the entries of
the continuation, if there is exactly one entry for each token of the prompt and one for the generated token.
"""

import json
import os
import subprocess
import sys

import httpx
import msgspec
import pytest
from serve_harness import MODEL

SEED = 1234


async def loglikelihoods(post, model, sequences):
    body = {
        "model": model,
        "prompt": sequences,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": SEED,
        "echo": True,
    }
    response = await post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return sorted(response.json()["choices"], key=lambda choice: choice["index"])


@pytest.mark.parametrize("said", ["", " more", "🦆"])
async def test_there_is_an_entry_for_each_token_also_for_the_one_that_ends_the_text(served, said):
    """With nothing to say, the first token is the model's end of text."""
    served.engine.say(said)
    prompts = [[500, 600, 700], [40, 41], [9]]
    for prompt, choice in zip(prompts, await loglikelihoods(served.http.post, MODEL, prompts), strict=True):
        logprobs = choice["logprobs"]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert len(logprobs[key]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None
        assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert all(best for best in logprobs["top_logprobs"][1:])


async def test_the_ending_token_has_its_entry_without_echo_and_in_a_stream_too(served):
    served.engine.say("")
    body = await served.complete([500, 600], logprobs=1, max_tokens=5)
    (choice,) = body["choices"]
    assert choice["text"] == ""
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == [""]
    assert len(choice["logprobs"]["token_logprobs"]) == body["usage"]["completion_tokens"] == 1
    events = await served.events("/v1/completions", prompt=[500, 600], logprobs=1, max_tokens=5)
    assert [t for e in events for t in e["choices"][0]["logprobs"]["tokens"]] == [""]


async def test_a_chat_answer_does_not_list_the_ending_token(served):
    served.engine.say("ok")
    body = await served.chat("hi", logprobs=True, max_tokens=5)
    assert "".join(entry["token"] for entry in body["choices"][0]["logprobs"]["content"]) == "ok"
    assert all(entry["bytes"] for entry in body["choices"][0]["logprobs"]["content"])


async def test_the_remote_tokenizer_s_three_endpoints(served):
    """lm-eval takes its tokens from the server if `/tokenizer_info` names an `eos_token`."""
    info = (await served.http.get("/tokenizer_info")).json()
    assert info["eos_token"] == served.tokenizer.special_tokens["eos_token"]
    assert info["bos_token"] == served.tokenizer.special_tokens["bos_token"]
    assert "messages" in info["chat_template"]
    text = "Question: How many?\nAnswer: 81"
    answer = await served.post("/tokenize", prompt=text, add_special_tokens=False)
    ids = answer.json()["tokens"]
    assert ids == served.tokenizer.encode(text, add_special=False)
    assert (await served.post("/detokenize", tokens=ids)).json()["prompt"] == text
    (eos,) = (await served.post("/tokenize", prompt=info["eos_token"], add_special_tokens=False)).json()["tokens"]
    assert eos == served.tokenizer.eos_token_id


async def test_a_key_is_needed_for_the_tokenizer_too(serve):
    server = serve(api_keys=("secret",))
    assert (await server.http.get("/tokenizer_info")).status_code == 401
    answer = await server.http.get("/tokenizer_info", headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 200


TASK = """
task: local_questions
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
"""The built-in questions as a task of lm-eval, in files only."""


def lm_eval(url, folder, model):
    """What the harness itself finds in the task of `folder`: its results, and the samples by question."""
    arguments = {"model": model, "base_url": f"{url}/v1/completions", "tokenizer_backend": "remote", "max_length": 256}
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", "local_questions",
        "--include_path", str(folder), "--batch_size", "8", "--output_path", str(folder / "out"), "--log_samples",
        "--model_args", ",".join(f"{key}={value}" for key, value in arguments.items()),
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (folder / "out").rglob("results_*.json")
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    rows = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    return json.loads(results.read_text())["results"]["local_questions"], rows


@pytest.mark.model
def test_lm_eval_itself_finds_what_the_evaluator_finds_in_process(tmp_path):
    """The real harness with a local task against a real server, and the same questions without any server."""
    from server_process import ServerProcess

    from headrace.engine.launch import BACKENDS
    from headrace.engine.quality.choices import built_in, candidates, picks
    from headrace.engine.quality.evaluate import Evaluator
    from headrace.spec.config import EngineConfig
    from headrace.spec.locate import locate
    from headrace.text.load import load_tokenizer

    files = locate("smollm2-135m")
    # "What is the square root of 81?" is among them, to which the model says 9 and then nothing more.
    questions = built_in()[36:44]
    (tmp_path / "questions.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(questions))
    (tmp_path / "task.yaml").write_text(TASK.format(questions=tmp_path / "questions.jsonl"))
    server = ServerProcess(tmp_path / "log", "--max-model-len", "256", "--kv-bytes", str(64 * 2**20), "--kv", "fp32")
    try:
        info = httpx.get(f"{server.url}/engine").json()["info"]
        results, samples = lm_eval(server.url, tmp_path, info["model"])
    finally:
        assert server.stop() == 0, server.log.read_text()

    asked = candidates(questions, load_tokenizer(files))
    config = EngineConfig(model="smollm2-135m", backend=info["backend"], kv="fp32", threads=1)
    evaluator = Evaluator(BACKENDS.get(info["backend"]).load(files, config), 2048)
    best = {}

    def visit(i, position, logits):
        best.update({(i, position + k): int(row.argmax()) for k, row in enumerate(logits)})

    try:
        scores = evaluator.score([c.tokens for c in asked], visit)
    finally:
        evaluator.close()
    found = [(float(total), greedy == "True") for row in samples for ((total, greedy),) in row["resps"]]
    for i, (c, row, (total, greedy)) in enumerate(zip(asked, scores, found, strict=True)):
        assert total == pytest.approx(float(row[c.first - 1 :].sum()), abs=2e-3), c
        assert greedy == all(best[i, p - 1] == c.tokens[p] for p in range(c.first, len(c.tokens)))
    assert any(greedy for _, greedy in found)
    assert not all(greedy for _, greedy in found)
    right = [q.answer for q in questions]
    assert results["acc,none"] == pytest.approx((picks(asked, scores).raw == right).mean())
