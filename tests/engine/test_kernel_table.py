"""What `headrace tune` writes is what starts read: the user's table wins over the shipped one, entry by entry."""

from __future__ import annotations

import json

import kernel_device  # noqa: F401 - chooses between the GPU and the interpreter before kernels are imported
import pytest

from headrace.engine.kernels.table import SHIPPED, GemmTable, file_name, key
from headrace.engine.tune import write_table

CARD = "NVIDIA H200"


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_DATA", str(tmp_path))


def test_a_tuned_product_takes_the_place_of_the_shipped_one():
    before = GemmTable(CARD, 132)
    assert before.sources == [file_name(CARD)]
    shipped, other = (before.config(rows, 6144, 4096, pair=False) for rows in (4, 16))
    tuned = {"block_n": 128, "block_k": 64, "split_k": 7, "num_warps": 8, "stages": 2}
    written = write_table(
        CARD, {key(4, 6144, 4096, pair=False): tuned, key(16, 4096, 4096, pair=False): None}, None,
        {"4x128": {"block_n": 16, "num_warps": 2, "stages": 1, "splits": 5, "min_chunk": 32}},
    )  # fmt: skip
    after = GemmTable(CARD, 132)
    assert after.sources == [file_name(CARD), str(written)]
    found = after.config(3, 6144, 4096, pair=False)
    assert found != shipped
    assert {name: getattr(found, name) for name in tuned} == tuned
    assert after.config(16, 4096, 4096, pair=False) is None, "the library is the better one there"
    assert after.config(16, 6144, 4096, pair=False) == other
    assert after.decode(2, 128)["splits"] == 5
    assert after.decode(8, 128) == before.decode(8, 128)
    assert GemmTable("NVIDIA L4", 58).sources == []


def test_a_second_tuning_keeps_the_entries_of_the_first():
    one, two = key(4, 64, 128, pair=False), key(8, 64, 128, pair=True)
    entry = {"block_n": 16, "block_k": 64, "split_k": 1, "num_warps": 4, "stages": 2}
    write_table(CARD, {one: entry})
    path = write_table(CARD, {two: entry | {"split_k": 2}, one: entry | {"stages": 3}})
    assert json.loads(path.read_text())["gemm"] == {one: entry | {"stages": 3}, two: entry | {"split_k": 2}}


def test_a_card_without_a_table_has_its_products_guessed():
    table = GemmTable("NVIDIA L4", 58)
    assert table.config(1, 4096, 4096, pair=False) is not None
    assert table.config(40, 4096, 4096, pair=False) is None
    assert json.loads((SHIPPED / file_name(CARD)).read_text())["card"] == CARD
