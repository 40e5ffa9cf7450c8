"""The deployment that `headrace plan` is asked about, as options that its verbs share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from headrace.cli._options import options_of

if TYPE_CHECKING:
    from headrace.plan.deployment import Inputs


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model on cards under an engine."""

    model: Annotated[str, "catalog name, hub id, folder, .gguf or config.json"]
    gpu: Annotated[str, "GPU of the catalog (headrace plan gpus lists them)"] = "h100-sxm-80"
    gpus: Annotated[int, "GPUs in all"] = 1
    tp: Annotated[int | None, "tensor-parallel ranks; default: all GPUs"] = None
    weights: Annotated[str, "precision of the weights; auto: the checkpoint's"] = "auto"
    kv: Annotated[str, "precision of the KV cache; auto: the engine's default"] = "auto"
    engine: Annotated[str, "headrace, vllm, sglang, tensorrt-llm or llama-cpp"] = "vllm"
    engine_version: Annotated[str, "engine version; default: the newest known"] = ""
    memory_fraction: Annotated[float | None, "the engine's memory fraction"] = None
    max_batched_tokens: Annotated[int | None, "token budget of a step"] = None
    max_num_seqs: Annotated[int | None, "most sequences that run together"] = None
    pp: Annotated[int, "pipeline stages"] = 1
    dp: Annotated[int, "attention replicas (data-parallel attention)"] = 1
    ep: Annotated[int, "ranks over which experts are spread"] = 1
    draft_tokens: Annotated[int, "speculation: proposals per step"] = 0
    eager: Annotated[bool, "run without captured graphs"] = False

    def inputs(self, **more: Any) -> Inputs:
        """The planner's question; keyword arguments are its other fields."""
        from headrace.base.errors import InvalidInput
        from headrace.plan.deployment import Inputs

        if self.gpus < 1:
            raise InvalidInput(f"gpus must be at least 1, got {self.gpus}", field="gpus")
        if self.engine_version and not self.engine_version.removeprefix("v")[:1].isdigit():
            raise InvalidInput(f"{self.engine_version!r} is not a version such as 0.11.0", field="engine_version")
        given = dict(vars(self))
        return Inputs(n_gpus=given.pop("gpus"), **given, **more)


target_options = options_of(Target, "target", panel="Deployment")
"""Options of a command with `target: Target`."""
