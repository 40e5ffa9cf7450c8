"""What a server is told at its start. Frozen: `cli` parses, applies defaults and builds one of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.base.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling used where a request leaves a field unset; None falls back to the API's own default.

    Filled with what the model recommends unless the server was told to ignore it.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def of(cls, recommended: Mapping[str, float]) -> SamplingDefaults:
        """Those that a model recommends (`headrace.spec.locate.ModelFiles.sampling`)."""
        found: dict[str, Any] = dict(recommended)
        return cls(**found)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`served_names`: names clients may ask for, the first is reported back. Sizes in bytes, times in seconds.

    `max_waiting`: sequences accepted beyond the engine's own batch before the server answers 429.
    `request_limit_s`: an accepted request that is not finished by then ends with an error, whatever the engine does.
    `stall_limit_s`: a client that takes nothing of its answer for so long is cut off, and its request ends.
    `ignore_unknown_fields`: leave fields that are not known here out of a request instead of refusing it.
    `drain_s`: how long running requests may finish after SIGTERM. `eos_token_ids` end a sequence unless ignored.
    """

    served_names: tuple[str, ...]
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20
    max_waiting: int = 512
    max_sequences: int = 256
    request_limit_s: float = 1800.0
    stall_limit_s: float = 300.0
    drain_s: float = 30.0
    cors_origins: tuple[str, ...] = ()
    tokenizer_threads: int = 2
    ignore_unknown_fields: bool = False

    def __post_init__(self) -> None:
        if not self.served_names or not all(self.served_names):
            raise InvalidInput("a server needs at least one model name", field="served_names")
        if any(not key for key in self.api_keys):
            raise InvalidInput(
                "an API key must not be empty", field="api_key", remedy="leave the option out to serve without keys"
            )
        for name in ("max_body_bytes", "max_sequences", "tokenizer_threads"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1", field=name)
        for name in ("max_waiting", "drain_s"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(f"{name} must not be negative", field=name)
        for name in ("request_limit_s", "stall_limit_s"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} must be positive", field=name)
