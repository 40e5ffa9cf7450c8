"""From located files to the tensors in them, whatever their format; only the modules of that format are imported."""

from __future__ import annotations

from headrace.base.errors import InvalidInput
from headrace.engine.weights.source import TensorSource
from headrace.spec.config import EngineConfig
from headrace.spec.locate import ModelFiles


def open_weights(files: ModelFiles, config: EngineConfig) -> TensorSource:
    """The weights that `config` asks for; InvalidInput for a folder without any."""
    if config.load_format == "dummy":
        from headrace.engine.weights.dummy import DummySource

        return DummySource(config.seed)
    if files.kind == "gguf":
        from headrace.engine.weights.gguf import GGUFSource

        return GGUFSource(files.gguf())
    from headrace.engine.weights.safetensors import SafetensorsSource, checkpoint_paths

    paths = checkpoint_paths(files.root)
    if not paths:
        raise InvalidInput(
            f"{files.root} holds no safetensors weights", field="model", remedy="load_format dummy draws random ones"
        )
    source = SafetensorsSource(paths)
    quantization = files.quantization()
    if quantization is None:
        return source
    from headrace.engine.weights.quantized import QuantizedSource

    return QuantizedSource(source, quantization, files.spec().checkpoint_precision)
