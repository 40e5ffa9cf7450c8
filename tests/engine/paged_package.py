"""A stand-in for the flashinfer package: the same calls, computed by the formula from nothing but what was planned."""

from __future__ import annotations

import math

import torch

__version__ = "0.6.99"


class _Wrapper:
    causal = False

    def __init__(self, workspace, kv_layout, use_cuda_graph=False, use_tensor_cores=False, **buffers):
        assert kv_layout == "HND"
        assert bool(buffers) == use_cuda_graph
        self.buffers = buffers
        self.plans = 0

    def reset_workspace_buffer(self, split, integers):
        assert integers.dtype == torch.uint8

    def _plan(self, firsts, indptr, indices, last, heads, kv_heads, dim, page_size, rules):
        assert len(last) > 0  # there, the longest of none is an error
        if self.buffers:
            assert len(last) == len(self.buffers["paged_kv_last_page_len_buffer"])
            assert len(indices) <= len(self.buffers["paged_kv_indices_buffer"])
        assert {t.dtype for t in (firsts, indptr, indices, last, rules["seq_lens"])} == {torch.int32}
        full = (indptr[1:] - indptr[:-1] - 1) * page_size + last
        assert full.tolist() == rules.pop("seq_lens").tolist()
        self.planned = (
            firsts.tolist(),
            indptr.tolist(),
            indices.long(),
            full.tolist(),
            heads,
            kv_heads,
            dim,
            page_size,
        )
        self.rules = rules
        self.plans += 1

    def run(self, q, kv, *, out, enable_pdl):
        assert enable_pdl is False
        firsts, indptr, indices, lens, heads, kv_heads, dim, page_size = self.planned
        assert q.shape == out.shape == (firsts[-1], heads, dim)
        assert kv.shape[1:] == (2, kv_heads, page_size, dim)
        window, cap = self.rules["window_left"], self.rules["logits_soft_cap"]
        for i, length in enumerate(lens):
            rows = q[firsts[i] : firsts[i + 1]].double()
            pages = kv[indices[indptr[i] : indptr[i + 1]]].double()
            k, v = (pages[:, j].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :length] for j in range(2))
            k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
            scores = torch.einsum("qhd,hkd->hqk", rows, k) * self.rules["sm_scale"]
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            behind = length - len(rows) + torch.arange(len(rows))[:, None] - torch.arange(length)[None, :]
            hidden = behind < 0
            if window >= 0:
                hidden |= behind > window
            weights = scores.masked_fill(hidden.to(scores.device), -math.inf).softmax(-1)
            out[firsts[i] : firsts[i + 1]] = torch.einsum("hqk,hkd->qhd", weights, v).to(out.dtype)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, indptr, indices, last, heads, kv_heads, dim, page_size, **rules):
        self._plan(torch.arange(len(last) + 1).int(), indptr, indices, last, heads, kv_heads, dim, page_size, rules)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, firsts, indptr, indices, last, heads, kv_heads, dim, page_size, *, causal, **rules):
        assert causal
        rules.setdefault("seq_lens", (indptr[1:] - indptr[:-1] - 1) * page_size + last)
        self._plan(firsts, indptr, indices, last, heads, kv_heads, dim, page_size, rules)
