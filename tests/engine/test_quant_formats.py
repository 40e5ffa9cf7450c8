"""The contract of every weight format: bytes as accounted, bounded round trips, products equal to the dequantized matrix's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.base.errors import CorruptCheckpoint, InvalidInput, UnsupportedModel
from headrace.engine.quant.arrays import QuantArrays
from headrace.engine.quant.formats import FILES, form, known, names
from headrace.engine.quant.formats.mxfp4 import VALUES
from headrace.engine.quant.tables import NF4

SHAPES = ((64, 128), (33, 200), (7, 96), (130, 257), (1, 1))


def matrix(shape, seed=0, spread=0.05):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * spread
    values[:, ::17] *= 8  # some inputs are far larger than the others, as in real models
    return values


def arrays(packed):
    """What a reader would hand over."""
    plain = {
        key: (t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t).numpy() for key, t in packed.tensors.items()
    }
    return QuantArrays(packed.form.spec.name, packed.shape, plain)


def test_every_file_gives_formats_and_names_are_unique():
    assert sum(len(formats) for _, formats in FILES) == len(names())
    assert {f.name for f in known().values()} == set(names())


@pytest.mark.parametrize("alias", ["INT8", "w8a16", "int4-g128", "awq", "fp8", "nf4-double", "W8A8"])
def test_aliases_name_formats(alias):
    assert form(alias).name in names()
    assert form("w8a16").name == "int8"
    assert form("w8a8").name == "w8a8"


def test_an_unknown_format_lists_the_known():
    with pytest.raises(InvalidInput, match=r"int3.*int4_g128"):
        form("int3")


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_accounted_and_of_the_layout(name, shape):
    packed = form(name).quantize(matrix(shape))
    assert packed.nbytes == form(name).spec.nbytes(shape)
    layout = form(name).layout(*shape)
    assert set(packed.tensors) == set(layout)
    for key, tensor in packed.tensors.items():
        assert (tensor.dtype, tuple(tensor.shape)) == layout[key]


def bound(name, weight):
    """Largest error that rounding to the nearest of this format allows, element by element."""
    f = form(name)
    if f.spec.scaling == "group" and f.spec.kind == "int":
        size = f.spec.group_size
    elif f.spec.kind == "int":
        size = weight.shape[1]
    elif name == "mxfp4":
        size = 32
    else:
        size = 0
    if size:
        pad = torch.nn.functional.pad(weight, (0, -weight.shape[1] % size))
        groups = pad.view(len(weight), -1, size)
        largest = groups.abs().amax(-1)
        spread = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
        if name == "mxfp4":
            step = torch.exp2(
                torch.floor(torch.log2(largest)) - 2
            )  # the scale; cut from 8 to 6 at most, else steps of 2
            limit = 2 * step
        elif f.spec.zero_bits:
            step = spread / (2**f.spec.bits - 1)
            limit = step  # the zero point is rounded too, so an end may be cut by half a step
        else:
            levels = 127 if name in ("int8", "w8a8") else 2 ** (f.spec.bits - 1) - 0.5
            limit = largest / levels / 2
        limit = limit * 1.002 + 1e-7
        return limit[..., None].expand_as(groups).reshape(len(weight), -1)[:, : weight.shape[1]]
    if f.spec.kind == "codebook":
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
        largest = flat.abs().amax(1, keepdim=True)
        gap = float(np.diff(NF4).max()) / 2
        # Double quantization moves a scale by up to half the widest gap of its table, relative to the largest of its run.
        moved = 0.0 if name == "nf4_single" else 0.04 * float(largest.max())
        return (largest * gap + moved + 1e-6).expand_as(flat).reshape(-1)[: weight.numel()].view_as(weight)
    # FP8: half a unit of 3 bits of mantissa, or half the smallest step near zero
    scale = weight.abs().amax() / 448
    return weight.abs() / 16 * 1.001 + scale * 2**-10 + 1e-9


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("shape", [(64, 128), (33, 200), (130, 257)])
def test_the_round_trip_is_within_the_bound_of_the_format(name, shape):
    weight = matrix(shape, seed=3)
    error = (form(name).quantize(weight).dequantize() - weight).abs()
    assert bool((error <= bound(name, weight)).all()), float((error - bound(name, weight)).max())


@pytest.mark.parametrize("name", names())
def test_what_the_format_has_is_kept_exactly(name):
    """Quantizing a dequantized matrix changes nothing but the roundings of scales."""
    once = form(name).quantize(matrix((64, 128), seed=4)).dequantize()
    twice = form(name).quantize(once).dequantize()
    assert float((twice - once).abs().max()) <= float(once.abs().max()) * (0.08 if "int4" in name else 0.02)


@pytest.mark.parametrize("name", [n for n in names() if form(n).spec.bits == 4])
def test_more_bits_lose_less(name):
    weight = matrix((64, 256), seed=5)

    def loss(n):
        return float((form(n).quantize(weight).dequantize() - weight).square().mean())

    assert loss(name) > loss("int8_g128")
    if name.startswith("int4_g64"):
        assert loss(name.replace("g64", "g32")) < loss(name) < loss(name.replace("g64", "g128"))


@pytest.mark.parametrize("name", [n for n in names() if n != "w8a8"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_the_product_is_that_of_the_dequantized_matrix(name, tokens):
    packed = form(name).quantize(matrix((96, 160), seed=6))
    x = torch.randn(tokens, 160, generator=torch.Generator().manual_seed(7))
    expected = x @ packed.dequantize().t()
    torch.testing.assert_close(form(name).linear(x, packed), expected, atol=2e-5, rtol=1e-5)
    halves = form(name).linear(x.bfloat16(), packed)
    assert halves.dtype == torch.bfloat16
    torch.testing.assert_close(halves.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_w8a8_is_the_product_of_both_rounded(tokens):
    packed = form("w8a8").quantize(matrix((96, 160), seed=6))
    x = torch.randn(tokens, 160, generator=torch.Generator().manual_seed(7)) * 3
    scale = x.abs().amax(1, keepdim=True) / 127
    rounded = (x / scale).round() * scale
    torch.testing.assert_close(form("w8a8").linear(x, packed), rounded @ packed.dequantize().t(), atol=1e-4, rtol=1e-4)
    zero = form("w8a8").linear(torch.zeros(tokens, 160), packed)
    assert not zero.any()


@pytest.mark.parametrize("name", names())
def test_zeros_stay_zeros(name):
    weight = torch.zeros(40, 130)
    assert not form(name).quantize(weight).dequantize().any()
    weight[3] = 0.5
    back = form(name).quantize(weight).dequantize()
    assert not back[:2].any()
    assert float((back[3] - 0.5).abs().max()) < 0.05


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused_by_name(name, value):
    weight = torch.ones(4, 64)
    weight[2, 5] = value
    with pytest.raises(InvalidInput, match=r"model\.layers\.3\.up"):
        form(name).quantize(weight, "model.layers.3.up")


def test_scales_beyond_fp16_are_refused_by_name():
    with pytest.raises(InvalidInput, match="big"):
        form("int4_g32").quantize(torch.full((2, 64), 1e7), "big")


@pytest.mark.parametrize("name", names())
def test_adopting_arrays_gives_the_same_matrix_in_memory_of_its_own(name):
    packed = form(name).quantize(matrix((64, 128), seed=8))
    found = arrays(packed)
    adopted = form(name).adopt(found, "t")
    assert torch.equal(adopted.dequantize(), packed.dequantize())
    for key, tensor in adopted.tensors.items():
        assert tensor.data_ptr() != packed.tensors[key].data_ptr()


@pytest.mark.parametrize("name", names())
def test_missing_short_and_damaged_arrays_are_refused_by_name(name):
    packed = form(name).quantize(matrix((64, 128), seed=8))
    good = arrays(packed)
    for key in good.arrays:
        less = {k: v for k, v in good.arrays.items() if k != key}
        with pytest.raises(CorruptCheckpoint, match=r"blk\.7.*" + key):
            form(name).adopt(QuantArrays(good.form, good.shape, less), "blk.7")
        short = {**good.arrays, key: good.arrays[key].reshape(-1)[:-1]}
        with pytest.raises(CorruptCheckpoint, match=r"blk\.7.*" + key):
            form(name).adopt(QuantArrays(good.form, good.shape, short), "blk.7")
        if good.arrays[key].dtype.kind == "f":
            broken = np.array(good.arrays[key])
            broken.reshape(-1)[0] = np.nan
            with pytest.raises(CorruptCheckpoint, match=r"blk\.7"):
                form(name).adopt(QuantArrays(good.form, good.shape, {**good.arrays, key: broken}), "blk.7")


@pytest.mark.parametrize(
    ("name", "key", "value"), [("mxfp4", "scales", 255), ("fp8_e4m3", "codes", 0x7F), ("fp8_channel", "codes", 0xFF)]
)
def test_not_a_number_inside_codes_is_refused_by_name(name, key, value):
    good = arrays(form(name).quantize(matrix((64, 128), seed=8)))
    broken = np.array(good.arrays[key])
    broken.reshape(-1)[9] = value
    with pytest.raises(CorruptCheckpoint, match=r"blk\.7.*NaN"):
        form(name).adopt(QuantArrays(good.form, good.shape, {**good.arrays, key: broken}), "blk.7")


def test_an_order_that_is_no_permutation_is_refused():
    good = arrays(form("int4_g32_act").quantize(matrix((64, 128))))
    twice = np.array(good.arrays["order"])
    twice[0] = twice[1]
    with pytest.raises(CorruptCheckpoint, match="permutation"):
        form("int4_g32_act").adopt(QuantArrays(good.form, good.shape, {**good.arrays, "order": twice}), "t")


@pytest.mark.parametrize("name", names())
def test_cutting_rows_cuts_the_matrix_or_says_that_it_cannot(name):
    packed = form(name).quantize(matrix((96, 160), seed=9))
    try:
        parts = form(name).split(packed, (33, 63), "qkv")
    except UnsupportedModel as error:
        assert form(name).spec.scaling in ("flat", "tile")
        assert "qkv" in error.message  # noqa: PT017
        return
    assert torch.equal(torch.cat([p.dequantize() for p in parts]), packed.dequantize())
    for part, rows in zip(parts, (33, 63), strict=True):
        assert part.nbytes == form(name).spec.nbytes((rows, 160))


def test_tiles_cut_at_their_edges():
    packed = form("fp8_block128").quantize(matrix((300, 160), seed=9))
    parts = form("fp8_block128").split(packed, (128, 172), "qkv")
    assert torch.equal(torch.cat([p.dequantize() for p in parts]), packed.dequantize())


def test_mxfp4_is_the_nearest_of_all_codes():
    """Against a search over all 16 values of each scale that the rule gives."""
    weight = matrix((16, 64), seed=10)
    back = form("mxfp4").quantize(weight).dequantize()
    groups = weight.view(-1, 32)
    scale = torch.exp2(torch.floor(torch.log2(groups.abs().amax(1))) - 2)[:, None]
    table = torch.tensor([*VALUES, *(-v for v in VALUES)])
    distance = (groups[..., None] - table * scale[..., None]).abs()
    torch.testing.assert_close((back.view(-1, 32) - groups).abs(), distance.amin(-1), atol=0, rtol=0)
