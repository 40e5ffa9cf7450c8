"""The CUDA executor: one NVIDIA GPU of compute capability 8.0 or later, kernels in Triton, products of many rows by cuBLAS.

Nothing of torch is imported with this module unless the machine shows a driver, so that asking costs nothing elsewhere.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.backend import Formats
from headrace.engine.models._support import unsupported
from headrace.spec.config import EngineConfig
from headrace.spec.locate import ModelFiles
from headrace.spec.model import ModelSpec, MoE

if TYPE_CHECKING:
    from headrace.engine.cuda.model import CudaModel

OLDEST = (8, 0)


class CudaBackend:
    name = "cuda"

    def unavailable(self, files: ModelFiles, config: EngineConfig) -> str | None:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1" and config.backend == "cuda"
        if config.device != "auto" and not config.device.startswith("cuda") and not interpreted:
            return f"it computes on NVIDIA GPUs, not on {config.device}"
        for package in ("torch", "triton"):
            if find_spec(package) is None:
                return f"{package} is not installed (pip install 'headrace[engine]')"
        if not interpreted:
            if not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):
                return "no NVIDIA driver on this machine"
            if (reason := _device(config)) is not None:
                return reason
        quantization = files.quantization()
        if quantization is not None and config.load_format != "dummy":
            from headrace.engine.weights.quantized import no_reader

            if (reason := no_reader(quantization)) is not None:
                return reason
        return unsupported(files.spec()) or _not_computed(files.spec())

    def formats(self) -> Formats:
        from headrace.engine.cuda.model import offered

        return offered()

    def load(self, files: ModelFiles, config: EngineConfig) -> CudaModel:
        from headrace.engine.cuda.model import load

        return load(files, config)


def _device(config: EngineConfig) -> str | None:
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    index = int(config.device.partition(":")[2] or 0) if config.device != "auto" else 0
    if index >= torch.cuda.device_count():
        return f"there is no cuda:{index}, only {torch.cuda.device_count()} devices"
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        name = torch.cuda.get_device_name(index)
        return (
            f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0 (Ampere) or later; "
            "use backend torch or native on the CPU"
        )
    return None


def _not_computed(spec: ModelSpec) -> str | None:
    for i, layer in enumerate(spec.layers):
        if isinstance(layer.mlp, MoE):
            return f"layer {i}: mixtures of experts have no GPU kernels yet"
        if layer.mixer.head_dim > 256:
            return f"layer {i}: heads of {layer.mixer.head_dim} dimensions are wider than 256"
    return None


BACKEND = CudaBackend()
