"""From a validated body to engine requests: token ids in range, context, sampling, seeds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from headrace.control.request import Request, Sampling
from headrace.control.seeds import choice_seed
from headrace.serve.config import SamplingDefaults
from headrace.serve.errors import ApiError, bad_field
from headrace.serve.protocol.sampling import SamplingFields

T = TypeVar("T", int, float)


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """`ApiError` 400 naming the first id that the vocabulary does not have."""
    for i, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise bad_field(
                f"{param}[{i}]", f"{param}[{i}] is {token_id}, out of the vocabulary: ids are 0 to {vocab_size - 1}."
            )


def check_fields(request: SamplingFields, max_tokens: int | None, vocab_size: int) -> None:
    """Everything about sampling that needs the vocabulary or more than one field."""
    check_ids(request.stop_token_ids or (), vocab_size, "stop_token_ids")
    for key in request.logit_bias or ():
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and str(int(key)) == key and int(key) < vocab_size):
            raise bad_field(
                "logit_bias", f"logit_bias: {key!r} is not a token id of the vocabulary, 0 to {vocab_size - 1}."
            )
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "stream_options needs stream to be true.")
    if (options := request.stream_options) and options.continuous_usage_stats and not options.include_usage:
        raise bad_field(
            "stream_options.continuous_usage_stats", "continuous_usage_stats needs include_usage to be true."
        )
    if max_tokens is not None and (request.min_tokens or 0) > max_tokens:
        raise bad_field("min_tokens", f"min_tokens is {request.min_tokens}, more than max_tokens, {max_tokens}.")


def token_limit(prompt_tokens: int, asked: int | None, max_model_len: int, param: str) -> int:
    """How many tokens may be generated: `asked`, clamped to what the context leaves; all of that for None.

    A prompt that leaves no room is an `ApiError` 400 with code `context_length_exceeded`.
    """
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ApiError(
            400,
            f"The prompt has {prompt_tokens} tokens, but this model's context holds {max_model_len}, "
            "of which at least one is for the answer. Shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )
    return room if asked is None else min(asked, room)


def sampling_for(
    request: SamplingFields,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    eos_token_ids: tuple[int, ...],
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str | None,
) -> Sampling:
    """The engine's sampling for a request, its seed still open. Unset fields: `defaults`, then the API's own."""
    temperature = _first(request.temperature, defaults.temperature, 1.0)
    top_p = _first(request.top_p, defaults.top_p, 1.0)
    if top_p == 0.0:  # only the best token survives
        temperature, top_p = 0.0, 1.0
    return Sampling(
        max_tokens=max(max_tokens, 1),
        min_tokens=min(request.min_tokens or 0, max(max_tokens, 1)),
        temperature=temperature,
        top_k=max(0, _first(request.top_k, defaults.top_k, 0)),
        top_p=top_p,
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias={int(key): bias for key, bias in (request.logit_bias or {}).items()},
        eos_token_ids=eos_token_ids,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def _first(*values: T | None) -> T:
    return next(value for value in values if value is not None)


def engine_requests(
    request_id: str,
    prompts: Sequence[tuple[int, ...]],
    samplings: Sequence[Sampling],
    *,
    n: int,
    seed: int | None,
    priority: int,
) -> list[Request]:
    """One engine request per choice, prompt-major: choices of the first prompt first."""
    arrival_s = time.monotonic()
    return [
        Request(
            request_id=f"{request_id}-{p * n + c}",
            prompt_token_ids=prompt,
            sampling=msgspec.structs.replace(sampling, seed=choice_seed(seed, c)),
            priority=priority,
            arrival_s=arrival_s,
        )
        for p, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        for c in range(n)
    ]
