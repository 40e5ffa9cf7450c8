"""Row operations that take addresses: against numpy, within their arrays' bounds."""

import headrace_native
import numpy as np
import pytest


def guarded(rng, rows, width):
    """Random [rows][width] as an allocation of its own, so that a sanitizer sees what reaches over its end."""
    return np.ascontiguousarray(rng.standard_normal((rows, width)).astype(np.float32))


@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 15), (2, 16), (5, 100), (4, 576)])
def test_norms_by_address(rows, n):
    rng = np.random.default_rng(n)
    x, weight, out = guarded(rng, rows, n), guarded(rng, 1, n), np.empty((rows, n), np.float32)
    headrace_native.rms_norm(x.ctypes.data, weight.ctypes.data, out.ctypes.data, rows, n, 1e-5)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("rows", "width", "stored_from"), [(1, 2, 0), (3, 64, 32), (7, 192, 128), (2, 34, 34)])
def test_rotation_and_store_by_address(rows, width, stored_from):
    rng = np.random.default_rng(width)
    x, factors, out = guarded(rng, rows, width), guarded(rng, rows, width), np.empty((rows, width), np.float32)
    kept = width - stored_from
    pool = np.full((rows + 3, kept), 7, np.float32)
    slots = rng.permutation(rows + 3)[:rows].astype(np.int64)
    addresses = [a.ctypes.data for a in (x, factors, out)]
    headrace_native.rotate_and_store(*addresses, rows, width, stored_from, pool.ctypes.data, slots.ctypes.data)
    product = x.astype(np.float64).view(np.complex128) * factors.astype(np.float64).view(np.complex128)
    np.testing.assert_allclose(out, product.view(np.float64), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(pool[slots], out[:, stored_from:])
    assert (np.delete(pool, slots, axis=0) == 7).all()
