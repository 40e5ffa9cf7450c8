"""The engine's options: parsed once, frozen, then resolved once into numbers (`headrace.engine.launch`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a user may set for an engine. `None` and `"auto"` are resolved at start and the result is logged.

    `model`: hub id, folder, `.gguf` file or known name. `load_format`: `dummy` draws random weights from the config alone.
    `memory_fraction`: share of the device's memory (GPU) or of the available host memory (CPU) that weights, activations
    and KV pool may use together; `kv_bytes` or `num_blocks` set the pool directly and win over it.
    `max_batched_tokens`: token budget of one step. `overlap`: issue step n+1 before step n has been committed.
    """

    model: str
    revision: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    backend: str = "auto"
    device: str = "auto"
    weights: str = "auto"
    kv: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    block_tokens: int | None = None
    memory_fraction: float | None = None
    kv_bytes: int | None = None
    num_blocks: int | None = None
    prefix_cache: bool = True
    chunked_prefill: bool = True
    order: str = "fcfs"
    eviction: str = "lru"
    overlap: bool = True
    attention: str = "auto"
    drafter: str = "none"
    threads: int | None = None
    seed: int = 0
    options: tuple[tuple[str, str], ...] = ()
