"""Plain products by chosen algorithms of cuBLASLt, and what the decoder does with those that come in parts."""

from __future__ import annotations

import random

import kernel_device
import numpy as np
import pytest
import torch
from test_cuda_steps import TOLERANCE, engine
from test_models_logits import VOCAB, dense, reference, tiny_model

from headrace.engine.cuda.library import CutProduct, Library, LibraryProduct
from headrace.engine.kernels.table import LibraryTable

ON_GPU = kernel_device.ON_GPU


def test_the_least_rows_that_hold_a_product_say_how_it_runs():
    table = LibraryTable()
    table.add({"version": 3, "products": {"96x40x8": {"algorithm": "a", "parts": 2}, "256x40x8": None}})
    assert table.entry(64, 40, 8) is None  # a decode step's own products
    assert table.entry(65, 40, 8) == table.entry(96, 40, 8) == {"algorithm": "a", "parts": 2}
    assert table.entry(97, 40, 8) is table.entry(257, 40, 8) is table.entry(96, 8, 40) is None
    assert table.in_parts(40, 8) == [(96, 2)]
    table.add({"version": 3, "products": {"96x40x8": None}})
    assert table.in_parts(40, 8) == []
    table.add({"version": 4, "products": {"96x40x9": {"algorithm": "b", "parts": 1}}})
    assert table.version == 4
    assert table.entry(96, 40, 9) is not None
    assert table.entry(96, 40, 8) is None


def test_it_says_why_no_algorithm_is_chosen():
    empty = LibraryTable()
    device = torch.device("cuda" if ON_GPU else "cpu")
    assert "no GPU" in Library(empty, torch.bfloat16, torch.device("cpu")).why_not
    if ON_GPU:
        assert "measured in float16" in Library(empty, torch.float16, device).why_not
        assert "no table" in Library(empty, torch.bfloat16, device).why_not
        other = LibraryTable()
        other.add({"version": 1, "products": {}})
        library = Library(other, torch.bfloat16, device)
        assert "cuBLASLt 1, and this is" in library.why_not
        assert library.find(torch.zeros(96, 64, device=device), torch.zeros(64, 64, device=device)) is None


class InParts:
    """Stands in for the library: products of any size, of the inner dimension's halves where that is allowed."""

    why_not = None
    used = 0

    def __init__(self, *_):
        self.parts = 1

    nbytes = 0

    def note(self):
        return "stands in"

    def in_parts(self, columns, inner):
        return [(64, 2)]

    def find(self, x, w, *, parts=1):
        chosen = InParts()
        chosen.parts = min(parts, 2)
        return chosen

    def run(self, x, w, out, *, scale=1.0, add=False):
        half = x.shape[1] // 2
        terms = [x[:, :half] @ w[:, :half].t(), x[:, half:] @ w[:, half:].t()]
        if self.parts == 1:
            out.copy_(scale * sum(terms) + (out if add else 0))
        else:
            InParts.used += 1
            out.copy_(torch.stack(terms))


@pytest.mark.parametrize("name", ["llama-mha", "gemma3"])
def test_products_in_parts_change_nothing(tmp_path, name, monkeypatch):
    from headrace.engine.cuda import decoder

    model, folder = tiny_model(tmp_path, name)
    monkeypatch.setattr(decoder, "Library", InParts)
    monkeypatch.setattr(InParts, "used", 0)
    monkeypatch.setattr(decoder.Decoder, "fused", lambda *_: False)
    runs = engine(folder)
    sequence = runs.add([random.Random(1).randrange(3, VOCAB) for _ in range(5)], logprobs=VOCAB)
    runs.step([(sequence, 5)])
    runs.step([(sequence, 1)])
    wanted = reference(model, sequence.tokens).numpy()
    assert np.abs(dense(sequence.logprobs) - wanted[4:-1]).max() < TOLERANCE
    assert InParts.used > 0
    runs.close()


@pytest.mark.skipif(not ON_GPU, reason="needs cuBLASLt and a GPU")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("rows", [80, 200, 1536])
def test_every_proposed_algorithm_multiplies(rows, parts):
    device = torch.device("cuda")
    columns, inner = 1536, 1024
    x, w = (
        kernel_device.randn(rows, inner, dtype=torch.bfloat16),
        kernel_device.randn(columns, inner, dtype=torch.bfloat16),
    )
    library = Library(LibraryTable(), torch.bfloat16, device)
    product = library.product(rows, columns, inner, parts)
    found = product.proposals()
    assert found
    wanted = x.double() @ w.double().t()
    for algorithm in found:
        assert product.take(algorithm)
        out = torch.full((parts, rows, columns), float("nan"), dtype=torch.bfloat16, device=device)
        product.run(x, w, out)
        assert kernel_device.gap(out.double().sum(0), wanted) < 5e-3
        if parts == 1:
            stream = kernel_device.randn(rows, columns, dtype=torch.bfloat16, seed=1)
            total = stream.double() + 0.5 * wanted
            product.run(x, w, stream, scale=0.5, add=True)
            assert kernel_device.gap(stream, total) < 5e-3
    assert not product.take("f" * 128)
    product.close()


@pytest.mark.skipif(not ON_GPU, reason="needs cuBLASLt and a GPU")
def test_named_algorithms_are_found_and_forgotten_in_turn():
    device = torch.device("cuda")
    probe = Library(LibraryTable(), torch.bfloat16, device)
    (algorithm, *_) = probe.product(256, 1024, 512).proposals()
    table = LibraryTable()
    (of_half, *_) = probe.product(256, 512, 512, stride=1024).proposals()
    entries = {
        "320x1024x512": {"algorithm": of_half, "parts": 1, "cut": 512, "rest": of_half},
        "2048x1024x512": {"algorithm": algorithm, "parts": 1},
    }
    table.add({"version": probe.version, "products": entries})
    library = Library(table, torch.bfloat16, device)
    assert library.why_not is None
    w = kernel_device.randn(1024, 512, dtype=torch.bfloat16)
    for rows in (*range(65, 700), 80):
        x = torch.ones(rows, 512, dtype=torch.bfloat16, device=device)
        product = library.find(x, w)
        assert product is not None
        out = torch.empty(rows, 1024, dtype=torch.bfloat16, device=device)
        product.run(x, w, out)
        assert type(product) is (CutProduct if rows <= 320 else LibraryProduct)
    assert kernel_device.gap(out, x.double() @ w.double().t()) < 5e-3
    assert library.find(x[:, :256], w[:, :256]) is None


def test_a_card_s_table_keeps_what_one_version_of_the_library_was_measured_with(tmp_path):
    import json

    from headrace.engine.tune import write_table

    def written(library):
        return json.loads(write_table("a card", {}, tmp_path, None, library).read_text()).get("library")

    one = {"algorithm": "a", "parts": 1}
    assert written(None) is None
    assert written({"version": 3, "products": {"96x8x8": one}}) == {"version": 3, "products": {"96x8x8": one}}
    assert written({"version": 3, "products": {"80x8x8": None}})["products"] == {"96x8x8": one, "80x8x8": None}
    assert written(None)["products"] == {"96x8x8": one, "80x8x8": None}
    assert written({"version": 4, "products": {}}) == {"version": 4, "products": {}}


def test_products_are_made_once_and_the_oldest_go(monkeypatch):
    from headrace.engine.cuda import library as module

    table = LibraryTable()
    entries = {"96x40x8": {"algorithm": "a", "parts": 2}, "256x40x8": None, "512x40x8": {"algorithm": "b", "parts": 1}}
    table.add({"version": 1, "products": entries})
    library = Library(table, torch.bfloat16, torch.device("cpu"))
    library.why_not = None
    made, closed = [], []

    class Product:
        def __init__(self, rows, parts):
            self.rows, self.parts = rows, parts
            made.append(rows)

        def close(self):
            closed.append(self.rows)

    monkeypatch.setattr(library, "made", lambda rows, _columns, _inner, entry: Product(rows, entry["parts"]))
    monkeypatch.setattr(module, "_KEPT", 3)
    w = torch.zeros(40, 8)

    def find(rows, **more):
        return library.find(torch.zeros(rows, 8), w, **more)

    assert find(80) is None  # comes in parts, which this caller cannot take
    assert find(80, parts=2) is find(80, parts=3)
    assert find(200, parts=2) is None
    assert find(300).parts == 1
    assert find(300) is find(300)
    assert made == [80, 300]
    assert find(301) is not None
    assert closed == [80]
    assert find(302) is not None
    assert closed == [80]  # the next to go was one without an entry
    assert find(303) is not None
    assert closed == [80, 300]
    assert library.find(torch.zeros(303, 16)[:, :8], w) is None


@pytest.mark.parametrize(
    "entry", [{"algorithm": "a", "parts": 1}, {"algorithm": "a", "parts": 1, "cut": 24, "rest": "b"}]
)
def test_a_refused_algorithm_is_said_once_and_its_descriptions_are_given_back(entry, monkeypatch, caplog):
    table = LibraryTable()
    table.add({"version": 1, "products": {"96x40x8": entry}})
    library = Library(table, torch.bfloat16, torch.device("cpu"))
    library.why_not = None
    open_ones = []

    class Product:
        def __init__(self, *_, **__):
            open_ones.append(self)

        def take(self, algorithm):
            return algorithm == "b"

        def close(self):
            open_ones.remove(self)

    monkeypatch.setattr(library, "product", Product)
    for _ in range(2):
        assert library.find(torch.zeros(96, 8), torch.zeros(40, 8)) is None
    assert not open_ones
    assert [r.getMessage() for r in caplog.records] == [
        "cuBLASLt refuses the table's algorithm for 96 x 40 x 8: its own choice is taken"
    ]
