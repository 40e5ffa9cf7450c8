"""What goes wrong while a file is written says which file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.base.files import naming, write_atomic
from headrace.bench.records import RecordLog
from headrace.engine.quant.journal import Journal

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


class Line(msgspec.Struct):
    text: str


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_has_the_name_of_the_file_that_was_to_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        write_atomic(tmp_path / "report.json", "{}")
    assert caught.value.filename == str(tmp_path / "report.json")
    assert list(tmp_path.iterdir()) == []  # nor is a part of it left
    with pytest.raises(OSError) as caught:
        Journal(tmp_path, {})
    assert Path(caught.value.filename).parent == tmp_path


def test_records_that_cannot_be_appended_name_their_file(tmp_path):
    log = RecordLog(tmp_path / "records.jsonl")
    log._file.close()
    log._file = FULL.open("ab")
    with pytest.raises(OSError) as caught:
        log.append(Line("x"))
    assert caught.value.filename == str(tmp_path / "records.jsonl")
    with pytest.raises(OSError, match=r"records\.jsonl"):
        log.close()


def test_a_name_that_is_known_is_kept(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, naming(tmp_path / "to-write"):
        (tmp_path / "to-read").open()
    assert caught.value.filename == str(tmp_path / "to-read")


def test_output_that_has_no_room_is_named():
    with FULL.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "headrace.cli.main", "plan", "fit", "smollm2-135m"],
            stdout=out,
            stderr=subprocess.PIPE,
        )
    assert done.stderr.decode() == "headrace: standard output: No space left on device\n"
    assert done.returncode == 1
