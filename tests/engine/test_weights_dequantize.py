"""Dequantizing is equal, to the bit, to the `gguf` package's own on random blocks."""

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as reference

from headrace.engine.weights.dequantize import SUPPORTED, dequantize
from headrace.spec.ggml import GGML_TYPES_BY_NAME


def test_the_required_types_are_supported():
    assert {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"} <= SUPPORTED


@pytest.mark.parametrize("name", sorted(SUPPORTED))
@pytest.mark.parametrize("blocks", [1, 3, 700])
def test_equals_the_reference_to_the_bit(name, blocks):
    kind = GGML_TYPES_BY_NAME[name]
    count = blocks * (64 if kind.block_elements == 1 else 4)
    raw = np.random.default_rng(blocks).integers(0, 256, (count, kind.block_bytes)).astype(np.uint8)
    out = np.empty(count * kind.block_elements, np.float32)
    with np.errstate(all="ignore"):  # random scales are infinities and NaNs too
        dequantize(raw, kind, out)
        expected = reference(raw, gguf.GGMLQuantizationType(kind.id)).astype(np.float32).reshape(-1)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(out[numbers].view(np.uint32), expected[numbers].view(np.uint32))
