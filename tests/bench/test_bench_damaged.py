"""Files of finished runs that were cut, edited or written by something else: one error that names the file, never a fault."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_bench_report import make_run

from headrace.base.errors import InvalidInput
from headrace.bench.compare import compare_folders
from headrace.bench.job import Job, finished_summary, read_job, write_job
from headrace.bench.load_options import LoadOptions
from headrace.bench.report import content

JUNK = (None, True, -1, 1e308, "x", [], {}, [None], {"a": 1}, 2**70)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    return [*([at] if at else []), *(place for key, child in inside for place in places(child, (*at, key)))]


def spoiled(value: Any, rng: random.Random) -> Any:
    """`value` with one key less, or with something else in one place."""
    value = copy.deepcopy(value)
    place = rng.choice(places(value))
    holder = value
    for key in place[:-1]:
        holder = holder[key]
    if isinstance(holder, dict) and rng.random() < 0.3:
        del holder[place[-1]]
    else:
        holder[place[-1]] = rng.choice(JUNK)
    return value


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for number, name in enumerate("ab"):
        make_run(root / name, seed=number, requests=12)
    return root


def test_whole_files_are_read(runs: Path) -> None:
    assert compare_folders(runs / "a", runs / "b", margin=None)["figures"]
    assert content(runs / "a")


@pytest.mark.parametrize("name", ["summary.json", "run.json", "records.jsonl", "samples.jsonl"])
def test_anything_in_any_place_is_read_or_refused(runs: Path, tmp_path: Path, name: str) -> None:
    rng = random.Random(name)
    text = (runs / "a" / name).read_text()
    lines = text.splitlines()
    for number_of_change in range(12):
        if name.endswith("jsonl"):
            number = rng.randrange(len(lines))
            new = "".join(
                (json.dumps(spoiled(json.loads(line), rng)) if k == number else line) + "\n"
                for k, line in enumerate(lines)
            )
        else:
            new = json.dumps(spoiled(json.loads(text), rng))
        shutil.copytree(runs / "a", tmp_path / "a", dirs_exist_ok=True)
        (tmp_path / "a" / name).write_text(new)
        try:
            compare_folders(tmp_path / "a", runs / "b", margin=0.05)
            if number_of_change % 3 == 0:  # drawing takes long
                content(tmp_path / "a")
        except InvalidInput:
            continue


@pytest.mark.parametrize("junk", ["x", [1], {"a": 1}])
def test_a_count_of_cached_tokens_is_read_as_a_number(runs: Path, tmp_path: Path, junk: object) -> None:
    shutil.copytree(runs / "a", tmp_path / "a")
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    summary["tokens"]["cached_undeclared"] = junk
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(InvalidInput, match="cached_undeclared"):
        compare_folders(tmp_path / "a", runs / "b", margin=None)


@pytest.mark.parametrize("name", ["summary.json", "run.json", "series.json", "comparison.json", "ladder.json"])
@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"5", b'{"schema":', b"\xff\xfe{}"])
def test_a_file_that_is_none_is_named(runs: Path, tmp_path: Path, name: str, data: bytes) -> None:
    shutil.copytree(runs / "a", tmp_path / "a")
    (tmp_path / "a" / name).write_bytes(data)
    with pytest.raises(InvalidInput, match=name):
        compare_folders(tmp_path / "a", runs / "b", margin=None) if name == "run.json" else content(tmp_path / "a")


@pytest.mark.parametrize("name", ["summary.json", "run.json"])
def test_what_goes_on_reads_as_carefully(runs: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(runs / "a", tmp_path / "a")
    meta = json.loads((tmp_path / "a" / "run.json").read_text()) | {"finished": True}
    (tmp_path / "a" / "run.json").write_text(json.dumps(meta))
    assert finished_summary(tmp_path / "a")
    (tmp_path / "a" / name).write_text("{")
    with pytest.raises(InvalidInput, match=name):
        finished_summary(tmp_path / "a")


def test_a_command_that_was_edited_is_refused(tmp_path: Path) -> None:
    load = LoadOptions()
    write_job(tmp_path, Job.of("run", load))
    job = json.loads((tmp_path / "job.json").read_text())
    job["load"]["processes"] = "many"
    (tmp_path / "job.json").write_text(json.dumps(job))
    read = read_job(tmp_path)
    assert read is not None
    with pytest.raises(InvalidInput, match=r"job.json.*processes"):
        read.load_options()
