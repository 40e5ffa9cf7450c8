"""Every kernel set's products against numpy, and against themselves in other batches."""

from __future__ import annotations

import headrace_native
import numpy as np
import pytest
from test_native_pack import QUANTIZED, oracle, packed, stored

from headrace.engine.weights.source import Stored

KERNELS = headrace_native.kernels()
FORMATS = (*QUANTIZED, "f32", "f16", "bf16")


def made(kind: str, n: int, k: int):
    if kind in QUANTIZED:
        return packed(stored(kind, n, k))
    values = np.random.default_rng(3).standard_normal((n, k)).astype(np.float32)
    match kind:
        case "f16":
            data = values.astype(np.float16)
        case "bf16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16)
        case _:
            data = values
    return packed(Stored(kind, data.view(np.uint8), k))


def product(matrix, x, kernels, exact=False):
    out = np.full((len(x), -(-matrix.n // 16) * 16), np.nan, np.float32)
    headrace_native.gemm(matrix, x, out, kernels, exact)
    return out[:, : matrix.n]


def quantized(x: np.ndarray) -> np.ndarray:
    """Activations as the kernels see them: int8 per group of 32 of a row, by the largest magnitude."""
    rows, k = x.shape
    padded = np.zeros((rows, -(-k // 32) * 32), np.float32)
    padded[:, :k] = x
    groups = padded.reshape(rows, -1, 32)
    top = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(120), top, out=np.zeros_like(top), where=top > 0)
    codes = np.rint(groups * inverse)
    return (codes * (top / np.float32(120))).reshape(rows, -1)[:, :k].astype(np.float64)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 16, 256), (3, 50, 512), (8, 33, 768), (21, 100, 256), (70, 16, 512)])
def test_products_equal_numpy(kind, kernels, rows, n, k):
    matrix, weights, _ = made(kind, n, k)
    x = np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)
    for exact in (False, True):
        seen = x.astype(np.float64) if exact or kind not in QUANTIZED else quantized(x)
        expected = seen @ weights.astype(np.float64).T
        scale = np.abs(seen) @ np.abs(weights.astype(np.float64)).T
        np.testing.assert_array_less(np.abs(product(matrix, x, kernels, exact) - expected), scale * 2e-6 + 1e-30)


@pytest.mark.parametrize("k", [1, 31, 33, 100, 300])
@pytest.mark.parametrize("wanted", ["int8", "int4", "fp16"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_inputs_need_not_be_whole_groups(kernels, wanted, k):
    values = np.random.default_rng(k).standard_normal((20, k)).astype(np.float32)
    matrix, weights, _ = packed(Stored.of_floats(values), wanted)
    x = np.random.default_rng(1).standard_normal((5, k)).astype(np.float32)
    for exact in (False, True):
        seen = x.astype(np.float64) if exact or wanted == "fp16" else quantized(x)
        expected = seen @ weights.astype(np.float64).T
        scale = np.abs(seen) @ np.abs(weights.astype(np.float64)).T
        np.testing.assert_array_less(np.abs(product(matrix, x, kernels, exact) - expected), scale * 2e-6 + 1e-6)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("exact", [False, True])
def test_a_row_is_the_same_bits_in_any_batch(kind, kernels, exact):
    matrix, _, _ = made(kind, 40, 512)
    x = np.random.default_rng(4).standard_normal((37, 512)).astype(np.float32)
    whole = product(matrix, x, kernels, exact)
    for first, last in ((0, 1), (0, 5), (3, 7), (5, 13), (30, 37), (1, 37)):
        np.testing.assert_array_equal(
            product(matrix, np.ascontiguousarray(x[first:last]), kernels, exact), whole[first:last]
        )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_activations_too_small_to_be_scaled_are_zero(kernels, kind):
    """120 divided by such a magnitude is infinite; codes made with it would leave the range that products in pairs count on."""
    matrix, _, _ = made(kind, 40, 512)
    x = np.random.default_rng(7).standard_normal((9, 512)).astype(np.float32) * np.float32(1e-38)
    x[4] *= np.float32(1e38)
    whole = product(matrix, x, kernels)
    assert whole[4].any()
    assert not np.delete(whole, 4, 0).any()
    for row in range(9):
        np.testing.assert_array_equal(product(matrix, x[row : row + 1], kernels)[0], whole[row])


@pytest.mark.parametrize("kind", FORMATS)
def test_kernel_sets_agree_to_the_bit(kind):
    """So that a model answers alike on machines of different age."""
    matrix, _, _ = made(kind, 40, 512)
    x = np.random.default_rng(5).standard_normal((9, 512)).astype(np.float32)
    for exact in (False, True):
        first, *others = (product(matrix, x, k, exact) for k in KERNELS)
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_extreme_codes_do_not_overflow(kernels, kind):
    """All activations and codes at their limits: 16-bit partial sums would be the first to go."""
    matrix, weights, _ = packed(stored(kind, 16, 256, seed=9))
    signs = np.sign(weights).astype(np.float32)
    x = np.where(signs == 0, 1, signs)[:8] * np.float32(3)
    expected = x.astype(np.float64) @ weights.astype(np.float64).T
    scale = np.abs(x).astype(np.float64) @ np.abs(weights).T.astype(np.float64)
    np.testing.assert_array_less(np.abs(product(matrix, x, kernels) - expected), scale * 2e-6)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(kernels, bad):
    matrix, _, _ = made("q4_1", 32, 256)
    x = np.random.default_rng(6).standard_normal((9, 256)).astype(np.float32)
    clean = product(matrix, x, kernels)
    x[4, 100] = bad
    found = product(matrix, x, kernels)
    assert not np.isfinite(found[4]).any()
    np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(clean, 4, 0))


def test_oracle_and_reference_are_not_the_same_code():
    """The dequantized matrix that products are held against is itself held against the gguf package."""
    source = stored("q5_k", 20, 512)
    np.testing.assert_allclose(packed(source)[1], oracle(source), rtol=3e-7, atol=1e-9)
