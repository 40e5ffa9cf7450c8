"""The native executor: packed weights and hand-written CPU kernels, without torch.

`headrace_native` is a distribution of its own, since building it takes a C++ compiler.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace.engine.backend import Formats
from headrace.engine.models._support import unsupported
from headrace.spec.config import EngineConfig
from headrace.spec.locate import ModelFiles
from headrace.spec.tensors import weights

if TYPE_CHECKING:
    from headrace.engine.native.model import NativeModel

MISSING = (
    "headrace-native is not installed (pip install 'headrace[cpu]', or with a C++ compiler from a checkout: "
    "pip install ./native)"
)

INTERFACE = 2
"""Of `headrace_native`, which is installed on its own and may be older or newer than this package."""


def not_usable() -> str | None:
    """Why the extension cannot be called."""
    if find_spec("headrace_native") is None:
        return MISSING
    try:
        import headrace_native
    except ImportError as error:
        return f"headrace-native does not load ({error}); install it again: make setup, or pip install ./native from a checkout"
    found = getattr(headrace_native, "INTERFACE", 1)
    if found != INTERFACE:
        return (
            f"the installed headrace-native is of another version (interface {found}, needed {INTERFACE}): make setup, "
            "or pip install ./native from the same checkout"
        )
    return None


class NativeBackend:
    name = "native"

    def unavailable(self, files: ModelFiles, config: EngineConfig) -> str | None:
        if config.device not in ("auto", "cpu"):
            return f"it computes on the CPU, not on {config.device}"
        if (reason := not_usable()) is not None:
            return reason
        reason = unsupported(files.spec()) or _not_packed(files, config)
        if reason is None:
            from headrace.engine.native.layers import unsupported as not_computed

            reason = not_computed(files.spec())
        if reason is None and files.kind == "gguf" and config.load_format != "dummy":
            from headrace.engine.native.formats import unknown_types

            reason = unknown_types(files.gguf())
        if reason is None and config.backend == "auto" and config.block_tokens is not None and config.block_tokens % 16:
            reason = f"blocks of {config.block_tokens} tokens are not a multiple of 16"
        return reason

    def formats(self) -> Formats:
        from headrace.engine.native.model import offered

        return offered()

    def load(self, files: ModelFiles, config: EngineConfig) -> NativeModel:
        from headrace.engine.native.model import load

        return load(files, config)


def _not_packed(files: ModelFiles, config: EngineConfig) -> str | None:
    """Why weights of this precision have no packed form here; the torch backend knows them all."""
    from headrace.spec.packing import BLOCK_KINDS, GROUP, WEIGHTS

    quantization = files.quantization()
    if quantization is not None and config.load_format != "dummy":
        from headrace.engine.weights.quantized import no_reader

        spec = files.spec()
        if (reason := no_reader(quantization)) is not None:
            return reason
        if spec.checkpoint_precision not in BLOCK_KINDS:
            return f"the checkpoint is quantized ({spec.checkpoint_precision}), which it cannot repack without loss"
        if any(w.linear and w.shape[-1] % GROUP for w in weights(spec, mtp=False)):
            return f"the checkpoint is quantized and has matrices whose inputs are not a multiple of {GROUP}"
    # A backend that was asked for by name says itself what it takes.
    if config.backend == "auto" and config.weights not in WEIGHTS:
        return f"it has no packed form of weights {config.weights}"
    if config.backend == "auto" and config.kv != "auto":
        from headrace.engine.native.compute import KV_TYPES

        if config.kv not in KV_TYPES:
            return f"it has no KV {config.kv}"
    return None


BACKEND = NativeBackend()
