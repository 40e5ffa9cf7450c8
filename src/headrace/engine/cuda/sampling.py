"""What sampling does beyond the greedy choice of a step's graph: changed logits, draws, log-probabilities.

Everything runs on the device and in order; only indices and parameters come from the host. Order of what is done to a row:
repetition penalty (prompt and output), presence and frequency penalties (output), logit bias, min_tokens, grammar masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.control.step import TokenLogprobs
from headrace.engine.sampler.rows import Rows
from headrace.engine.sampler.state import SamplingState


def altered_rows(rows: Rows, state: SamplingState) -> np.ndarray:
    """Rows whose logits are changed before the choice."""
    slots = rows.slots
    altered = state.penalized[slots] | state.biased[slots]
    if state.min_tokens[slots].any():
        altered = altered | (rows.indices < state.min_tokens[slots])
    if rows.masks:
        altered = altered.copy()
        altered[list(rows.masks)] = True
    return np.flatnonzero(altered)


def alter(logits: torch.Tensor, altered: np.ndarray, rows: Rows, state: SamplingState) -> None:
    """Apply penalties, bias, min_tokens and masks to the rows `altered` of fp32 logits [rows, vocab], in place."""
    slots, vocab = rows.slots, logits.shape[1]
    flat = logits.view(-1)
    _penalize(flat, altered[state.penalized[slots[altered]]], vocab, rows, state)
    biased = altered[state.biased[slots[altered]]].tolist()
    if biased:
        where = np.concatenate([row * vocab + state.rules[slots[row]].bias_ids for row in biased])
        values = np.concatenate([state.rules[slots[row]].bias_values for row in biased])
        flat.index_add_(0, _on(where, logits), _on(values, logits))
    indices = rows.indices
    held = [row for row in altered.tolist() if indices[row] < state.min_tokens[slots[row]]]
    if held:
        where = np.concatenate([row * vocab + state.rules[slots[row]].held_ids for row in held])
        flat.index_fill_(0, _on(where, logits), float("-inf"))
    if rows.masks:
        words = np.stack(list(rows.masks.values()))
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little", count=vocab).view(bool)
        for i, row in enumerate(rows.masks):
            logits[row].masked_fill_(_on(~bits[i], logits), float("-inf"))


def _penalize(flat: torch.Tensor, penalized: np.ndarray, vocab: int, rows: Rows, state: SamplingState) -> None:
    """Penalties touch only tokens that a row has seen: gather those logits, change them, put them back."""
    if not len(penalized):
        return
    keys, generated = [], []
    for row in penalized.tolist():
        seen, prompt = rows.history[row].astype(np.int64), int(rows.prompt_lengths[row])
        keys.append(row * vocab + seen)
        generated.append(np.arange(len(seen)) >= prompt)
    where, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    counts = np.bincount(inverse, weights=np.concatenate(generated), minlength=len(where)).astype(np.float32)
    slots = rows.slots[where // vocab]
    at = _on(where, flat)
    values = flat.index_select(0, at)
    repetition = _on(state.repetition[slots], flat)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= _on(state.frequency[slots] * counts + state.presence[slots] * (counts > 0), flat)
    flat.index_copy_(0, at, values)


def _on(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device, non_blocking=True)


def draw_parameters(drawn: np.ndarray, slots: np.ndarray, uniforms: np.ndarray, state: SamplingState) -> np.ndarray:
    """fp32 [drawn, 5] as `kernels.sample.draw` takes them."""
    chosen = slots[drawn]
    params = np.empty((len(drawn), 5), np.float32)
    params[:, 0] = state.temperature[chosen]
    params[:, 1] = state.top_p[chosen]
    params[:, 2] = state.min_p[chosen]
    # Rounding to fp32 must not reach 1.
    params[:, 3] = np.minimum(uniforms.astype(np.float32), np.nextafter(np.float32(1), np.float32(0)))
    params[:, 4] = state.top_k[chosen]
    return params


@dataclass(slots=True)
class LogprobsInFlight:
    """Log-probabilities on their way to the host; `read` once the step is done."""

    ids: torch.Tensor
    own: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor | None
    top_values: torch.Tensor | None
    wanted: Sequence[int]

    def read(self) -> list[TokenLogprobs]:
        count = len(self.wanted)
        ids, own, ranks = self.ids.tolist(), self.own.tolist(), self.ranks.tolist()
        near = self.top_ids.tolist() if self.top_ids is not None else [[]] * count
        theirs = self.top_values.tolist() if self.top_values is not None else [[]] * count
        return [
            TokenLogprobs(token, logprob, rank, tuple(a[:n]), tuple(b[:n]))
            for token, logprob, rank, a, b, n in zip(ids, own, ranks, near, theirs, self.wanted, strict=True)
        ]


def logprobs(logits: torch.Tensor, ids: torch.Tensor, wanted: Sequence[int]) -> LogprobsInFlight:
    """Start computing the log-probability and rank of `ids` [rows] under fp32 `logits` [rows, vocab], and alternatives."""
    ids = ids.long()
    normalizer = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, ids[:, None])
    ranks = (logits > chosen).sum(-1) + 1
    most = min(max(wanted), logits.shape[1])
    top_ids = top_values = None
    if most:
        values, top_ids = logits.topk(most, dim=-1)
        top_values = values - normalizer
    parts = (ids, (chosen - normalizer)[:, 0], ranks, top_ids, top_values)
    return LogprobsInFlight(*(None if p is None else to_host(p) for p in parts), wanted)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned copy that is valid once the work launched so far is done."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
