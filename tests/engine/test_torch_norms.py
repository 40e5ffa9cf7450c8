"""RMS norms, alone and with their weight in the columns of the matrix that follows."""

from __future__ import annotations

import pytest
import torch

from headrace.engine.layers.linear import Linear
from headrace.engine.layers.norm import RMSNorm

SIZES = [
    (576, 960, 8),
    (576, 96, 1),
    (64, 64, 300),
    (40, 24, 5),
]  # the first is packed by oneDNN, the last is too odd to be


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def inputs(size: int, out: int, rows: int):
    torch.manual_seed(size + rows)
    # From rows that eps decides over to rows of thousands.
    x = torch.randn(rows, size) * torch.logspace(-4, 4, rows)[:, None]
    return x, torch.rand(size) * 2 - 0.5, torch.randn(out, size), torch.randn(out)


@pytest.mark.parametrize("shape", SIZES)
def test_the_norm_is_the_formula(shape):
    x, gain, _, _ = inputs(*shape)
    norm, expected = RMSNorm(gain, 1e-5), formula(x, gain, 1e-5)
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-6, rtol=1e-5)
    norm.apply_(x)
    torch.testing.assert_close(x.double(), expected, atol=1e-6, rtol=1e-5)
    assert norm(torch.zeros_like(x)).eq(0).all()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SIZES)
def test_a_folded_norm_and_its_product_are_norm_and_product(shape, biased):
    x, gain, weight, bias = inputs(*shape)
    norm = RMSNorm(gain, 1e-5, folded=True)
    linear = Linear(norm.folded_into(weight.clone()), bias if biased else None)
    if shape in (SIZES[0], SIZES[-1]) and torch.backends.mkldnn.is_available():
        assert linear.packed == (shape == SIZES[0])
    expected = formula(x, gain, 1e-5) @ weight.double().T + (bias.double() if biased else 0)
    torch.testing.assert_close(linear(norm(x)).double(), expected, atol=2e-4, rtol=1e-4)


def test_a_norm_that_is_not_folded_leaves_matrices_alone():
    _, gain, weight, _ = inputs(64, 64, 3)
    torch.testing.assert_close(RMSNorm(gain, 1e-5).folded_into(weight.clone()), weight, rtol=0, atol=0)
