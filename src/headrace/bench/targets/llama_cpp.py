"""llama.cpp's `llama-server`. It takes a GGUF file; a known name or a folder is turned into one."""

from headrace.base.errors import HeadraceError, InvalidInput
from headrace.bench.targets import EngineTarget


def gguf_path(model: str) -> str:
    """The GGUF file of a model; `InvalidInput` where it has none."""
    if model.endswith(".gguf"):
        return model
    from headrace.spec.locate import locate

    try:
        files = locate(model)
    except HeadraceError as error:
        raise InvalidInput(str(error), field="--model") from error
    if files.kind != "gguf":
        raise InvalidInput(f"llama.cpp needs a GGUF file, and {model!r} is not one", field="--model")
    return str(files.weights[0])


TARGET = EngineTarget("llama-cpp", model_path=gguf_path, defaults={"slots": "8", "context": "2048"})
