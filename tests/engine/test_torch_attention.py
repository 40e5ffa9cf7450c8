"""The contract of attention backends: equal to the naive formula on random mixed batches, for every kind they claim."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from headrace.engine.attention import ATTENTION
from headrace.engine.attention._contract import AttentionKind, LayerCache, Spans
from headrace.engine.attention.sdpa import _cheapest_cuts

KINDS = {
    "mha": AttentionKind(4, 4, 16, 0.25),
    "gqa": AttentionKind(6, 2, 16, 0.3),
    "mqa": AttentionKind(5, 1, 8, 0.2),
    "sliding": AttentionKind(4, 2, 16, 0.25, window=11),
    "window-of-one": AttentionKind(4, 2, 16, 0.25, window=1),
    "softcap": AttentionKind(4, 2, 16, 0.25, softcap=3.0),
    "sinks": AttentionKind(4, 2, 16, 0.25, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "everything": AttentionKind(6, 2, 16, 0.25, window=9, softcap=2.0, sinks=torch.linspace(-1, 1, 6)),
}
BATCHES = {
    "decode": [(0, 1), (5, 1), (77, 1), (16, 1), (200, 1), (15, 1), (3, 1)],
    "decode of equal length": [(40, 1)] * 5,
    "one decode": [(33, 1)],
    "prefill": [(0, 33), (0, 2), (0, 64), (0, 5)],
    "one prefill": [(0, 70)],
    "prefill of equal length": [(0, 24)] * 4,
    "continued": [(8, 5), (60, 17), (13, 40), (64, 64), (16, 16)],
    "mixed": [(50, 1), (0, 9), (7, 20), (0, 1), (120, 1), (31, 2), (0, 40), (64, 8)],
}


def share_prefixes(batch, prefixes: dict[int, list[int]]) -> None:
    """Let the sequences of each list have the first `tokens` of the first one, in its blocks."""
    spans = batch[0]
    for tokens, members in prefixes.items():
        spans.tables[members[1:], : tokens // spans.block_tokens] = spans.tables[
            members[0], : tokens // spans.block_tokens
        ]


def random_batch(kind: AttentionKind, shape, seed: int, block_tokens: int = 8, shuffle: bool = True):
    """A paged cache whose unread places are not numbers, scattered tables, and this step's rows."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    if shuffle:
        shape = [shape[i] for i in rng.permutation(len(shape))]
    starts, lengths = np.array(shape, np.int64).T
    ends = starts + lengths
    width = int(-(-ends.max() // block_tokens)) + 2
    blocks = iter(rng.permutation(len(shape) * width))
    tables = np.full((len(shape), width), -1, np.int32)
    kv = torch.full((len(shape) * width, block_tokens, 2 * kind.num_kv_heads, kind.head_dim), float("nan"))
    flat = kv.flatten(0, 1)
    rows_k, rows_v = [], []
    for i, (start, length) in enumerate(shape):
        oldest = 0 if kind.window is None else max(0, start - kind.window + 1)
        for j in range(oldest // block_tokens, -(-(start + length) // block_tokens)):
            tables[i, j] = next(blocks)
            kv[tables[i, j]] = 0.0  # begun blocks are zeroed behind the end
        positions = np.arange(oldest // block_tokens * block_tokens, start + length)
        slots = torch.from_numpy(
            tables[i, positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens
        )
        fresh = torch.randn(len(positions), 2 * kind.num_kv_heads, kind.head_dim)
        flat[slots] = fresh
        rows_k.append(fresh[-length:, : kind.num_kv_heads])
        rows_v.append(fresh[-length:, kind.num_kv_heads :])
    spans = Spans(starts, lengths, np.cumsum(lengths) - lengths, tables, block_tokens)
    q = torch.randn(int(lengths.sum()), kind.num_heads, kind.head_dim)
    return spans, q, torch.cat(rows_k), torch.cat(rows_v), LayerCache(kv)


def attend(backend, kind, batch) -> torch.Tensor:
    spans, q, k, v, cache = batch
    prepared = backend.prepare(spans, kind, q.device, q.dtype, cache.kv.dtype)
    return backend.attend(q, k, v, cache, prepared)


@pytest.mark.parametrize("shape", BATCHES, ids=list(BATCHES))
@pytest.mark.parametrize("kind", KINDS, ids=list(KINDS))
@pytest.mark.parametrize("name", [n for n in ATTENTION.names() if n != "naive"])
def test_equals_naive(name, kind, shape):
    backend = ATTENTION.get(name)
    if (reason := backend.unsupported(KINDS[kind], torch.device("cpu"), torch.float32)) is not None:
        pytest.skip(reason)
    for seed in range(3):
        batch = random_batch(KINDS[kind], BATCHES[shape], seed)
        expected = attend(ATTENTION.get("naive"), KINDS[kind], batch)
        assert torch.isfinite(expected).all()
        torch.testing.assert_close(attend(backend, KINDS[kind], batch), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", ["decode", "decode of equal length", "one decode", "mixed"])
def test_heads_of_a_joint_projection_equal_naive(shape):
    """Queries, keys and values as views of one buffer, refilled and attended to again as in the layers of a step."""
    kind = KINDS["gqa"]
    spans, q, k, v, cache = random_batch(kind, BATCHES[shape], 5)
    joint = torch.empty(len(q), kind.num_heads + 2 * kind.num_kv_heads, kind.head_dim)
    views = joint.split((kind.num_heads, kind.num_kv_heads, kind.num_kv_heads), 1)
    prepared = ATTENTION.get("sdpa").prepare(spans, kind, q.device, q.dtype)
    for scale in (1.0, -0.5):
        for view, values in zip(views, (q * scale, k, v), strict=True):
            view.copy_(values)
        expected = attend(ATTENTION.get("naive"), kind, (spans, q * scale, k, v, cache))
        found = ATTENTION.get("sdpa").attend(*views, cache, prepared)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=list(KINDS))
@pytest.mark.parametrize("name", [n for n in ATTENTION.names() if n != "naive"])
def test_shared_prefixes_equal_naive(name, kind, monkeypatch):
    """Two families of decoding sequences with common first blocks, one inside another, among strangers."""
    monkeypatch.setattr("headrace.engine.attention.sdpa._CALL_BYTES", 4_000)
    shape = [(40, 1), (33, 1), (90, 1), (0, 9), (33, 1), (64, 1), (200, 1), (32, 1), (12, 3), (41, 1), (47, 1)]
    for seed in range(3):
        batch = random_batch(KINDS[kind], shape, seed, shuffle=False)
        if KINDS[kind].window is None:
            share_prefixes(batch, {32: [0, 1, 4, 7], 64: [2, 6, 5], 40: [9, 10]})
        expected = attend(ATTENTION.get("naive"), KINDS[kind], batch)
        torch.testing.assert_close(attend(ATTENTION.get(name), KINDS[kind], batch), expected, atol=2e-6, rtol=1e-5)


def one_token_further(spans: Spans, cache: LayerCache, rng: np.random.Generator, spare: list[int]) -> Spans:
    """Every sequence one token later, its key and value written; blocks are taken from `spare` as they are begun."""
    starts, tables = spans.starts + 1, spans.tables.copy()
    for i, at in enumerate(starts.tolist()):
        if tables[i, at // spans.block_tokens] < 0:
            tables[i, at // spans.block_tokens] = block = spare.pop()
            cache.kv[block] = 0.0
        cache.kv[tables[i, at // spans.block_tokens], at % spans.block_tokens] = torch.from_numpy(
            rng.standard_normal(cache.kv.shape[2:], np.float32)
        )
    return Spans(starts, spans.lengths, spans.first_rows, tables, spans.block_tokens)


def growing_batch(kind: AttentionKind, shape, seed: int):
    """A decoding batch and blocks that its sequences may grow into."""
    spans, q, _, _, cache = random_batch(kind, shape, seed)
    grown = torch.cat([cache.kv, torch.full_like(cache.kv, float("nan"))])
    spare = list(range(len(cache.kv), len(grown)))
    tables = np.concatenate([spans.tables, np.full((len(shape), 8), -1, np.int32)], 1)
    spans = Spans(spans.starts, spans.lengths, spans.first_rows, tables, spans.block_tokens)
    return spans, torch.empty_like(q), LayerCache(grown), spare


@pytest.mark.parametrize("shape", ["decode", "decode of equal length", "one decode", "mixed"])
@pytest.mark.parametrize("kind", KINDS, ids=list(KINDS))
@pytest.mark.parametrize("name", ATTENTION.names())
def test_steps_that_continue_the_last_equal_naive(name, kind, shape):
    """`advance` from step to step, through the ends of blocks and of the room that is kept, prepared anew where it declines."""
    kind, backend = KINDS[kind], ATTENTION.get(name)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        spans, q, cache, spare = growing_batch(kind, BATCHES[shape], seed)
        if (spans.lengths > 1).any():
            prepared = backend.prepare(spans, kind, q.device, q.dtype)
            assert not backend.advance(prepared, spans)
            continue
        prepared, advanced = None, 0
        for _ in range(20):
            spans = one_token_further(spans, cache, rng, spare)
            q.copy_(torch.from_numpy(rng.standard_normal(q.shape, np.float32)))  # a step's queries are one buffer
            if prepared is None or not backend.advance(prepared, spans):
                prepared = backend.prepare(spans, kind, q.device, q.dtype)
            else:
                advanced += 1
            none = torch.empty(0)
            expected = attend(ATTENTION.get("naive"), kind, (spans, q, none, none, cache))
            found = backend.attend(q, none, none, cache, prepared)
            torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
        if name == "sdpa" and shape == "decode" and kind.window is None and kind.sinks is None:
            assert advanced > 14


def test_a_step_of_other_sequences_does_not_continue_the_last():
    kind, sdpa = KINDS["gqa"], ATTENTION.get("sdpa")
    spans, q, cache, spare = growing_batch(kind, BATCHES["decode"], 0)
    after = one_token_further(spans, cache, np.random.default_rng(0), spare)

    def changed(**fields) -> Spans:
        given = {"starts": after.starts, "lengths": after.lengths, "first_rows": after.first_rows}
        return Spans(**(given | {"tables": after.tables, "block_tokens": after.block_tokens} | fields))

    moved = after.tables.copy()
    moved[2, 0] = spare.pop()
    skipped = after.starts.copy()
    skipped[3] += 1
    others = [
        changed(tables=moved),
        changed(starts=skipped),
        changed(starts=spans.starts),
        changed(tables=after.tables[::-1]),
        changed(starts=after.starts[1:], lengths=after.lengths[1:], tables=after.tables[1:]),
    ]
    prepared = sdpa.prepare(spans, kind, q.device, q.dtype)
    for other in others:
        assert not sdpa.advance(prepared, other)
    assert sdpa.advance(prepared, after)


def test_a_broken_sequence_leaves_others_alone_in_steps_that_continue():
    kind, sdpa = KINDS["gqa"], ATTENTION.get("sdpa")
    spans, q, cache, spare = growing_batch(kind, BATCHES["decode"], 0)
    prepared = sdpa.prepare(spans, kind, q.device, q.dtype)
    rng = np.random.default_rng(0)
    for _ in range(3):
        spans = one_token_further(spans, cache, rng, spare)
        assert sdpa.advance(prepared, spans)
        q.copy_(torch.from_numpy(rng.standard_normal(q.shape, np.float32)))
        q[1] = float("nan")
        cache.kv[spans.tables[4, 0], 0] = float("inf")
        none = torch.empty(0)
        found = sdpa.attend(q, none, none, cache, prepared)
        expected = attend(ATTENTION.get("naive"), kind, (spans, q, none, none, cache))
        well = [0, 2, 3, 5, 6]
        torch.testing.assert_close(found[well], expected[well], atol=2e-6, rtol=1e-5)
        assert not torch.isfinite(found[[1, 4]].sum(-1)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gqa", "everything"])
def test_half_precision_stays_close(kind, dtype, monkeypatch):
    """Queries in bf16 over caches of both half precisions, shared prefixes among them."""
    monkeypatch.setattr("headrace.engine.attention.sdpa._CALL_BYTES", 4_000)
    batch = random_batch(KINDS[kind], [(40, 1), (70, 1), (0, 20), (33, 1), (12, 9)], 1, shuffle=False)
    if KINDS[kind].window is None:
        share_prefixes(batch, {32: [0, 1, 3]})
    expected = attend(ATTENTION.get("naive"), KINDS[kind], batch)
    spans, q, k, v, cache = batch
    half = (spans, q.bfloat16(), k.bfloat16(), v.bfloat16(), LayerCache(cache.kv.to(dtype)))
    found = attend(ATTENTION.get("sdpa"), KINDS[kind], half)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.05)


def test_shared_prefixes_are_read_once():
    kind = KINDS["gqa"]
    batch = random_batch(kind, [(400 + i, 1) for i in range(40)], 0, shuffle=False)
    share_prefixes(batch, {384: list(range(40))})
    prepared = ATTENTION.get("sdpa").prepare(batch[0], kind, torch.device("cpu"), torch.float32)
    assert len(prepared.buckets) == 1
    assert prepared.buckets[0].shared.tolist() == batch[0].tables[0, :48].tolist()
    assert len(prepared.buckets[0].blocks) <= 40 * 7
    expected = attend(ATTENTION.get("naive"), kind, batch)
    torch.testing.assert_close(attend(ATTENTION.get("sdpa"), kind, batch), expected, atol=2e-6, rtol=1e-5)


def test_naive_is_the_textbook_formula():
    """One head, one sequence, written out."""
    kind = AttentionKind(1, 1, 8, 0.5)
    spans, q, k, v, cache = random_batch(kind, [(0, 6)], 0)
    expected = torch.zeros(6, 8)
    for i in range(6):
        weights = torch.exp(torch.stack([(q[i, 0] @ k[j, 0]) * 0.5 for j in range(i + 1)]))
        expected[i] = sum(w * v[j, 0] for j, w in enumerate(weights / weights.sum()))
    torch.testing.assert_close(attend(ATTENTION.get("naive"), kind, (spans, q, k, v, cache)), expected)


def test_cheapest_cuts_equal_exhaustive_search():
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(1, 8))
        sizes = np.sort(rng.choice(100, n, replace=False) + 1).tolist()
        counts = rng.integers(1, 6, n).tolist()
        call = float(rng.integers(1, 120))

        def cost(starts, sizes=sizes, counts=counts, call=call, n=n):
            edges = [*starts, n]
            return sum(sum(counts[a:b]) * sizes[b - 1] + call for a, b in pairwise(edges))

        every = [[0] + [i for i in range(1, n) if bits >> (i - 1) & 1] for bits in range(1 << (n - 1))]
        assert cost(_cheapest_cuts(sizes, counts, call)) == min(cost(s) for s in every)
