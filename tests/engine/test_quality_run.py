"""A whole quality run on a toy model against figures computed with transformers."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from test_models_logits import tiny_model

from headrace.base.errors import DoesNotFit, HeadraceError, InvalidInput
from headrace.cli.main import main
from headrace.engine.launch import BACKENDS
from headrace.engine.quality.choices import built_in, candidates
from headrace.engine.quality.evaluate import MAX_SEQUENCES, Evaluator
from headrace.engine.quality.measure import Settings, expand, measure, prepare, unquantized
from headrace.engine.quality.report import as_text
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate
from headrace.text.load import load_tokenizer
from headrace.text.tokenizer import Tokenizer

needs_native = pytest.mark.skipif(find_spec("headrace_native") is None, reason="headrace-native is not installed")
BACKEND_OPTIONS = {
    "torch": {"weights": "fp32", "kv": "fp32"},
    "native": {"kv": "fp32", "options": (("activations", "fp32"),)},
}
BOTH = ["torch", pytest.param("native", marks=needs_native)]
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3
SETTINGS = Settings(window=48, stride=20, tokens=150, prompts=5, prompt_tokens=9, agreement=12)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A random llama whose vocabulary is the 256 bytes, with its tokenizer."""
    model, folder = tiny_model(tmp_path_factory.mktemp("models"), "llama", vocab_size=256)
    (folder / "tokenizer.json").write_text(Tokenizer.of_bytes()._backend.to_str())
    return model, folder


@pytest.fixture(scope="module")
def questions():
    return built_in()[:9]


def logits_of(model, tokens) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].double().numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).log_softmax(-1).numpy()


def config_of(folder: Path, backend: str, **changes) -> EngineConfig:
    return EngineConfig(**{"model": str(folder), "backend": backend, "threads": 1} | BACKEND_OPTIONS[backend] | changes)


def evaluator_of(folder: Path, backend: str, capacity: int, **changes) -> Evaluator:
    config = config_of(folder, backend, **changes)
    return Evaluator(BACKENDS.get(backend).load(locate(config.model), config), capacity)


@pytest.mark.parametrize("backend", BOTH)
def test_scores_and_logits_equal_transformers(toy, backend) -> None:
    model, folder = toy
    source = np.random.default_rng(4)
    sequences = [source.integers(0, 256, n).tolist() for n in (2, 17, 100, 31, 64, 5, *[3] * MAX_SEQUENCES, 90)]
    seen: dict[tuple[int, int], np.ndarray] = {}

    def visit(i: int, position: int, logits: np.ndarray) -> None:
        assert logits.dtype == np.float32
        for k, row in enumerate(logits):
            assert (i, position + k) not in seen
            seen[i, position + k] = row.copy()

    evaluator = evaluator_of(folder, backend, 128)
    try:
        scores = evaluator.score(sequences, visit)
        again = evaluator.score(sequences)
    finally:
        evaluator.close()
    for i, tokens in enumerate(sequences):
        expected = logits_of(model, tokens)[:-1]
        found = np.array([seen.pop((i, p)) for p in range(len(tokens) - 1)])
        np.testing.assert_allclose(found, expected, atol=2e-4)
        chosen = log_softmax(expected)[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(scores[i], chosen, atol=2e-4)
        np.testing.assert_array_equal(scores[i], again[i])
    assert not seen


@pytest.mark.parametrize("backend", BOTH)
def test_greedy_answers_equal_transformers(toy, backend) -> None:
    model, folder = toy
    source = np.random.default_rng(5)
    prompts = [source.integers(0, 256, n).tolist() for n in (1, 20, 33, 16, 15)]
    evaluator = evaluator_of(folder, backend, 80)
    try:
        found = evaluator.greedy(prompts, 18)
    finally:
        evaluator.close()
    for prompt, answer in zip(prompts, found.tokens, strict=True):
        tokens = list(prompt)
        for _ in range(18):
            tokens.append(int(logits_of(model, tokens)[-1].argmax()))
        assert answer == tokens[len(prompt) :]
    assert found.prompt_s > 0
    assert found.decode_s > 0


def test_a_sequence_that_does_not_fit_is_refused(toy) -> None:
    evaluator = evaluator_of(toy[1], "torch", 32)
    try:
        with pytest.raises(InvalidInput, match="33 tokens"):
            evaluator.score([[1] * 33])
    finally:
        evaluator.close()


def test_logits_that_are_not_finite_are_an_error_not_a_figure(toy, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    for file in toy[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][ord("b")] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(HeadraceError, match="the model failed"):
        measure(config_of(tmp_path, "torch"), [("fp32", "fp32")], TEXT, "t", built_in()[:2], SETTINGS, scratch=tmp_path)


@pytest.mark.parametrize("backend", BOTH)
def test_the_same_format_loses_nothing_and_perplexity_is_transformers(toy, questions, tmp_path, backend) -> None:
    model, folder = toy
    config = config_of(folder, backend)
    formats = [(config.weights, config.kv)]
    report = measure(config, formats, TEXT, "t", questions, SETTINGS, reference=backend, scratch=tmp_path)
    (same,) = report.formats
    for figure, exact in (("kl_nats", 0), ("flip_rate", 0), ("perplexity_ratio", 1), ("changed_picks", 0)):
        interval = getattr(same, figure)
        assert (interval.value, interval.low) == (exact, exact)
        # What never differed may still differ in other texts; the means are of the same numbers.
        assert interval.high > 0 if figure in ("flip_rate", "changed_picks") else interval.high == exact
    assert same.agreement_tokens.value == SETTINGS.agreement
    assert same.agreement_whole.value == 1
    assert same.perplexity == report.unquantized.perplexity

    tokens = [*TEXT.encode()][: SETTINGS.tokens]
    scored = {}
    for end in (48, 68, 88, 108, 128, 148, 150):
        begin = max(0, end - 48)
        table = log_softmax(logits_of(model, tokens[begin:end]))
        for p in range(begin + 1, end):
            scored.setdefault(p, table[p - begin - 1, tokens[p]])
    assert report.scored_tokens == len(scored) == 149
    assert report.windows == 7
    expected = np.exp(-np.mean(list(scored.values())))
    assert same.perplexity.value == pytest.approx(expected, rel=1e-4)
    assert same.perplexity.low < expected < same.perplexity.high

    asked = candidates(questions, Tokenizer.of_bytes())
    sums = []
    for c in asked:
        table = log_softmax(logits_of(model, c.tokens))
        sums.append(sum(table[p - 1, c.tokens[p]] for p in range(c.first, len(c.tokens))))
    by_question = np.array(sums).reshape(-1, 4)
    sizes = np.array([c.size for c in asked]).reshape(-1, 4)
    right = np.array([q.answer for q in questions])
    assert same.accuracy.value == pytest.approx((by_question.argmax(1) == right).mean())
    assert same.accuracy_normalized.value == pytest.approx(((by_question / sizes).argmax(1) == right).mean())


def test_a_lossy_format_s_figures_equal_those_computed_by_hand(toy, questions, tmp_path) -> None:
    _, folder = toy
    config = config_of(folder, "torch")
    report = measure(config, [("bf16", "bf16")], TEXT, "t", questions, SETTINGS, scratch=tmp_path)
    (lossy,) = report.formats
    material = prepare(TEXT, questions, load_tokenizer(locate(str(folder))), SETTINGS)
    tables = []
    for changes in ({}, {"weights": "bf16", "kv": "bf16"}):
        rows: dict[tuple[int, int], np.ndarray] = {}
        evaluator = evaluator_of(folder, "torch", 2048, **changes)
        try:
            evaluator.score(
                [w.tokens for w in material.windows],
                lambda i, p, logits, rows=rows: rows.update({(i, p + k): row.copy() for k, row in enumerate(logits)}),
            )
            answers = evaluator.greedy(material.prompts, SETTINGS.agreement).tokens
        finally:
            evaluator.close()
        scored = [rows[i, p - 1] for i, w in enumerate(material.windows) for p in range(w.first, len(w.tokens))]
        tables.append((log_softmax(np.array(scored, np.float64)), answers))
    (p, first), (q, second) = tables
    assert lossy.kl_nats.value > 0
    assert lossy.kl_nats.value == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-3, abs=1e-9)
    assert lossy.flip_rate.value == pytest.approx((p.argmax(-1) != q.argmax(-1)).mean())
    targets = [t for w in material.windows for t in w.tokens[w.first :]]
    losses = [-table[np.arange(len(targets)), targets].mean() for table in (p, q)]
    assert lossy.perplexity_ratio.value == pytest.approx(np.exp(losses[1] - losses[0]), rel=1e-4)
    until = [next((k for k in range(12) if a[k] != b[k]), 12) for a, b in zip(first, second, strict=True)]
    assert lossy.agreement_tokens.value == pytest.approx(np.mean(until))
    assert lossy.kv_bytes_per_token * 2 == report.unquantized.kv_bytes_per_token
    assert lossy.weight_bytes * 2 == report.unquantized.weight_bytes


@needs_native
def test_all_stands_for_what_the_backend_offers(toy) -> None:
    folder = toy[1]
    files = locate(str(folder))
    for backend in ("torch", "native"):
        offered = BACKENDS.get(backend).formats()
        config = EngineConfig(model=str(folder), backend=backend)
        assert expand(config, files, ["all"], ["fp32"]) == [(w, "fp32") for w in offered.weights]
        assert expand(config, files, ["auto"], ["all"]) == [("auto", k) for k in offered.kv]
        for kv in offered.kv:
            loaded = BACKENDS.get(backend).load(files, EngineConfig(model=str(folder), backend=backend, kv=kv))
            assert loaded.kv_precision == kv
    config = EngineConfig(model=str(folder), backend="torch")
    pairs = [("bf16", "fp32"), ("bf16", "auto"), ("INT4-g32", "fp32"), ("INT4-g32", "auto")]
    assert expand(config, files, ["bf16", "INT4-g32"], ["fp32", "auto"]) == pairs


@needs_native
def test_without_torch_the_reference_is_the_native_backend_and_says_why(toy, monkeypatch) -> None:
    folder = toy[1]
    files = locate(str(folder))
    config = EngineConfig(model=str(folder))
    chosen, said = unquantized(config, files, "auto")
    assert (chosen.backend, chosen.weights, chosen.kv) == ("torch", "fp32", "fp32")
    assert "torch" in said
    monkeypatch.setattr(type(BACKENDS.get("torch")), "unavailable", lambda *_: "torch is not installed")
    chosen, said = unquantized(config, files, "auto")
    assert (chosen.backend, chosen.weights, dict(chosen.options)) == ("native", "auto", {"activations": "fp32"})
    assert "torch is not installed" in said
    with pytest.raises(InvalidInput, match="torch is not installed"):
        unquantized(config, files, "torch")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--window", "2"], "window"),
        (["--window", "100000"], "window"),
        (["--stride", "0", "--window", "32"], "stride"),
        (["--text", "/no/such/file", "--window", "32"], "text"),
        (["--reference", "oracle", "--window", "32", "--stride", "8"], "oracle"),
        (["--scratch", "/no/such/folder", "--window", "32"], "scratch"),
        (["--weights", "int3", "--window", "32", "--stride", "8", "--backend", "torch", "--tokens", "60"], "int3"),
        (["--option", "x"], "NAME=VALUE"),
        (["--prompts", "0"], "prompts"),
        (["--questions", "0"], "questions"),
        (["--questions", "61"], "questions"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(toy, arguments, text, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["quality", str(toy[1]), "--threads", "1", *arguments])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert text in line


def test_too_little_scratch_space_is_said_before_anything_is_computed(toy, tmp_path, monkeypatch) -> None:
    usage = type(sys)("usage")
    usage.free = 1000
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(DoesNotFit, match="set it to"):
        measure(config_of(toy[1], "torch"), [], TEXT, "t", built_in()[:1], SETTINGS, scratch=tmp_path)


def test_the_command_prints_a_table_or_json(toy, tmp_path, capsys) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    common = [
        "quality", str(toy[1]), "--backend", "torch", "--weights", "bf16", "--weights", "fp32", "--kv", "fp16",
        "--window", "48", "--stride", "24", "--prompts", "3", "--prompt-tokens", "8", "--agreement", "6",
        "--threads", "1", "--questions", "5", "--text", str(tmp_path / "text.txt"), "--scratch", str(tmp_path), "--speed-repeats", "2",
    ]  # fmt: skip
    main_quietly([*common, "--json"])
    body = json.loads(capsys.readouterr().out)
    assert [(f["asked_weights"], f["kv"]) for f in body["formats"]] == [("bf16", "fp16"), ("fp32", "fp16")]
    assert body["text"] == "text.txt"
    assert body["questions"] == 5
    assert body["reference"].endswith("by torch")
    for found in body["formats"]:
        assert found["speed"]["decode_tokens_per_s"]["value"] > 0
        assert found["speed"]["repeats"] == 2
        assert found["kl_nats"]["low"] <= found["kl_nats"]["value"] <= found["kl_nats"]["high"]
    main_quietly([*common])
    out = capsys.readouterr().out
    assert "perplexity" in out
    assert "torch bf16 / fp16" in out
    assert re.search(r"normed +prompt tok/s +answer tok/s\n", out), "what was timed is shown"
    assert "2 times" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text.txt"]


def main_quietly(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0


def test_the_table_names_what_was_asked_where_it_differs(toy, questions, tmp_path) -> None:
    config = config_of(toy[1], "torch")
    report = measure(config, [("bf16", "auto")], TEXT, "t", questions, SETTINGS, scratch=tmp_path)
    assert "torch bf16 / auto = fp32" in as_text(report)
    assert "tok/s" not in as_text(report)
