"""Sampling without torch: what changes few rows or few logits in numpy, what touches all of them in C++.

Rules and their order are those of `headrace.engine.sampler.sampler`; the tests hold both to one slow reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import headrace_native
import numpy as np
import numpy.typing as npt

from headrace.control.step import TokenLogprobs
from headrace.engine.sampler.draws import uniforms
from headrace.engine.sampler.rows import NOT_FINITE, NOTHING_ALLOWED, Rows, Sampled
from headrace.engine.sampler.state import SamplingState

Floats = npt.NDArray[np.float32]
_BROKEN, _EMPTY = 1, 2
_NONE = np.empty(0, np.int64)


def sample(
    logits: Floats, rows: Rows, state: SamplingState, pool: headrace_native.Pool, kernels: str = "auto"
) -> Sampled:
    """Sample each row of `logits` [rows, vocab], which may be changed."""
    slots, count = rows.slots, len(rows.slots)
    indices, columns = rows.indices, state.columns(slots)
    errors: dict[int, str] = {}
    raw: dict[int, Floats] = {}
    untouched, reported = np.ones(count, np.uint8), _NONE
    if rows.masks or not columns.all_plain:
        altered, reported = _altered(rows, indices, state), np.flatnonzero(state.reported[slots])
        untouched[altered] = 0
        for row in altered.tolist():
            if not np.isfinite(logits[row].sum()):
                errors[row] = NOT_FINITE
                logits[row] = 0.0
                continue
            if state.reported[slots[row]]:
                raw[row] = logits[row].copy()
            _alter(logits[row], rows, row, int(indices[row]), state)
    ids, outcome = np.empty(count, np.int64), np.empty(count, np.uint8)
    headrace_native.sample(
        logits,
        columns.greedy.view(np.uint8),
        untouched,
        columns.temperature,
        columns.top_k,
        columns.top_p,
        columns.min_p,
        np.zeros(count) if columns.all_greedy else uniforms(columns.seed, indices),
        ids,
        outcome,
        pool,
        kernels,
    )
    for row in np.flatnonzero(outcome).tolist():
        errors.setdefault(row, NOT_FINITE if outcome[row] == _BROKEN else NOTHING_ALLOWED)
    logprobs = {}
    chosen = [row for row in reported.tolist() if row not in errors]
    if chosen:
        source = np.stack([raw.get(row, logits[row]) for row in chosen])
        wanted = [state.rules[slots[row]].logprobs or 0 for row in chosen]
        entries = token_logprobs(source, ids[chosen], wanted, pool)
        logprobs = dict(zip(chosen, entries, strict=True))
    return Sampled(ids.tolist(), errors, logprobs)


def token_logprobs(
    logits: Floats, ids: npt.NDArray[np.int64], wanted: Sequence[int], pool: headrace_native.Pool
) -> list[TokenLogprobs]:
    """Log-probability and rank of `ids` [rows] under finite `logits`, and the `wanted[i]` best alternatives of row i."""
    count, vocab = logits.shape
    asked = np.minimum(np.array(wanted, np.int64), vocab)
    own, rank = np.empty(count, np.float64), np.empty(count, np.int64)
    width = int(asked.max(initial=0))
    top_ids, top_values = np.empty((count, width), np.int64), np.empty((count, width), np.float64)
    headrace_native.logprobs(logits, ids, asked, own, rank, top_ids, top_values, pool)
    return [
        TokenLogprobs(token, logprob, place, tuple(near[:n]), tuple(values[:n]))
        for token, logprob, place, near, values, n in zip(
            ids.tolist(),
            own.tolist(),
            rank.tolist(),
            top_ids.tolist(),
            top_values.tolist(),
            asked.tolist(),
            strict=True,
        )
    ]


def _altered(rows: Rows, indices: npt.NDArray[np.int64], state: SamplingState) -> npt.NDArray[np.int64]:
    slots = rows.slots
    found = state.penalized[slots] | state.biased[slots] | (indices < state.min_tokens[slots])
    if rows.masks:
        found[list(rows.masks)] = True
    return np.flatnonzero(found)


def _alter(logits: Floats, rows: Rows, row: int, index: int, state: SamplingState) -> None:
    """Penalties, bias, min_tokens and grammar on one row, in place."""
    slot = rows.slots[row]
    rules = state.rules[slot]
    if state.penalized[slot]:
        history, prompt = rows.history[row], int(rows.prompt_lengths[row])
        seen = np.unique(history)
        counts = np.zeros(len(seen), np.float32)
        generated, times = np.unique(history[prompt:], return_counts=True)
        counts[np.searchsorted(seen, generated)] = times
        values, repetition = logits[seen], state.repetition[slot]
        values = np.where(values > 0, values / repetition, values * repetition)
        logits[seen] = values - state.frequency[slot] * counts - state.presence[slot] * (counts > 0)
    if state.biased[slot]:
        logits[rules.bias_ids] += rules.bias_values
    if index < state.min_tokens[slot]:
        logits[rules.held_ids] = -np.inf
    if (words := rows.masks.get(row)) is not None:
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=len(logits)).view(bool)
        logits[~allowed] = -np.inf
