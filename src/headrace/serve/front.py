"""What every generating endpoint does alike: model names, admission, runs, usage, explanations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.control.api import EngineClient
from headrace.serve.admission import check_fields, engine_requests, sampling_for, token_limit
from headrace.serve.config import ServeConfig
from headrace.serve.errors import ApiError
from headrace.serve.exchange import Call
from headrace.serve.explain import explain, explain_all
from headrace.serve.gate import Gate
from headrace.serve.generation import Ending, SequenceRun
from headrace.serve.metrics import Metrics
from headrace.serve.protocol.sampling import SamplingFields
from headrace.serve.protocol.strict import M, parse
from headrace.serve.texts import TextThreads
from headrace.text.stream import OutputText
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

log = logging.getLogger("headrace.serve")

JsonDict = dict[str, Any]

MOST_PASSED_OVER = 100
"""Names of unknown fields that are told; more would fill a log at a client's will."""
MOST_OF_A_NAME = 200
"""Characters of such a name that are told, written as a literal: a client's line break must not begin a line of the log."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one request, prompt-major: choice c of prompt p has index p * n + c."""

    request_id: str
    model: str
    created: int
    n: int
    prompts: tuple[tuple[int, ...], ...]
    runs: tuple[SequenceRun, ...]
    received_s: float

    def usage(self, endings: Sequence[Ending]) -> JsonDict:
        """OpenAI's usage: each prompt counts once however many choices it has; cached tokens are summed over prompts.

        Of the choices of one prompt the least cached one tells what was cached before the request came.
        """
        prompt_tokens = sum(len(prompt) for prompt in self.prompts)
        completion_tokens = sum(ending.completion_tokens for ending in endings)
        cached = sum(
            min(ending.cached_tokens for ending in endings[first : first + self.n])
            for first in range(0, len(endings), self.n)
        )
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def explanation(self, endings: Sequence[Ending]) -> JsonDict | None:
        """Where the time went, until now; None when the engine kept no timeline."""
        now_s = time.monotonic()
        accounts = [
            explain(self.received_s, run.request.arrival_s, ending.timeline, now_s)
            for run, ending in zip(self.runs, endings, strict=True)
            if ending.timeline is not None
        ]
        return explain_all(accounts) if len(accounts) == len(endings) else None


class TextEvent:
    """Events that differ in one text alone: what stays is encoded once."""

    def __init__(self, event: JsonDict, field: str, prompt_tokens: int | None = None) -> None:
        """`event` has the empty text under the key `field`, in one place. `prompt_tokens`: it ends with a usage of null,
        in whose place each event says how many tokens there are so far."""
        key = b'"%b":"' % field.encode()  # nowhere else: inside of a string its quotes would be escaped
        self._before, self._after = msgspec.json.encode(event).split(key + b'"')
        self._before += key[:-1]

        self._prompt_tokens = prompt_tokens
        if prompt_tokens is not None:
            self._after = (
                self._after.removesuffix(b"null}") + b'{"prompt_tokens":%d,"completion_tokens":' % prompt_tokens
            )

    def of(self, text: str, completion_tokens: int) -> bytes:
        """The event with that text, encoded."""
        if self._prompt_tokens is None:
            return b"%b%b%b" % (self._before, msgspec.json.encode(text), self._after)
        total = self._prompt_tokens + completion_tokens
        said = (self._before, msgspec.json.encode(text), self._after, completion_tokens, total)
        return b'%b%b%b%d,"total_tokens":%d}}' % said


@dataclass(frozen=True, slots=True)
class Front:
    """Everything an endpoint needs to turn a request into running sequences."""

    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate
    config: ServeConfig
    gate: Gate
    metrics: Metrics
    threads: TextThreads
    passed_over: set[str] = field(default_factory=set)
    """Unknown fields that have been told of."""

    def parse(self, model: type[M], body: bytes) -> M:
        """The request in `body`, as `protocol.strict.parse` reads it under this server's rule for unknown fields."""
        return parse(model, body, self._pass_over if self.config.ignore_unknown_fields else None)

    def _pass_over(self, field: str) -> None:
        told = ascii(field[:MOST_OF_A_NAME])
        if told not in self.passed_over and len(self.passed_over) < MOST_PASSED_OVER:
            self.passed_over.add(told)
            log.warning("unknown fields are ignored: %s is one of them (logged once)", told)

    def check_model(self, name: str | None) -> str:
        """The name to answer with; `ApiError` 404 for a model that is not served here."""
        if name is not None and name not in self.config.served_names:
            raise ApiError(
                404,
                f"There is no model {name!r} here; served: {', '.join(self.config.served_names)}.",
                param="model",
                code="model_not_found",
            )
        return self.config.served_names[0] if name is None else name

    def check(self, request: SamplingFields, max_tokens: int | None) -> None:
        """`ApiError` 400 for fields that contradict each other or the vocabulary."""
        check_fields(request, max_tokens, self.engine.info.vocab_size)

    def batch(
        self,
        call: Call,
        request: SamplingFields,
        request_id: str,
        model: str,
        prompts: Sequence[tuple[int, ...]],
        *,
        prompt_param: str | Callable[[int], str],
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        grammar: str | None,
        continuation: bool,
    ) -> Batch:
        """Runs for `n` choices of each prompt, not started yet. `ApiError` 400 for a prompt over the context."""
        n = request.n or 1
        limits = [
            token_limit(
                len(prompt),
                max_tokens,
                self.engine.info.max_model_len,
                prompt_param if isinstance(prompt_param, str) else prompt_param(i),
            )
            for i, prompt in enumerate(prompts)
        ]
        samplings = [
            sampling_for(
                request,
                self.config.sampling_defaults,
                max_tokens=limit,
                eos_token_ids=self.config.eos_token_ids,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                grammar=grammar,
            )
            for limit in limits
        ]
        requests = engine_requests(
            request_id, prompts, samplings, n=n, seed=request.seed, priority=request.priority or 0
        )
        runs = tuple(
            SequenceRun(
                index,
                submitted,
                OutputText(
                    self.tokenizer,
                    request.stop_strings,
                    include_stop=bool(request.include_stop_str_in_output),
                    skip_special=request.skip_special_tokens is not False,
                    continuation=continuation,
                    min_tokens=submitted.sampling.min_tokens,
                ),
                self.engine,
                self.metrics,
                call.received_s,
                limits[index // n],
            )
            for index, submitted in enumerate(requests)
        )
        return Batch(request_id, model, int(time.time()), n, tuple(prompts), runs, call.received_s)
