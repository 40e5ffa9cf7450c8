"""flashinfer's attention in place of ours: what is planned, when it is refused, and that the results are the same.

With a GPU the real package computes (left out where it is not installed: its first start compiles for minutes); without one
a stand-in computes by the formula from what was planned, and our kernels run in Triton's interpreter.
"""

from __future__ import annotations

import random
import sys
from importlib.util import find_spec

import kernel_device
import numpy as np
import paged_package
import pytest
import torch
from test_models_logits import VOCAB, dense, reference, tiny_model
from torch_steps import Engine

from headrace.base.errors import InvalidInput
from headrace.engine.cuda import flashinfer
from headrace.engine.cuda.flashinfer import FlashInfer, unfit
from headrace.engine.executors.cuda import BACKEND
from headrace.spec.accounting import cache_layout
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate

ON_GPU, DEVICE = kernel_device.ON_GPU, kernel_device.DEVICE
CUDA = torch.device("cuda")
needs_package = pytest.mark.skipif(
    ON_GPU and find_spec("flashinfer") is None, reason="the package flashinfer-python is not installed"
)
WIDE = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("flashinfer"), "llama", **WIDE)


@pytest.fixture
def stand_in(monkeypatch):
    """Where there is no GPU, the package is the stand-in and the GPU is not asked for."""
    if not ON_GPU:
        monkeypatch.setitem(sys.modules, "flashinfer", paged_package)
        monkeypatch.setattr(flashinfer, "unfit", lambda *_: None)


def package(folder, monkeypatch, text: str) -> None:
    (folder / "flashinfer").mkdir()
    (folder / "flashinfer" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # so that what the test imports goes again after it
    del sys.modules["flashinfer"]


class TestRefusals:
    @pytest.mark.skipif(find_spec("flashinfer") is not None, reason="the package is installed")
    def test_a_missing_package(self, plain):
        config = EngineConfig(model=str(plain[1]), backend="cuda", attention="flashinfer")
        with pytest.raises(InvalidInput, match=r"not installed \(pip install flashinfer-python\)") as refusal:
            BACKEND.load(locate(str(plain[1])), config)
        assert refusal.value.field == "attention"
        assert "triton" in refusal.value.remedy

    def test_unknown_attention_names_the_known(self, plain):
        config = EngineConfig(model=str(plain[1]), backend="cuda", attention="sdpa")
        with pytest.raises(InvalidInput, match="sdpa") as refusal:
            BACKEND.load(locate(str(plain[1])), config)
        assert "flashinfer" in refusal.value.remedy

    def test_what_does_not_fit(self, plain, tmp_path, monkeypatch):
        spec = locate(str(plain[1])).spec()
        package(tmp_path, monkeypatch, "__version__ = '0.6.14'")
        assert unfit(spec, "bf16", "bf16", CUDA) is None
        assert "NVIDIA GPU" in unfit(spec, "bf16", "bf16", torch.device("cpu"))
        assert "not in fp32" in unfit(spec, "fp32", "fp32", CUDA)
        assert "not int8" in unfit(spec, "bf16", "int8", CUDA)
        narrow = locate(str(tiny_model(tmp_path, "llama")[1])).spec()
        assert "not of 16" in unfit(narrow, "bf16", "bf16", CUDA)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("__version__ = '0.5.3'", "0.5.3 is too old"),
            ("__version__ = 'unknown'", "unknown is too old"),
            ("import no_such_dependency", "no_such_dependency"),
        ],
    )
    def test_unfit_packages(self, plain, tmp_path, monkeypatch, text, reason):
        package(tmp_path, monkeypatch, text)
        assert reason in unfit(locate(str(plain[1])).spec(), "bf16", "bf16", CUDA)

    def test_kernels_that_cannot_be_compiled(self, plain, monkeypatch):
        def fails(*_, **__):
            raise RuntimeError("Could not find nvcc\nninja: build stopped")

        monkeypatch.setitem(sys.modules, "flashinfer", paged_package)
        monkeypatch.setattr(paged_package.BatchPrefillWithPagedKVCacheWrapper, "plan", fails)
        with pytest.raises(InvalidInput, match="ninja: build stopped") as refusal:
            planner(locate(str(plain[1])).spec())
        assert "nvcc" in refusal.value.remedy


def planner(spec, dtype=torch.bfloat16, *, rows=8, blocks=40, graphs=False, block_tokens=8) -> FlashInfer:
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count if ON_GPU else 4
    layout = cache_layout(spec, "bf16", block_tokens)
    return FlashInfer(spec, layout, dtype, DEVICE, rows=rows, sms=sms, blocks=blocks, graphs=graphs)


def by_formula(q, kv, table, position, kind) -> torch.Tensor:
    """One query [heads, dim] against the keys it sees, in fp64."""
    size = kv.shape[3]
    first = 0 if kind.window is None else max(0, position - kind.window + 1)
    at = torch.arange(first, position + 1)
    found = kv[torch.as_tensor(table)[at // size].long(), :, :, at % size]  # [keys, 2, kv_heads, dim]
    k, v = (found[:, j].repeat_interleave(kind.num_heads // kind.num_kv_heads, 1) for j in range(2))
    scores = torch.einsum("hd,khd->hk", q, k) * kind.scale
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    return torch.einsum("hk,khd->hd", scores.softmax(-1), v)


SIZE, BLOCKS, ROWS = 8, 40, 8
compiled_elsewhere = pytest.mark.skipif(ON_GPU, reason="its two kinds of kernels compile for minutes more")


@needs_package
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral-window", pytest.param("gemma2", marks=compiled_elsewhere)])
def test_random_batches_equal_the_formula(tmp_path, stand_in, name, graphs):
    spec = locate(str(tiny_model(tmp_path, name, **WIDE)[1])).spec()
    plans = planner(spec, rows=ROWS, blocks=BLOCKS, graphs=graphs, block_tokens=SIZE)
    rng = np.random.default_rng(5)
    for decoding, prompts in ((3, 2), (0, 3), (1, 1), (2, 0), (5, 0), (0, 0)):
        tables = np.stack([rng.permutation(ROWS * BLOCKS).reshape(ROWS, BLOCKS) for _ in range(3)]).astype(np.int32)
        kv = kernel_device.randn(ROWS * BLOCKS, 2, 2, SIZE, 128, dtype=torch.bfloat16, seed=decoding)
        slots = rng.permutation(ROWS)
        singles, long = slots[:decoding], slots[decoding : decoding + prompts]
        at = rng.integers(0, BLOCKS * SIZE, decoding)
        starts, lengths = rng.integers(0, 200, prompts), rng.integers(2, 100, prompts)
        # Slot and position of every row.
        wanted = list(zip(singles.tolist(), at.tolist(), strict=True))
        wanted += [(s, b + j) for s, b, n in zip(long.tolist(), starts, lengths, strict=True) for j in range(n)]
        for layer, kind in {k: (i, k) for i, k in enumerate(plans._kinds)}.values():
            # What lies wholly behind the window belongs to others by now.
            unseen = tables.copy()
            for slot, first in zip(slots, (*at, *starts), strict=False):
                behind = 0 if kind.window is None else max(0, first - kind.window + 1) // SIZE
                unseen[kind.group, slot, :behind] = 10**6
            rows = len(wanted) if prompts else ROWS - 1
            planned = (
                plans.mixed(singles, at, long, starts, lengths, unseen)
                if prompts
                else plans.decode(rows, singles, at, unseen)
            )
            qkv = kernel_device.randn(rows, 8 * 128, dtype=torch.bfloat16, seed=prompts)
            out = torch.full((rows, 4 * 128), float("nan"), dtype=torch.bfloat16, device=DEVICE)
            planned.run(layer, qkv, out, kv)
            q, found = (t[: len(wanted), : 4 * 128].unflatten(1, (4, 128)).double().cpu() for t in (qkv, out))
            exact = kv.double().cpu()
            right = [by_formula(q[i], exact, tables[kind.group][s], p, kind) for i, (s, p) in enumerate(wanted)]
            if right:
                assert kernel_device.gap(found, torch.stack(right)) < 1e-2


def advance(runs: Engine, prompts: list[list[int]]) -> list:
    """Random chunks of prompts, the last token of each alone, so that steps mix chunks and rows of one token."""
    rng = random.Random(11)
    sequences = [runs.add(p, logprobs=VOCAB) for p in prompts]
    while waiting := [s for s in sequences if s.computed < len(s.prompt)]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        runs.step([(s, max(1, min(rng.choice((5, 9, 40)), len(s.prompt) - 1 - s.computed))) for s in chosen])
    runs.step([(s, 1) for s in sequences])
    assert not any(s.errors for s in sequences)
    return sequences


@needs_package
@pytest.mark.parametrize("name", ["llama", "mistral-window", pytest.param("gemma2", marks=compiled_elsewhere)])
def test_the_model_computes_the_same_as_with_our_attention(tmp_path, stand_in, name):
    model, folder = tiny_model(tmp_path, name, **WIDE if ON_GPU else {"num_hidden_layers": 2})
    rng = random.Random(2)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in ((2, 9, 30, 55, 71) if ON_GPU else (2, 17))]
    off = {}
    for attention, graphs in (("triton", "1"), ("flashinfer", "1"), ("flashinfer", "0"))[0 if ON_GPU else 2 :]:
        config = EngineConfig(
            model=str(folder), backend="cuda", device="cuda" if ON_GPU else "auto",
            weights="bf16" if ON_GPU else "fp32", attention=attention, options=(("graphs", graphs),),
        )  # fmt: skip
        loaded = BACKEND.load(locate(str(folder)), config)
        runs = Engine(loaded, num_blocks=120, max_num_seqs=6, max_model_len=96)
        sequences = advance(runs, prompts)
        runs.close()
        assert f"attention: {'flashinfer' if attention == 'flashinfer' else 'headrace'}" in " ".join(loaded.notes())
        # The first token after a prompt has the same context in all of them; the second only if the first is the same.
        right = [reference(model, s.tokens).numpy()[len(s.prompt) - 1 : -1] for s in sequences]
        found = [dense(s.logprobs) for s in sequences]
        off[attention, graphs] = [float(np.abs(f - r).max()) for f, r in zip(found, right, strict=True)]
    if not ON_GPU:
        assert max(map(max, off.values())) < 1e-4
        return
    # In bf16 each is as far from the fp32 reference as rounding takes it, and neither much farther than the other.
    for graphs in "01":
        assert np.mean(off["flashinfer", graphs]) < 1.5 * np.mean(off["triton", "1"]) + 0.02, off


@needs_package
def test_a_step_that_was_not_planned_is_no_step(plain, stand_in):
    config = EngineConfig(
        model=str(plain[1]), backend="cuda", device="cuda" if ON_GPU else "auto", attention="flashinfer",
        weights="bf16" if ON_GPU else "fp16",
    )  # fmt: skip
    runs = Engine(BACKEND.load(locate(str(plain[1])), config), num_blocks=20, max_num_seqs=4, max_model_len=32)
    decoder = runs.executor.runner._decoder
    from headrace.engine.cuda.decoder import DeviceStep

    blank = torch.full((2,), -1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(RuntimeError, match="not planned"):
        decoder.run(DeviceStep(blank, blank, blank, 2))
    runs.close()
