"""Attention of single queries that reads keys and values where they lie in the pool: no gather, no padding, no mask.

A query head and the keys it sees are one row of a sparse matrix whose columns are the pool's vectors: scores are a sampled
dense product, the output a weighted sum of picked rows. Both of torch's kernels visit a vector once per query head of its
group, straight from the pool. Only the scores are laid out padded, for the softmax between the two.
"""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt
import torch

from headrace.engine.attention._contract import AttentionKind, LayerCache, Spans

with warnings.catch_warnings():  # torch says once per process that sparse tensors are in beta
    warnings.simplefilter("ignore", UserWarning)
    torch.sparse_csr_tensor([0, 0], torch.empty(0, dtype=torch.int64), torch.empty(0), (1, 1))

Ints = npt.NDArray[np.int64]


def computes_in_place(kind: AttentionKind, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """torch has the two kernels for fp32 on the CPU."""
    return device.type == "cpu" and dtype == kv_dtype == torch.float32 and kind.sinks is None


class InPlace:
    """`members` [n]: sequences of `spans` with one query each. What all layers of one group and kind share in a step;
    the scores' buffers are used by one layer after the other. `rows` [n]: the queries' rows, None for all in order."""

    def __init__(self, spans: Spans, kind: AttentionKind, members: Ints) -> None:
        self._kind = kind
        heads, group = kind.num_heads, kind.num_heads // kind.num_kv_heads
        starts = spans.starts[members]
        oldest = np.zeros_like(starts) if kind.window is None else np.maximum(starts - kind.window + 1, 0)
        counts = starts + 1 - oldest
        ends = np.cumsum(counts)
        before = ends - counts
        # Vectors of a token lie together, heads of keys first (`LayerCache`): the pool is a table of vectors.
        at = np.arange(ends[-1]) + np.repeat(oldest - before, counts)
        owner = np.repeat(members, counts)
        tokens = spans.tables[owner, at // spans.block_tokens].astype(np.int64)
        vectors = (tokens * spans.block_tokens + at % spans.block_tokens) * (2 * kind.num_kv_heads)
        # Each sequence's keys once per query head.
        self._num_rows = len(members) * heads
        row_counts = np.repeat(counts, heads)
        row_ends = np.cumsum(row_counts)
        row_starts = row_ends - row_counts
        order = np.arange(row_ends[-1])
        kv_heads = np.tile(np.arange(heads) // group, len(members))
        keys = vectors[order - np.repeat(row_starts - np.repeat(before, heads), row_counts)]
        keys += np.repeat(kv_heads, row_counts)
        self._keys = torch.from_numpy(keys)
        self._values = torch.from_numpy(keys + kind.num_kv_heads)
        self._offsets = torch.from_numpy(np.concatenate([[0], row_ends]))
        self._row_counts = row_counts
        self._scores = torch.zeros(int(row_ends[-1]))
        self._pattern: torch.Tensor | None = None
        self._source = self._queries = None
        # Where the scores go for the softmax; None if all rows are equally long.
        self._longest = int(counts.max())
        self._places = None
        if int(counts.min()) != self._longest:
            shift = np.arange(self._num_rows) * self._longest - row_starts
            self._places = torch.from_numpy(order + np.repeat(shift, row_counts))
            self._padded = torch.full((self._num_rows * self._longest,), float("-inf"))
        everything = len(members) == len(spans.starts)
        self.rows = None if everything else torch.from_numpy(spans.first_rows[members])

    def attend(self, q: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        """q [n, heads, head_dim] → [n, heads * head_dim]."""
        kind, scores = self._kind, self._scores
        # A step's queries are the same buffer in every layer, and its rows are what the sparse matrix is laid out for.
        if q is not self._source:
            self._look_at(q, len(cache.vectors))
        queries = q.reshape(-1, kind.head_dim) if self._queries is None else self._queries
        torch.sparse.sampled_addmm(self._pattern, queries, cache.columns, beta=0.0, alpha=kind.scale, out=self._pattern)
        if kind.softcap is not None:
            scores.div_(kind.softcap).tanh_().mul_(kind.softcap)
        if self._places is None:
            shares = scores.view(self._num_rows, self._longest).softmax(-1).view(-1)
        else:
            padded = self._padded.index_copy_(0, self._places, scores).view(self._num_rows, self._longest)
            shares = padded.softmax(-1).view(-1).index_select(0, self._places)
        out = torch._embedding_bag_forward_only(
            cache.vectors, self._values, self._offsets, False, 0, False, shares, True
        )[0]
        return out.view(-1, kind.num_heads * kind.head_dim)

    def _look_at(self, q: torch.Tensor, num_vectors: int) -> None:
        """Lay the sparse matrix out for queries like `q`: where each token's heads lie in a wider row, as in a joint
        projection, what is between them becomes rows without entries, and `q` is read where it is."""
        heads, dim = self._kind.num_heads, self._kind.head_dim
        tokens, width = len(q), q.stride(0) // dim
        offsets = self._offsets
        self._queries = None
        if self.rows is None and tokens > 1 and q.stride() == (width * dim, dim, 1) and width > heads:
            counts = np.zeros((tokens, width), np.int64)
            counts[:, :heads] = self._row_counts.reshape(tokens, heads)
            used = (tokens - 1) * width + heads
            offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(counts.reshape(-1)[:used])]))
            self._queries = q.as_strided((used, dim), (dim, 1))
        shape = (len(offsets) - 1, num_vectors)
        if self._pattern is None or self._pattern.shape != shape:
            self._pattern = torch.sparse_csr_tensor(offsets, self._keys, self._scores, shape, check_invariants=False)
        self._source = q
