"""Logits to tokens, vectorized over rows; the slow counterpart, one row at a time in numpy, is in the tests.

Order of what is done to a row: repetition penalty (prompt and output), presence and frequency penalties (output),
logit bias, min_tokens and grammar masks; then the greedy choice, or temperature, top-k, top-p within what top-k left,
min-p, and one draw. Reported log-probabilities are those of the logits before all of this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.control.step import TokenLogprobs
from headrace.engine.sampler.draws import uniforms
from headrace.engine.sampler.rows import NOT_FINITE, NOTHING_ALLOWED, Rows, Sampled
from headrace.engine.sampler.state import SamplingState

_CANDIDATES = (64, 1024)
"""How many of the largest weights are looked at for top-p, one width after the other; a row whose mass is not among the
last is sorted whole."""
_BLOCK = 256
"""Vocabulary entries per partial sum when a draw is located."""


def sample(logits: torch.Tensor, rows: Rows, state: SamplingState) -> Sampled:
    """Sample each row of fp32 `logits` [rows, vocab], which may be changed."""
    slots = rows.slots
    errors: dict[int, str] = {}
    # The sum of a row is finite exactly if all its entries are (no model's logits overflow fp32 when added).
    finite = np.isfinite(logits.sum(-1).numpy())
    for row in np.flatnonzero(~finite).tolist():
        errors[row] = NOT_FINITE
        logits[row] = 0.0
    greedy = state.greedy[slots]
    if not rows.masks and (state.plain[slots] & greedy).all():
        return Sampled(logits.numpy().argmax(-1).tolist(), errors, {})
    reported = np.flatnonzero(state.reported[slots])
    altered = _altered_rows(rows, state)
    raw = logits[torch.from_numpy(reported)] if len(reported) and len(altered) else None
    if len(altered):
        _alter(logits, altered, rows, state)
    # numpy's argmax is vectorized; torch's, which reduces pairs of value and index, takes 30 times as long.
    best_ids = torch.from_numpy(logits.numpy().argmax(-1))
    values = logits.gather(1, best_ids[:, None])
    if not greedy.all():
        drawn = np.flatnonzero(~greedy)
        every = len(drawn) == len(slots)
        picked = torch.from_numpy(drawn)
        part, top = (logits, values) if every else (logits[picked], values[picked])
        ids = _draw(part, top, slots[drawn], rows.indices[drawn], state)
        best_ids = ids if every else best_ids.clone().index_copy_(0, picked, ids)
    if len(altered):
        lost = torch.isinf(values.flatten()).cpu().numpy()
        for row in np.flatnonzero(lost).tolist():
            errors.setdefault(row, NOTHING_ALLOWED)
    logprobs = {}
    if len(reported):
        source = logits[torch.from_numpy(reported)] if raw is None else raw
        wanted = [state.rules[s].logprobs or 0 for s in slots[reported].tolist()]
        entries = token_logprobs(source, best_ids[torch.from_numpy(reported)], wanted)
        logprobs = dict(zip(reported.tolist(), entries, strict=True))
    return Sampled(best_ids.tolist(), errors, logprobs)


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, wanted: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probability and rank of `ids` [rows] under `logits` [rows, vocab], and `wanted[i]` best alternatives of row i."""
    normalizer = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, ids[:, None])
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    own = (chosen - normalizer).flatten().tolist()
    most = min(max(wanted), logits.shape[1])
    top_ids: list[list[int]] = [[]] * len(own)
    top_values: list[list[float]] = [[]] * len(own)
    if most:
        values, indices = logits.topk(most, dim=-1)
        top_ids, top_values = indices.tolist(), (values - normalizer).tolist()
    return [
        TokenLogprobs(token, logprob, rank, tuple(near[:n]), tuple(theirs[:n]))
        for token, logprob, rank, near, theirs, n in zip(
            ids.tolist(), own, ranks, top_ids, top_values, wanted, strict=True
        )
    ]


def _altered_rows(rows: Rows, state: SamplingState) -> npt.NDArray[np.int64]:
    slots = rows.slots
    altered = state.penalized[slots] | state.biased[slots]
    if state.min_tokens[slots].any():
        altered = altered | (rows.indices < state.min_tokens[slots])
    if rows.masks:
        altered = altered.copy()
        altered[list(rows.masks)] = True
    return np.flatnonzero(altered)


def _alter(logits: torch.Tensor, altered: npt.NDArray[np.int64], rows: Rows, state: SamplingState) -> None:
    slots, vocab = rows.slots, logits.shape[1]
    penalized = altered[state.penalized[slots[altered]]]
    if len(penalized):
        _penalize(logits, penalized, rows, state)
    flat = logits.view(-1)
    biased = altered[state.biased[slots[altered]]].tolist()
    if biased:
        where = np.concatenate([row * vocab + state.rules[slots[row]].bias_ids for row in biased])
        values = np.concatenate([state.rules[slots[row]].bias_values for row in biased])
        flat.index_add_(0, torch.from_numpy(where), torch.from_numpy(values))
    indices = rows.indices
    held = [row for row in altered.tolist() if indices[row] < state.min_tokens[slots[row]]]
    if held:
        where = np.concatenate([row * vocab + state.rules[slots[row]].held_ids for row in held])
        flat.index_fill_(0, torch.from_numpy(where), float("-inf"))
    if rows.masks:
        masked = np.fromiter(rows.masks, np.int64)
        words = np.stack(list(rows.masks.values()))
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little", count=vocab).view(bool)
        at = torch.from_numpy(masked)
        logits[at] = logits[at].masked_fill_(torch.from_numpy(~bits), float("-inf"))


def _penalize(logits: torch.Tensor, penalized: npt.NDArray[np.int64], rows: Rows, state: SamplingState) -> None:
    """Penalties touch only tokens that a row has seen: gather those logits, change them, put them back."""
    vocab = logits.shape[1]
    keys, generated = [], []
    for row in penalized.tolist():
        seen, prompt = rows.history[row].astype(np.int64), int(rows.prompt_lengths[row])
        keys.append(row * vocab + seen)
        generated.append(np.arange(len(seen)) >= prompt)
    where, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    counts = np.bincount(inverse, weights=np.concatenate(generated), minlength=len(where)).astype(np.float32)
    slots = rows.slots[where // vocab]
    at = torch.from_numpy(where)
    values = logits.view(-1)[at].numpy()
    repetition = state.repetition[slots]
    values = np.where(values > 0, values / repetition, values * repetition)
    values = values - state.frequency[slots] * counts - state.presence[slots] * (counts > 0)
    logits.view(-1)[at] = torch.from_numpy(values.astype(np.float32))


def _draw(
    logits: torch.Tensor,
    top: torch.Tensor,
    slots: npt.NDArray[np.int64],
    indices: npt.NDArray[np.int64],
    state: SamplingState,
) -> torch.Tensor:
    """One token per row by inverting the cumulative distribution in vocabulary order; `top` [rows, 1] are the maxima."""
    count, vocab = logits.shape
    blocks = -(-vocab // _BLOCK)
    weights = torch.zeros(count, blocks * _BLOCK) if blocks * _BLOCK != vocab else torch.empty(count, vocab)
    inside = weights[:, :vocab]
    torch.sub(logits, top, out=inside)
    temperature = torch.from_numpy(state.temperature[slots])[:, None]
    if not (state.temperature[slots] == 1.0).all():
        inside.div_(temperature)
    inside.exp_()  # the weight of the likeliest token is 1, so nothing overflows
    filtered = np.flatnonzero(state.filtered[slots])
    if len(filtered):
        _filter(inside, filtered, slots, state)
    sums = weights.view(count, blocks, _BLOCK).sum(-1, dtype=torch.float64).cumsum(-1)
    target = sums[:, -1] * torch.from_numpy(uniforms(state.seed[slots], indices))
    block = torch.searchsorted(sums, target[:, None], right=True).clamp_(max=blocks - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    within = weights.view(count, blocks, _BLOCK)[torch.arange(count), block[:, 0]].double().cumsum(-1)
    offset = torch.searchsorted(within, target[:, None] - before, right=True)
    # Rounding can put a target past its block's end; the last token of the block with any weight is then meant.
    last = (within == within[:, -1:]).to(torch.uint8).argmax(-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(offset, last))[:, 0]


def _filter(
    weights: torch.Tensor, filtered: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], state: SamplingState
) -> None:
    """Zero the weights outside top-k, top-p and min-p. Tokens tied with the last one kept are kept."""
    every = len(filtered) == len(slots)
    at = torch.from_numpy(filtered)
    part = weights if every else weights[at]
    chosen = slots[filtered]
    top_k, top_p = state.top_k[chosen], state.top_p[chosen]
    vocab = part.shape[1]
    floor = torch.from_numpy(state.min_p[chosen].astype(np.float32))[:, None]
    ranked = (top_k > 0) | (top_p < 1.0)
    if ranked.any():
        k = torch.from_numpy(np.where(top_k > 0, np.minimum(top_k, vocab), vocab))[:, None]
        p = torch.from_numpy(top_p)[:, None]
        needed = torch.zeros_like(floor)
        rest = torch.arange(len(filtered))
        most = int(top_k[top_k > 0].max(initial=0))
        for width in (*(min(vocab, max(w, most)) for w in _CANDIDATES), vocab):
            looked_at = part if len(rest) == len(part) else part[rest]
            needed[rest], complete = _least_kept(looked_at, k[rest], p[rest], width)
            rest = rest[~complete]
            if not len(rest):
                break
        floor = torch.maximum(floor, needed)
    part = part.masked_fill_(part < floor, 0.0)
    if not every:
        weights[at] = part


def _least_kept(
    weights: torch.Tensor, k: torch.Tensor, p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest weight that top-k and then top-p keep [rows, 1], judged from the `width` largest of each row.

    The second result says for which rows that was enough. A token is kept by top-p if the mass of those before it is
    below p of the mass that top-k left.
    """
    vocab = weights.shape[1]
    best = weights.topk(width, dim=-1).values
    order = torch.arange(width)
    inside = best.double().masked_fill_(order >= k, 0.0)
    mass = inside.cumsum(-1)
    total = torch.where(k < vocab, mass[:, -1:], weights.sum(-1, keepdim=True, dtype=torch.float64))
    if width == vocab:
        total = mass[:, -1:]
    kept = ((mass - inside) < p * total) & (order < k)
    kept[:, 0] = True
    count = kept.sum(-1, keepdim=True)
    complete = (count[:, 0] < width) | (k[:, 0] <= width) | torch.tensor(width == vocab)
    least = best.gather(1, count - 1)
    # Nothing to filter by rank: p = 1 over everything.
    return torch.where((p >= 1.0) & (k >= vocab), 0.0, least), complete | ((p >= 1.0) & (k >= vocab))[:, 0]
