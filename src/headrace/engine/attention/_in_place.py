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

_ROOM = 8
"""Tokens that each sequence may grow by before its indices are laid out anew. A place kept costs a little of every layer's
attention, a new layout costs once; an estimate of where the two balance for eight sequences of 200 tokens."""


def computes_in_place(kind: AttentionKind, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """torch has the two kernels for fp32 on the CPU."""
    return device.type == "cpu" and dtype == kv_dtype == torch.float32 and kind.sinks is None


class InPlace:
    """`members` [n]: sequences of `spans` with one query each. What all layers of one group and kind share in a step;
    the scores' buffers are used by one layer after the other. `rows` [n]: the queries' rows, None for all in order.

    Where they are all sequences there is room for their next tokens (`advance`). A place that is still empty reads its
    own sequence's oldest key, a finite vector wherever that sequence is, and its score goes to a row of its own beside the
    real ones, where a much larger number leaves it a share of exactly zero.
    """

    def __init__(self, spans: Spans, kind: AttentionKind, members: Ints) -> None:
        self._kind = kind
        self._spans = spans
        heads, group = kind.num_heads, kind.num_heads // kind.num_kv_heads
        self._row_vectors = 2 * kind.num_kv_heads
        starts = spans.starts[members]
        oldest = np.zeros_like(starts) if kind.window is None else np.maximum(starts - kind.window + 1, 0)
        counts = starts + 1 - oldest
        longest = int(counts.max())
        everything = len(members) == len(spans.starts)
        self.rows = None if everything else torch.from_numpy(spans.first_rows[members])
        ragged = int(counts.min()) != longest
        grows = kind.window is None or int(starts.max()) + _ROOM < kind.window
        self._room = _ROOM if ragged and everything and grows else 0
        places = counts + self._room
        ends = np.cumsum(places)
        before = ends - places
        # Vectors of a token lie together, heads of keys first (`LayerCache`): the pool is a table of vectors.
        at = np.arange(ends[-1]) - np.repeat(before, places)
        empty = at >= np.repeat(counts, places) if self._room else None
        at = at + np.repeat(oldest, places) if empty is None else np.where(empty, 0, at)
        tokens = spans.tables[np.repeat(members, places), at // spans.block_tokens].astype(np.int64)
        vectors = (tokens * spans.block_tokens + at % spans.block_tokens) * self._row_vectors
        # Each sequence's keys once per query head.
        self._num_rows = len(members) * heads
        row_counts = np.repeat(places, heads)
        row_ends = np.cumsum(row_counts)
        row_starts = row_ends - row_counts
        order = np.arange(row_ends[-1])
        source = order - np.repeat(row_starts - np.repeat(before, heads), row_counts)
        self._kv_head = np.tile(np.arange(heads) // group, len(members))
        keys = vectors[source]
        keys += np.repeat(self._kv_head, row_counts)
        self._key_array, self._value_array = keys, keys + kind.num_kv_heads
        self._keys, self._values = torch.from_numpy(self._key_array), torch.from_numpy(self._value_array)
        self._offsets = torch.from_numpy(np.concatenate([[0], row_ends]))
        self._row_counts = row_counts
        self._scores = torch.zeros(int(row_ends[-1]))
        self._pattern: torch.Tensor | None = None
        self._source = self._queries = None
        # Where the scores go for the softmax; None if all rows are equally long.
        self._width = longest + self._room
        self._place_array: Ints | None = None
        if ragged:
            self._place_array = order + np.repeat(np.arange(self._num_rows) * self._width - row_starts, row_counts)
            spare = len(members) if self._room else 0
            self._padded = torch.full(((self._num_rows + spare) * self._width,), float("-inf"))
            if empty is not None:
                beside = (self._num_rows + np.arange(len(members))) * self._width
                self._padded[torch.from_numpy(beside)] = torch.finfo(torch.float32).max
                hidden = empty[source]
                self._place_array[hidden] = np.repeat(beside + 1, places * heads)[hidden]
            self._places = torch.from_numpy(self._place_array)
        self._next = row_starts + np.repeat(counts, heads)
        self._next_place = np.arange(self._num_rows) * self._width + np.repeat(counts, heads)

    def advance(self, spans: Spans) -> bool:
        """Move on to `spans`: the same sequences, each one token further. False where it must be prepared anew."""
        last = self._spans
        if (
            not self._room
            or len(spans.starts) != len(last.starts)
            or (spans.starts - last.starts != 1).any()
            or (spans.lengths != 1).any()
            or ((spans.tables != last.tables) & (last.tables >= 0)).any()
        ):
            return False
        size, at = spans.block_tokens, spans.starts
        tokens = spans.tables[np.arange(len(at)), at // size].astype(np.int64) * size + at % size
        keys = np.repeat(tokens * self._row_vectors, self._kind.num_heads) + self._kv_head
        self._key_array[self._next] = keys
        self._value_array[self._next] = keys + self._kind.num_kv_heads
        self._place_array[self._next] = self._next_place
        self._next += 1
        self._next_place += 1
        self._room -= 1
        self._spans = spans
        return True

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
        if self._place_array is None:
            shares = scores.view(self._num_rows, self._width).softmax(-1).view(-1)
        else:
            padded = self._padded.index_copy_(0, self._places, scores).view(-1, self._width)
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
