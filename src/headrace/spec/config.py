"""The engine's options: parsed once, frozen, then resolved once into numbers (`headrace.engine.launch`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from headrace.base.errors import InvalidInput

MOST_THREADS = 1024
"""More threads than that are a mistake, which would end in a library's abort and not in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a user may set for an engine. `None` and `"auto"` are resolved at start and the result is logged.

    This is the only list of these options: the command line and `LLM` are made from it, and the text beside each type
    is its help. A value that can be known to be wrong without a model is refused here (`InvalidInput`).
    """

    model: Annotated[str, "hub id, folder, .gguf file or known name"]
    revision: Annotated[str | None, "branch, tag or commit of a model that comes from the hub"] = None
    load_format: Annotated[Literal["auto", "dummy"], "dummy: random weights, from the config alone"] = "auto"
    backend: Annotated[
        str, "backend that computes: cuda, native, torch, or auto for the first of these that can serve the model"
    ] = "auto"
    device: Annotated[str, "cpu, cuda, cuda:1, …"] = "auto"
    weights: Annotated[
        str,
        "precision of the weights in memory: int8, int4_g128, nf4, fp8, …; auto: what the backend makes of the stored ones",
    ] = "auto"
    kv: Annotated[str, "precision of the KV cache: fp16, fp8, int8, int4, …; auto: the backend's own, unquantized"] = (
        "auto"
    )
    max_model_len: Annotated[
        int | None, "longest prompt plus answer, in tokens; default: the model's own, or what the KV pool holds"
    ] = None
    max_num_seqs: Annotated[int | None, "most sequences that run together; default: 64 on a CPU, 256 on a GPU"] = None
    max_batched_tokens: Annotated[int | None, "token budget of one step; default: 512 on a CPU, 16384 on a GPU"] = None
    max_prefill_tokens: Annotated[
        int | None, "most prompt tokens of a step in which others decode; default: 256 on a GPU"
    ] = None
    step_target_ms: Annotated[
        float | None,
        "cut prompts so that a step in which others decode takes about this many milliseconds; default: 75 on a CPU",
    ] = None
    block_tokens: Annotated[int | None, "tokens of one KV block; default: 16, with int4 keys 32"] = None
    memory_fraction: Annotated[
        float | None,
        "share of the device's (CPU: the available) memory for weights, activations and KV pool together; default: 0.9, "
        "on a CPU 0.6 with a pool of at most 2 GiB",
    ] = None
    kv_bytes: Annotated[int | None, "size of the KV pool in bytes; overrides the memory fraction"] = None
    num_blocks: Annotated[int | None, "size of the KV pool in blocks; overrides the memory fraction"] = None
    prefix_cache: Annotated[bool, "reuse the KV of prefixes that were computed before"] = True
    chunked_prefill: Annotated[bool, "let a long prompt take several steps"] = True
    order: Annotated[str, "policy that orders waiting requests: priority, fcfs or prefix-aware"] = "priority"
    eviction: Annotated[str, "policy that picks which cached prefix is dropped first: lru or lfu"] = "lru"
    overlap: Annotated[bool, "issue step n+1 before step n has been committed"] = True
    attention: Annotated[str, "attention: auto; with torch sdpa or naive, with cuda triton or flashinfer"] = "auto"
    drafter: Annotated[str, "speculative decoding: the drafter that proposes tokens; there is none yet"] = "none"
    threads: Annotated[int | None, "CPU threads of the engine; default: one per core"] = None
    seed: Annotated[int, "seed of dummy weights"] = 0
    cache: Annotated[bool, "keep weights that were converted for this machine on disk for the next start"] = True
    options: Annotated[tuple[tuple[str, str], ...], "NAME=VALUE for the chosen backend, drafter or policy"] = ()

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_batched_tokens",
            "max_prefill_tokens",
            "block_tokens",
            "num_blocks",
            "threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name} must be at least 1, not {value}", field=name)
        if (self.threads or 1) > MOST_THREADS:  # libraries end the process when the system refuses them threads
            raise InvalidInput(f"threads must be at most {MOST_THREADS}, not {self.threads}", field="threads")
        if self.step_target_ms is not None:
            if not 0.0 < self.step_target_ms < math.inf:
                raise InvalidInput(f"step_target_ms must be above 0, not {self.step_target_ms}", field="step_target_ms")
            if not self.chunked_prefill:
                raise InvalidInput(
                    "step_target_ms cuts prompts into chunks, and chunked_prefill is off",
                    field="step_target_ms",
                    remedy="give one of them",
                )
        if self.kv_bytes is not None and self.kv_bytes < 0:
            raise InvalidInput(f"kv_bytes must not be negative, not {self.kv_bytes}", field="kv_bytes")
        if self.memory_fraction is not None and not 0.0 < self.memory_fraction <= 1.0:
            raise InvalidInput(
                f"memory_fraction must be above 0 and at most 1, not {self.memory_fraction}", field="memory_fraction"
            )
        if self.kv_bytes is not None and self.num_blocks is not None:
            raise InvalidInput("kv_bytes and num_blocks both set the pool's size", field="kv_bytes", remedy="give one")
