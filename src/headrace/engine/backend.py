"""The seam between an engine and what computes: a backend loads a model and makes an executor of whole steps.

Backends are files of `headrace.engine.executors`, found by name; each exports `BACKEND`. `auto` takes the first of
`cuda`, `native`, `torch` that is available for the device and the model and says in the log why others were passed over.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from headrace.control.api import MemoryItem
from headrace.control.step import Executor
from headrace.spec.cache import CacheLayout
from headrace.spec.config import EngineConfig
from headrace.spec.locate import ModelFiles
from headrace.spec.model import ModelSpec


class Limits(msgspec.Struct, frozen=True):
    """Sizes that an executor's persistent buffers are made for."""

    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    max_batched_tokens: int


class LogitsWatch(Protocol):
    """Who wants to see all logits behind the prompt log-probabilities that a step computes."""

    def __call__(self, slot: int, position: int, logits: Any) -> None:
        """`logits`, fp32 [rows, vocab], belong to positions `position`, `position` + 1, … of the slot's prompt.

        The backend's own array, valid during the call only, which is made while the step runs and on its thread.
        """
        ...


class LoadedModel(Protocol):
    """Weights in memory, no KV pool yet. `device`: where they are, `cpu` or `cuda:0`."""

    spec: ModelSpec
    device: str
    weights_precision: str
    kv_precision: str

    def kv_budget_bytes(self, memory_fraction: float, max_num_seqs: int, max_batched_tokens: int) -> int:
        """Bytes left for the KV pool under `memory_fraction`, after weights and the activation peak; may be negative."""
        ...

    def executor(self, layout: CacheLayout, limits: Limits, watch: LogitsWatch | None = None) -> Executor:
        """Allocate the KV pool and the persistent buffers; called once. `watch` sees the logits of prompts."""
        ...

    def memory(self) -> tuple[MemoryItem, ...]:
        """Predicted (from `spec.accounting`) beside real bytes of everything allocated so far; names `weights`, `kv_pool`, …"""
        ...

    def notes(self) -> tuple[str, ...]:
        """What a user should know: fast paths in use, fast paths unavailable and why."""
        ...


class Formats(msgspec.Struct, frozen=True):
    """What the options `weights` and `kv` of a backend may be beside `auto`, one name for each."""

    weights: tuple[str, ...]
    kv: tuple[str, ...]


class Backend(Protocol):
    """One way to compute. Importing its module must be cheap enough to ask `unavailable`.

    A backend may name in `libraries` the modules that take long to import and that `load` needs: they are imported before
    it, each as a stage of its own of the start. `environment`: variables with values that these read when they are
    imported, set where the user has not.
    """

    name: str

    def unavailable(self, files: ModelFiles, config: EngineConfig) -> str | None:
        """None if it can serve this model on this machine, else the reason in one line."""
        ...

    def formats(self) -> Formats:
        """What it offers; ImportError where what it computes with is not installed."""
        ...

    def load(self, files: ModelFiles, config: EngineConfig) -> LoadedModel: ...
