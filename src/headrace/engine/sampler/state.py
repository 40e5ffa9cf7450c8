"""The sampling rules of every slot, as arrays that a step indexes by its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.control.request import Sampling

GREEDY_BELOW = 1e-4
"""Temperatures below this are greedy: a gap of 0.002 between logits already decides more surely than one in 10^8."""


@dataclass(slots=True)
class SlotRules:
    """What only some sequences have, by slot."""

    bias_ids: npt.NDArray[np.int64] | None = None
    bias_values: npt.NDArray[np.float32] | None = None
    held_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class Columns(msgspec.Struct, frozen=True):
    """What `SamplingState` has of some rows. `all_plain`, `all_greedy`: of every one of them."""

    greedy: npt.NDArray[np.bool_]
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    all_plain: bool
    all_greedy: bool


class SamplingState:
    """Arrays [slots]; `plain`: logits are sampled as they are and not reported; `greedy`: nothing random matters."""

    def __init__(self, max_num_seqs: int) -> None:
        def column(dtype: npt.DTypeLike) -> npt.NDArray:
            return np.zeros(max_num_seqs, dtype)

        self.greedy = column(bool)
        self.temperature = column(np.float32)
        self.top_k = column(np.int64)
        self.top_p = column(np.float64)
        self.min_p = column(np.float32)
        self.repetition = column(np.float32)
        self.presence = column(np.float32)
        self.frequency = column(np.float32)
        self.seed = column(np.uint64)
        self.min_tokens = column(np.int64)
        self.filtered = column(bool)
        self.penalized = column(bool)
        self.biased = column(bool)
        self.reported = column(bool)
        self.plain = np.ones(max_num_seqs, bool)
        self.rules = [SlotRules() for _ in range(max_num_seqs)]
        self._last: tuple[npt.NDArray[np.int64], Columns] | None = None

    def columns(self, slots: npt.NDArray[np.int64]) -> Columns:
        """Of these rows; made once for the same array, which must not be written to, as long as nobody is admitted."""
        if self._last is None or self._last[0] is not slots:
            greedy, plain = self.greedy[slots], self.plain[slots]
            draws = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
            found = Columns(greedy, *(of[slots] for of in draws), bool(plain.all()), bool(greedy.all()))
            self._last = slots, found
        return self._last[1]

    def admit(self, slot: int, s: Sampling) -> None:
        self._last = None
        greedy = s.temperature < GREEDY_BELOW or s.top_k == 1
        self.greedy[slot] = greedy
        self.temperature[slot] = 1.0 if greedy else s.temperature
        self.top_k[slot], self.top_p[slot], self.min_p[slot] = s.top_k, s.top_p, s.min_p
        self.filtered[slot] = not greedy and (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0)
        self.repetition[slot] = s.repetition_penalty
        self.presence[slot], self.frequency[slot] = s.presence_penalty, s.frequency_penalty
        self.penalized[slot] = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        self.seed[slot] = np.uint64(s.seed & 0xFFFF_FFFF_FFFF_FFFF)
        # A grammar's matcher applies min_tokens itself: it knows when holding back the end would leave nothing.
        self.min_tokens[slot] = 0 if s.grammar is not None else s.min_tokens
        self.biased[slot] = bool(s.logit_bias)
        self.reported[slot] = s.logprobs is not None
        rules = SlotRules(logprobs=s.logprobs, prompt_logprobs=s.prompt_logprobs)
        if s.logit_bias:
            rules.bias_ids = np.fromiter(s.logit_bias.keys(), np.int64)
            rules.bias_values = np.fromiter(s.logit_bias.values(), np.float32)
        if s.min_tokens:
            rules.held_ids = np.fromiter(sorted(s.stopping_ids), np.int64)
        self.rules[slot] = rules
        self.plain[slot] = not (
            self.penalized[slot] or self.biased[slot] or self.reported[slot] or self.min_tokens[slot] > 0
        )
