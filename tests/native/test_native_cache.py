"""The packed form on disk: found again, checked, replaced, shared, and never in the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import headrace_native
import numpy as np
import pytest

from headrace.engine.native import packed_cache
from headrace.engine.native.arena import Arena
from headrace.engine.native.memory import huge_file_bytes
from headrace.engine.native.packed_cache import cached_weights, read, write
from headrace.engine.weights.source import Stored
from headrace.spec.locate import ModelFiles
from headrace.spec.packing import PACKINGS

POOL = headrace_native.Pool(2)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "SMALLEST_BYTES", 1)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def files(tmp_path) -> ModelFiles:
    path = tmp_path / "model.gguf"
    path.write_bytes(np.random.default_rng(0).bytes(300_000))
    return ModelFiles("a model", "gguf", tmp_path, weights=(path,))


def arena(seed: int = 0, form: str = "q8_0") -> Arena:
    made = Arena()
    values = np.random.default_rng(seed).standard_normal((40, 64)).astype(np.float32)
    made.reserve("w", Stored.of_floats(values), PACKINGS[form])
    made.reserve_vector("b", values[0])
    return made


def entries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not p.name.startswith("."))


def test_a_second_start_reads_what_the_first_packed(files, folder, monkeypatch):
    first = cached_weights(files, arena(), POOL)
    assert len(entries(folder)) == 1
    monkeypatch.setattr(Arena, "fill", lambda *_: pytest.fail("packed again"))
    np.testing.assert_array_equal(cached_weights(files, arena(), POOL), first)


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "head", "empty", "other"])
def test_a_damaged_entry_is_noticed_and_made_again(files, folder, damage, caplog):
    first = cached_weights(files, arena(), POOL)
    (path,) = entries(folder)
    data = bytearray(path.read_bytes())
    match damage:
        case "flip":
            data[-100] ^= 1
        case "cut":
            data = data[:-1]
        case "grow":
            data += b"x"
        case "head":
            data[3] ^= 1
        case "empty":
            data = bytearray()
        case "other":
            data[20] ^= 1
    path.write_bytes(data)
    np.testing.assert_array_equal(cached_weights(files, arena(), POOL), first)
    assert "damaged" in caplog.text
    caplog.clear()
    np.testing.assert_array_equal(cached_weights(files, arena(), POOL), first)
    assert "damaged" not in caplog.text


def test_every_bit_counts_for_the_digest():
    rng = np.random.default_rng(1)
    data = np.frombuffer(bytearray(rng.bytes(700_001)), np.uint8)
    whole = headrace_native.checksum(data, POOL)
    assert whole == headrace_native.checksum(data, headrace_native.Pool(1))
    for at in (0, 1, 63, 64, 262_143, 262_144, 524_288, 700_000, *rng.integers(0, len(data), 200).tolist()):
        bit = np.uint8(1 << rng.integers(8))
        data[at] ^= bit
        assert headrace_native.checksum(data, POOL) != whole
        data[at] ^= bit
    swapped = data.copy()
    swapped[:64], swapped[64:128] = data[64:128], data[:64]
    assert headrace_native.checksum(swapped, POOL) != whole
    assert headrace_native.checksum(data[:-1].copy(), POOL) != whole


def test_a_changed_file_gets_a_new_entry_in_the_old_one_s_place(files, folder):
    cached_weights(files, arena(), POOL)
    (path,) = entries(folder)
    about = files.weights[0].stat()
    data = bytearray(files.weights[0].read_bytes())
    data[0] ^= 1  # same size, inode and, below, time: only the contents tell
    with files.weights[0].open("r+b") as file:
        file.write(data)
    os.utime(files.weights[0], ns=(about.st_atime_ns, about.st_mtime_ns))
    cached_weights(files, arena(1), POOL)
    (other,) = entries(folder)
    assert other != path


def test_two_precisions_live_side_by_side(files, folder):
    cached_weights(files, arena(), POOL)
    cached_weights(files, arena(form="fp16"), POOL)
    assert len(entries(folder)) == 2


def test_a_folder_that_cannot_be_written_only_costs_time(files, folder, caplog):
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    expected = arena().fill(POOL)
    found = cached_weights(files, arena(), POOL)
    assert found is None or (found == expected).all()
    assert "not cached" in caplog.text


def test_small_models_are_not_cached(files, folder, monkeypatch):
    monkeypatch.setattr(packed_cache, "SMALLEST_BYTES", 1 << 30)
    assert cached_weights(files, arena(), POOL) is None
    assert not folder.exists()


@pytest.mark.parametrize("huge", [True, False])
def test_an_entry_is_used_in_place_only_where_its_file_lies_in_huge_pages(tmp_path, monkeypatch, huge):
    path, size = tmp_path / "m-a-b.bin", 5_000_000
    data = np.frombuffer(np.random.default_rng(2).bytes(size), np.uint8)
    write(path, b"k" * 32, data, POOL)
    said = iter((1 << 20, (1 << 20) + (size if huge else size // 2)))
    monkeypatch.setattr(packed_cache, "huge_file_bytes", lambda: next(said))
    found = read(path, b"k" * 32, size, POOL)
    np.testing.assert_array_equal(found, data)
    assert found.flags.writeable == (not huge)
    assert found.ctypes.data % 4096 == 0


@pytest.mark.parametrize("gone", ["replaced", "removed"])
def test_weights_in_use_stay_when_their_entry_goes(tmp_path, monkeypatch, gone):
    path, size = tmp_path / "m-a-b.bin", 5_000_000
    data = np.frombuffer(np.random.default_rng(3).bytes(size), np.uint8)
    write(path, b"k" * 32, data, POOL)
    said = iter((0, size))
    monkeypatch.setattr(packed_cache, "huge_file_bytes", lambda: next(said))
    found = read(path, b"k" * 32, size, POOL)
    if gone == "replaced":
        write(path, b"j" * 32, np.zeros(size, np.uint8), POOL)
    else:
        path.unlink()
    np.testing.assert_array_equal(found, data)


def test_huge_pages_of_files_are_counted_as_the_system_says():
    before = huge_file_bytes()
    assert before >= 0
    assert before % 4096 == 0


def test_abandoned_temporary_files_are_removed(files, folder):
    folder.mkdir(parents=True)
    old, new = folder / ".packing.old", folder / ".packing.new"
    old.write_bytes(b"")
    new.write_bytes(b"")
    os.utime(old, (0, 0))
    cached_weights(files, arena(), POOL)
    assert not old.exists()
    assert new.exists()


def test_entries_that_no_start_used_for_long_are_removed_when_one_is_written(files, folder):
    folder.mkdir(parents=True)
    old, used = folder / "other-0-0.bin", folder / "another-0-0.bin"
    for path in (old, used):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    cached_weights(files, arena(), POOL)
    assert not old.exists()
    assert used.exists()


def test_an_old_entry_that_may_not_be_removed_is_left_and_not_called_a_failure(files, folder, monkeypatch, caplog):
    folder.mkdir(parents=True)
    old = folder / "other-0-0.bin"
    old.write_bytes(b"")
    os.utime(old, (0, 0))
    remove = Path.unlink

    def unlink(path, missing_ok=False):
        if path == old:
            raise PermissionError(1, "of another user", str(path))
        remove(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    cached_weights(files, arena(), POOL)
    assert old.exists()
    assert "not cached" not in caplog.text


def test_a_start_that_reads_an_entry_marks_it_as_used(files, folder):
    cached_weights(files, arena(), POOL)
    [entry] = folder.glob("*.bin")
    os.utime(entry, (0, 0))
    assert cached_weights(files, arena(), POOL) is not None
    assert entry.stat().st_mtime > 0


_WRITER = """
import sys, numpy as np, headrace_native
from pathlib import Path
from headrace.engine.native.packed_cache import read, write
pool, path = headrace_native.Pool(1), Path(sys.argv[1])
data = np.full(3_000_000, int(sys.argv[2]), np.uint8)
for _ in range(20):
    write(path, b"k" * 32, data, pool)
    found = read(path, b"k" * 32, len(data), pool)
    assert found is not None and (found == found[0]).all()
"""


def test_concurrent_starts_see_whole_entries_or_none(tmp_path):
    path = tmp_path / "x" / "m-a-b.bin"
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(path), str(i)], stderr=subprocess.PIPE) for i in range(3)
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors.decode()
    assert read(path, b"k" * 32, 3_000_000, POOL) is not None
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    write(path, b"j" * 32, np.zeros(8, np.uint8), POOL)
    assert read(path, b"k" * 32, 3_000_000, POOL) is None
