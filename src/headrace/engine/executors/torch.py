"""The torch executor: any supported architecture on the CPU in fp32 or bf16; the reference for faster ones.

torch is imported when a model is loaded, not with this module, so that asking whether it is available costs nothing.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace.engine.backend import Formats
from headrace.engine.models._support import unsupported
from headrace.spec.config import EngineConfig
from headrace.spec.locate import ModelFiles

if TYPE_CHECKING:
    from headrace.engine.torch_model import TorchModel


class TorchBackend:
    name = "torch"
    libraries = ("torch",)
    # A worker that waits for the next operator spins for about a tenth of a millisecond, which covers what lies between two
    # products; libgomp's default of several milliseconds would stall a step whenever another process needs the core.
    environment = (("GOMP_SPINCOUNT", "10000"),)

    def unavailable(self, files: ModelFiles, config: EngineConfig) -> str | None:
        if find_spec("torch") is None:
            return "torch is not installed (pip install 'headrace[engine]')"
        if config.device not in ("auto", "cpu"):
            return f"device {config.device} is not served by it yet, only cpu"
        return unsupported(files.spec()) or _not_read(files, config)

    def formats(self) -> Formats:
        from headrace.engine.torch_model import offered

        return offered()

    def load(self, files: ModelFiles, config: EngineConfig) -> TorchModel:
        from headrace.engine.torch_model import load

        return load(files, config)


def _not_read(files: ModelFiles, config: EngineConfig) -> str | None:
    quantization = files.quantization()
    if quantization is None or config.load_format == "dummy":
        return None
    from headrace.engine.weights.quantized import no_reader

    return no_reader(quantization)


BACKEND = TorchBackend()
