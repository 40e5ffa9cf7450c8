"""Everything that defines a run, as one immutable value that can be written down, read back and run again."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.base.errors import InvalidInput
from headrace.bench.arrivals import ArrivalOptions
from headrace.bench.endpoint import Endpoint
from headrace.bench.prompts import PromptWriter, common_words
from headrace.bench.traffic import Fitting, TooLong, TrafficContext

DEFAULT_REQUESTS = 64


class WriterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts are written; `tokenizer` names one that `headrace.text` can load, "" where counts come from usage."""

    tokens_per_word: float = 1.0
    template_tokens: int = 0
    message_tokens: int = 0
    source: str = ""
    tokenizer: str = ""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `workload_options` are texts as given on the command line; `salt` changes words, never lengths or times."""

    endpoint: Endpoint
    workload: str
    workload_options: dict[str, str] = {}
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0
    arrivals: ArrivalOptions = ArrivalOptions()
    seed: int = 0
    salt: str = ""
    too_long: TooLong = "skip"
    scale: float = 1.0
    max_context: int | None = None
    writer: WriterSettings = WriterSettings()
    processes: int = 1
    slo: str = ""
    usd_per_hour: float | None = None
    scrape_period_s: float = 0.5
    max_failures: float = 0.1
    max_client_delay_s: float = 0.01
    idle_wait_s: float = 0.0
    target: dict[str, Any] = {}

    def check(self) -> None:
        """Raise `InvalidInput` naming the option that is wrong."""
        for field, value in (
            ("--requests", self.requests),
            ("--duration", self.duration_s),
            ("--scale", self.scale),
            ("--usd-per-hour", self.usd_per_hour),
        ):
            if value is not None and not value > 0:
                raise InvalidInput(f"must be above 0, got {value}", field=field)
        if self.warmup < 0:
            raise InvalidInput(f"must not be negative, got {self.warmup}", field="--warmup")
        if self.too_long not in ("skip", "clip", "scale"):
            raise InvalidInput(f"must be skip, clip or scale, got {self.too_long!r}", field="--too-long")
        if self.endpoint.timeout_s <= 0:
            raise InvalidInput(f"must be above 0, got {self.endpoint.timeout_s}", field="--timeout")

    @property
    def limit(self) -> int | None:
        """Most requests to send; a run without a number and a duration has 64."""
        return DEFAULT_REQUESTS if self.requests is None and self.duration_s is None else self.requests

    def context(self, writer: PromptWriter, *, salt_suffix: str = "") -> TrafficContext:
        """What the workload is given."""
        fitting = Fitting(self.max_context, self.too_long, self.scale, reserve=8 if self.max_context else 0)
        return TrafficContext(writer, self.seed, self.salt + salt_suffix, fitting)

    def prompt_writer(self) -> PromptWriter:
        """The writer these settings describe; loads the tokenizer where one is named."""
        count = None
        if self.writer.tokenizer:
            from headrace.bench.tokens import token_counter

            count = token_counter(self.writer.tokenizer)
        w = self.writer
        return PromptWriter(common_words(), w.tokens_per_word, w.template_tokens, w.message_tokens, count, w.source)
