"""Norms, and rotation with the write to the cache, by either way against their formulas."""

from __future__ import annotations

import pytest
import torch

from headrace.engine.attention._contract import LayerCache
from headrace.engine.layers import norm as norms
from headrace.engine.layers import rope as ropes
from headrace.engine.layers.direct import native_call
from headrace.engine.layers.norm import RMSNorm
from headrace.engine.layers.rope import HeadBuffer, rotation_table
from headrace.spec.model import Rope


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.fixture(params=["native", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(norms, "native_call", lambda name: None)
        monkeypatch.setattr(ropes, "native_call", lambda name: None)
    elif native_call("rms_norm") is None:
        pytest.skip("headrace-native is not installed")
    return request.param


@pytest.mark.parametrize(("size", "rows"), [(576, 8), (576, 1), (64, 300), (40, 5), (7, 3), (576, 300)])
def test_the_norm_is_the_formula(way, size, rows):
    torch.manual_seed(size + rows)
    # From rows that eps decides over to rows of thousands.
    x = torch.randn(rows, size) * torch.logspace(-4, 4, rows)[:, None]
    gain = torch.rand(size) * 2 - 0.5
    norm, expected = RMSNorm(gain, 1e-5), formula(x, gain, 1e-5)
    assert norm.native == (way == "native")
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(norm(x.t().contiguous().t()).double(), expected, atol=1e-6, rtol=1e-5)
    norm.apply_(x)
    torch.testing.assert_close(x.double(), expected, atol=1e-6, rtol=1e-5)
    assert norm(torch.zeros_like(x)).eq(0).all()


def test_a_row_that_is_not_finite_leaves_the_others_alone(way):
    x = torch.randn(4, 64)
    whole = RMSNorm(torch.ones(64), 1e-5)(x)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    found = RMSNorm(torch.ones(64), 1e-5)(x)
    assert not found[1].isfinite().all()
    assert not found[2].isfinite().all()
    assert found[[0, 3]].equal(whole[[0, 3]])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5, 64, 65])
def test_heads_are_rotated_and_stored(way, tokens, kv_dtype):
    heads, kv_heads, dim, rotated = 6, 2, 16, 12
    torch.manual_seed(tokens)
    table = rotation_table(Rope(theta=10_000.0, dim=rotated), 512, torch.device("cpu"))
    positions = torch.randint(0, 512, (tokens,))
    buffer = HeadBuffer(heads, kv_heads, dim, table[positions], torch.empty(tokens, 0))
    assert (buffer._direct is not None) == (way == "native" and tokens <= 64)
    cache = LayerCache(torch.full((9, 16, 2 * kv_heads, dim), 7.0, dtype=kv_dtype))
    slots = torch.randperm(9 * 16)[:tokens]
    x = torch.randn(tokens, heads + 2 * kv_heads, dim)
    expected = x.double()
    pairs = torch.view_as_complex(expected[:, : heads + kv_heads, :rotated].unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * table[positions].to(torch.complex128)[:, None]
    expected[:, : heads + kv_heads, :rotated] = torch.view_as_real(turned).flatten(-2)
    buffer.fill_and_store(x.flatten(1), cache, slots)
    close = {"atol": 1e-5, "rtol": 1e-5} if kv_dtype == torch.float32 else {"atol": 2e-3, "rtol": 2e-3}
    torch.testing.assert_close(torch.cat([buffer.q, buffer.k, buffer.v], 1).double(), expected, **close)
    found = cache.kv.flatten(0, 1)
    torch.testing.assert_close(found[slots].double(), expected[:, heads:], **close)
    others = torch.ones(9 * 16, dtype=torch.bool).index_fill_(0, slots, value=False)
    assert found[others].eq(7).all()
