"""Headers from the cache are the headers that were read, and nothing that is not is believed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from gguf_files import write

from headrace.spec import gguf_cache
from headrace.spec.gguf import GGUFHeader, read_gguf
from headrace.spec.gguf_cache import SMALLEST_STRINGS, cached_header
from headrace.spec.locate import locate

WORDS = [f"word {i} é😀" for i in range(SMALLEST_STRINGS)]
METADATA = {
    "general.architecture": "llama",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.scores": [0.5, -1.25],
    "some.flags": [True, False],
    "some.numbers": [1, 2, 3],
    "a.number": 7,
    "a.float": 0.25,
    "a.switch": True,
}
TENSORS = [("a.weight", (4, 32), "q4_0"), ("b.bias", (8,), "f32")]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headers"


def not_read(path: Path) -> GGUFHeader:
    raise AssertionError(f"{path} was read again")


def assert_same(found: GGUFHeader, read: GGUFHeader) -> None:
    assert (found.path, found.version, found.byte_order, found.tensors) == (
        read.path,
        read.version,
        read.byte_order,
        read.tensors,
    )
    assert list(found.metadata) == list(read.metadata)
    for key, value in read.metadata.items():
        assert type(found.metadata[key]) is type(value), key
        if isinstance(value, np.ndarray):
            assert found.metadata[key].dtype == value.dtype
            np.testing.assert_array_equal(found.metadata[key], value)
        else:
            assert found.metadata[key] == value, key


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_second_time_it_comes_from_the_cache(tmp_path: Path, order: str) -> None:
    paths = (write(tmp_path / "m.gguf", METADATA, TENSORS, order=order),)
    read = read_gguf(paths[0])
    assert_same(cached_header(paths), read)
    assert_same(cached_header(paths, not_read), read)


def test_a_set_of_shards_is_one_entry(tmp_path: Path, cache: Path) -> None:
    paths = tuple(
        write(tmp_path / f"m-0000{i}-of-00002.gguf", METADATA if i == 1 else {"split.no": 1}, [TENSORS[i - 1]])
        for i in (1, 2)
    )
    read = cached_header(paths)
    assert {t.path for t in read.tensors.values()} == set(paths)
    assert_same(cached_header(paths, not_read), read)
    assert len(list(cache.iterdir())) == 1


def test_a_file_that_changed_is_read_again_and_replaces_its_entry(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "m.gguf", METADATA, TENSORS)
    cached_header((path,))
    write(path, METADATA | {"a.number": 8}, TENSORS)
    assert cached_header((path,)).metadata["a.number"] == 8
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_a_damaged_entry_is_read_again_and_stored_anew(tmp_path: Path, cache: Path, damage: str) -> None:
    path = write(tmp_path / "m.gguf", METADATA, TENSORS)
    read = cached_header((path,))
    (entry,) = cache.iterdir()
    raw = entry.read_bytes()
    damaged = {"cut": raw[:-1], "flipped": raw[:-1] + bytes([raw[-1] ^ 1]), "other": b"x" * len(raw)}[damage]
    entry.write_bytes(damaged)
    assert_same(cached_header((path,)), read)
    assert entry.read_bytes() == raw


def test_an_entry_of_another_version_is_read_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is right, but what it holds is not what this version keeps there."""
    paths = (write(tmp_path / "m.gguf", METADATA, TENSORS),)
    with monkeypatch.context() as other:
        other.setattr(gguf_cache, "_Entry", lambda *given: given[:3])
        cached_header(paths)
    read = read_gguf(paths[0])
    assert_same(cached_header(paths), read)
    assert_same(cached_header(paths, not_read), read)


def test_small_headers_and_those_not_to_be_cached_leave_nothing(tmp_path: Path, cache: Path) -> None:
    small = write(tmp_path / "small.gguf", METADATA | {"tokenizer.ggml.tokens": WORDS[:9]}, TENSORS)
    assert cached_header((small,)).metadata["tokenizer.ggml.tokens"] == WORDS[:9]
    large = write(tmp_path / "large.gguf", METADATA, TENSORS)
    assert locate(str(large)).gguf().metadata["tokenizer.ggml.tokens"] == WORDS
    assert not cache.exists()
    locate(str(large), cached=True).gguf()
    assert cache.exists()


def test_a_folder_that_cannot_be_written_costs_no_start(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "m.gguf", METADATA, TENSORS)
    cache.parent.mkdir()
    cache.write_bytes(b"")  # a file in the folder's place
    assert_same(cached_header((path,)), read_gguf(path))
    os.unlink(cache)
    cached_header((path,))
    assert cache.is_dir()
