"""Sampling as a user of the library or the command line gives it, before defaults and limits are filled in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from headrace.base.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample, and when to stop. A wrong value raises `InvalidInput` that names the field.

    Sampling fields left at None take the model's own (`ModelFiles.sampling`), else the neutral one. The text beside
    each type is its help on the command line, whose options are made from this list.
    """

    n: Annotated[int, "answers per prompt"] = 1
    max_tokens: Annotated[int | None, "most tokens to generate; by default all that the context leaves"] = None
    min_tokens: Annotated[int, "no end before so many tokens"] = 0
    temperature: Annotated[float | None, "0 is greedy; default: the model's own or 1 (a chat in the terminal: 0.6)"] = (
        None
    )
    top_k: Annotated[int | None, "sample from the k best tokens; 0 and -1 are off"] = None
    top_p: Annotated[float | None, "sample from the best tokens that hold this probability together"] = None
    min_p: Annotated[float | None, "leave out tokens less likely than this share of the best one's probability"] = None
    repetition_penalty: Annotated[float | None, "above 1 discourages tokens that are there already"] = None
    presence_penalty: Annotated[float, "taken from the logit of tokens generated before"] = 0.0
    frequency_penalty: Annotated[float, "taken from the logit once for each time a token was generated"] = 0.0
    logit_bias: Annotated[Mapping[int, float] | None, "ID=BIAS added to a token's logit"] = None
    seed: Annotated[int | None, "fixes the random draws; drawn by default"] = None
    stop: Annotated[str | Sequence[str], "text that ends the answer"] = ()
    include_stop: Annotated[bool, "keep the stop text in the answer"] = False
    stop_token_ids: Annotated[Sequence[int], "token ids that end the answer"] = ()
    ignore_eos: Annotated[bool, "go on after the model's own end"] = False
    logprobs: Annotated[int | None, "alternatives to report beside each token, 0: only its own probability"] = None
    prompt_logprobs: Annotated[int | None, "the same for the tokens of the prompt"] = None
    skip_special: Annotated[bool, "leave special tokens out of the text"] = True
    priority: Annotated[int, "lower runs earlier"] = 0
    grammar: Annotated[str | None, 'Lark grammar that the text must follow, as start: "yes" | "no"'] = None

    def __post_init__(self) -> None:
        for name, low, high in _INTEGERS:
            value = getattr(self, name)
            if value is not None and not (_is_integer(value) and low <= value <= high):
                raise InvalidInput(f"must be an integer from {low} to {high}, not {value!r}", field=name)
        for name, least, most in _NUMBERS:
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and least <= value <= most):
                raise InvalidInput(f"must be a number from {least:g} to {most:g}, not {value!r}", field=name)
        if self.repetition_penalty == 0:
            raise InvalidInput("must be above 0", field="repetition_penalty")
        if not all(isinstance(stop, str) and stop for stop in self.stops):
            raise InvalidInput("must be a string or strings, none of them empty", field="stop")
        if not all(_is_integer(token_id) for token_id in self.stop_token_ids):
            raise InvalidInput("must be token ids", field="stop_token_ids")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInput(f"{self.min_tokens} is more than max_tokens, {self.max_tokens}", field="min_tokens")
        for token_id, bias in (self.logit_bias or {}).items():
            if not (_is_integer(token_id) and _is_number(bias) and math.isfinite(bias)):
                raise InvalidInput("must map token ids to finite numbers", field="logit_bias")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_MOST = 2**31 - 1
_INTEGERS = (
    ("n", 1, 1024),
    ("max_tokens", 1, _MOST),
    ("min_tokens", 0, _MOST),
    ("top_k", -1, _MOST),
    ("seed", -(2**63), 2**63 - 1),
    ("logprobs", 0, _MOST),
    ("prompt_logprobs", 0, _MOST),
    ("priority", -_MOST, _MOST),
)
_NUMBERS = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, 100.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
