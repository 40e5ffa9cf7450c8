"""The real small model: close to the exact values of its file on text, the same bits whatever shares the batch."""

from __future__ import annotations

import random

import headrace_native
import numpy as np
import pytest
from test_models_logits import random_schedule
from test_models_smollm2 import oracle, prompts, tokenizer  # noqa: F401
from torch_steps import Engine

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("native_engines")]

TEXT = (
    "The tide comes in twice a day because the sea follows the moon. As the earth turns, each shore passes once under the "
    "bulge of water that the moon raises and once under the one on the far side. Where the coast is a funnel, as in the Bay of "
    "Fundy, the water piles up and rises by as much as sixteen metres; in the Mediterranean, whose mouth is narrow, it hardly "
    "moves at all.\n\ndef mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total / "
    "len(values)\n\nIn 1804 a steam engine on rails pulled ten tons of iron and seventy men over nine miles in Wales. The rails "
    "broke under its weight, and horses went on working there for another twenty years. \"It is a toy,\" said the owner of "
    "the mine, \"but my grandchildren will ride behind it.\" He was right about the grandchildren."
)  # fmt: skip
VOCAB = 49152
PREFILL, DECODED = 96, 24


def distributions(tokens: list[int], native_engines, count: int | None = None, **options) -> np.ndarray:
    """Log-probabilities [positions, vocab] of the text, from the compute itself: the whole vocabulary of every position."""
    native_engines["options"] = tuple(options.pop("options", ()))
    engine = Engine.of("smollm2-135m", num_blocks=200, max_model_len=1024, max_num_seqs=4, threads=2, **options)
    try:
        sequence = engine.add(tokens, prompt_logprobs=0)
        compute = engine.executor._step.__self__._compute
        kept = []
        real = compute.logits
        compute.logits = lambda first, rows: kept.append(real(first, rows).copy()) or kept[-1]
        engine.step([(sequence, len(tokens))])
        return log_softmax(np.concatenate(kept[1:]).astype(np.float64))  # the first are those of the sampled row
    finally:
        engine.close()


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def drift(expected: np.ndarray, found: np.ndarray) -> float:
    return float((np.exp(expected) * (expected - found)).sum(-1).mean())


@pytest.fixture(scope="module")
def text(tokenizer) -> list[int]:  # noqa: F811
    return tokenizer.encode(TEXT)


@pytest.fixture(scope="module")
def exact(text, oracle) -> np.ndarray:  # noqa: F811
    """transformers in fp32 with the values of the file."""
    import torch

    with torch.inference_mode():
        return log_softmax(oracle(torch.tensor([text])).logits[0].double().numpy())[:-1]


def test_exact_activations_are_the_file_s_values(text, exact, native_engines):
    found = distributions(text, native_engines, options=(("activations", "fp32"),), kv="fp32")
    assert drift(exact, found) < 1e-6
    np.testing.assert_allclose(found, exact, atol=5e-3)
    assert (found.argmax(-1) == exact.argmax(-1)).mean() > 0.995


@pytest.mark.parametrize(("kv", "most"), [("fp16", 0.01), ("bf16", 0.01), ("int8", 0.012)])
def test_int8_activations_are_close_on_text(text, exact, native_engines, kv, most):
    found = distributions(text, native_engines, kv=kv)
    print(f"KV {kv}: KL {drift(exact, found):.5f}, top-1 {(found.argmax(-1) == exact.argmax(-1)).mean():.3f}")
    assert drift(exact, found) < most
    assert (found.argmax(-1) == exact.argmax(-1)).mean() > 0.93


@pytest.mark.parametrize(
    ("kernels", "kv"),
    [
        (kernels, kv)
        for kernels in headrace_native.kernels()
        for kv in (("bf16",) if kernels == "avx512-bf16" else ("fp16", "int8"))  # of others its code is avx512-vnni's
        if kernels != "scalar"
    ],
)
def test_no_bit_depends_on_the_batch(prompts, native_engines, kernels, kv):  # noqa: F811
    """Log-probabilities, compared for equality: alone, together, in chunks, after others' blocks, on one thread or two."""
    native_engines["options"] = (("kernels", kernels),)
    chosen = [p * 3 for p in prompts[:12:2]] + [prompts[1]]

    def run(threads: int, together: bool, seed: int | None):
        engine = Engine.of(
            "smollm2-135m", num_blocks=400, max_model_len=512, max_num_seqs=16, threads=threads, kv=kv, seed=seed or 0
        )
        try:
            sequences = [engine.add(p, logprobs=5, prompt_logprobs=3) for p in chosen]
            if together and seed is not None:
                random_schedule(engine, sequences, random.Random(seed), 8)
            elif together:
                engine.generate(sequences, 8)
            else:
                for s in sequences:
                    engine.generate([s], 8)
            return [(s.generated[:8], s.logprobs[:8], s.prompt_logprobs) for s in sequences]
        finally:
            engine.close()

    expected = run(1, together=False, seed=None)
    assert run(2, together=True, seed=None) == expected
    assert run(2, together=True, seed=1) == expected
    assert run(2, together=False, seed=None) == expected


@pytest.mark.parametrize(("activations", "kv"), [("int8", "fp16"), ("int8", "bf16"), ("fp32", "fp16")])
def test_every_kernel_set_gives_the_same_bits(text, native_engines, activations, kv):
    """The portable reference and each instruction set: a prompt, 8 tokens and their log-probabilities, for equality."""
    found = {}
    for kernels in headrace_native.kernels():
        native_engines["options"] = (("kernels", kernels), ("activations", activations))
        engine = Engine.of("smollm2-135m", num_blocks=40, max_model_len=128, max_num_seqs=2, threads=2, kv=kv)
        try:
            sequence = engine.add(text[:12], logprobs=5, prompt_logprobs=3)
            engine.generate([sequence], 8)
            found[kernels] = (sequence.generated, sequence.logprobs, sequence.prompt_logprobs)
        finally:
            engine.close()
    assert len(found["scalar"][0]) == 8
    for kernels, other in found.items():
        assert other == found["scalar"], kernels


def test_a_cached_prefix_gives_the_same_bits_as_a_cold_one():
    from headrace import LLM, SamplingParams

    with LLM("smollm2-135m", backend="native", max_model_len=512, kv_bytes=64 * 2**20) as llm:
        params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=4)
        asked = [TEXT + tail for tail in (" Later,", " Then he")]
        cold = llm.generate(asked[0], params)[0]
        warm = llm.generate(asked[0], params)[0]
        other = llm.generate(asked[1], params)[0]
    with LLM("smollm2-135m", backend="native", max_model_len=512, kv_bytes=64 * 2**20) as llm:
        other_cold = llm.generate(asked[1], params)[0]
    assert cold.cached_tokens == other_cold.cached_tokens == 0
    assert warm.cached_tokens > 150
    assert other.cached_tokens > 150
    for a, b in ((cold, warm), (other, other_cold)):
        assert a.token_ids == b.token_ids
        assert a.logprobs == b.logprobs
