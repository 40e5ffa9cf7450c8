"""GGUF files through the native backend: every architecture's names and row orders, and every type that has a packed form."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from test_models_gguf import convert, test_gguf_distributions_equal_transformers  # noqa: F401
from test_models_logits import VOCAB, dense, tiny_model
from test_native_pack import QUANTIZED, stored
from torch_steps import Engine

from headrace.engine.executors.native import BACKEND as NATIVE
from headrace.engine.executors.torch import BACKEND as TORCH
from headrace.spec.config import EngineConfig
from headrace.spec.ggml import GGML_TYPES_BY_NAME
from headrace.spec.locate import locate

pytestmark = pytest.mark.usefixtures("native_engines")
"""The borrowed test then runs on this backend, with exact activations."""

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
"""A block of the K types is 256 inputs."""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A function that writes a small llama whose matrices have `kinds` in turn."""

    def write(kinds: tuple[str, ...]):
        model, folder = tiny_model(tmp_path, "llama", **WIDE)
        plain, count = gguf.GGUFWriter.add_tensor, 0

        def add(writer, name, tensor):
            nonlocal count
            if tensor.ndim < 2:
                return plain(writer, name, tensor)
            kind = kinds[count % len(kinds)]
            count += 1
            code = gguf.GGMLQuantizationType[kind.upper()]
            try:
                data = gguf.quantize(tensor, code)
            except NotImplementedError:  # random codes; scales like those of weights
                data = stored(kind, *tensor.shape, seed=count).data.reshape(len(tensor), -1, _block_bytes(kind))
                for at in {"q6_k": (208,)}.get(kind, (0, 2)):
                    scale = data[..., at : at + 2].copy().view(np.float16) / 40
                    data[..., at : at + 2] = scale.astype(np.float16).view(np.uint8)
                data = data.reshape(len(tensor), -1)
            return plain(writer, name, data, raw_dtype=code)

        monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
        convert(folder, tmp_path / "model.gguf", "llama", model.config)
        return tmp_path / "model.gguf"

    return write


def _block_bytes(kind: str) -> int:
    return GGML_TYPES_BY_NAME[kind].block_bytes


def answers(backend, path, **options):
    files = locate(str(path))
    config = EngineConfig(model=str(path), threads=1, kv="fp32", **options)
    assert backend.unavailable(files, config) is None
    engine = Engine(backend.load(files, config), block_tokens=16)
    try:
        s = engine.add(list(range(3, 60)), prompt_logprobs=VOCAB, logprobs=VOCAB)
        engine.generate([s], 4)
        assert not s.errors
        return s.tokens[:57], dense(s.prompt_logprobs), engine.model.memory(), engine.model.notes()
    finally:
        engine.close()


@pytest.mark.parametrize(
    "kinds", [*((kind,) for kind in QUANTIZED), QUANTIZED, ("q4_k", "f16", "q6_k", "f32", "bf16")], ids="-".join
)
def test_every_type_and_any_mix_gives_what_the_file_holds(written, kinds):
    path = written(kinds)
    _, expected, _, _ = answers(TORCH, path)
    _, found, memory, notes = answers(NATIVE, path, options=(("activations", "fp32"),))
    np.testing.assert_allclose(found, expected, atol=2e-3, rtol=0)
    assert np.abs(expected - np.log(1 / VOCAB)).max() > 0.1  # it says something
    for item in memory:
        assert item.actual_bytes == item.predicted_bytes, item
    packed = next(note for note in notes if note.startswith("weights packed as"))
    assert all(kind in packed for kind in kinds if kind in QUANTIZED)
