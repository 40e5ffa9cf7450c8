"""Results of other tools: the samples were written by guidellm 0.8.1, aiperf 0.13 and vLLM 0.32's `vllm bench serve`
against the golden server (the last with and without --save-detailed, and with every third request refused)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from headrace.base.errors import InvalidInput
from headrace.bench.compare import compare_folders
from headrace.bench.importers import IMPORTERS, import_results
from headrace.bench.records import Outcome, read_records
from headrace.bench.report import content
from headrace.cli.main import main

DATA = Path(__file__).parent / "data"


def test_guidellm(tmp_path: Path) -> None:
    summary = import_results(DATA / "guidellm.json", tmp_path)
    requests = json.loads((DATA / "guidellm.json").read_text())["benchmarks"][0]["requests"]["successful"]
    records = read_records(tmp_path / "records.jsonl")
    assert summary["requests"]["ok"] == len(records) == len(requests) == 4
    for record, theirs in zip(records, requests, strict=True):
        assert (record.event_s[0] - record.sent_s) * 1e3 == pytest.approx(theirs["time_to_first_token_ms"], abs=0.01)
        gap_s = (record.event_s[-1] - record.event_s[0]) / (len(record.event_s) - 1)
        assert gap_s * 1e3 == pytest.approx(theirs["inter_token_latency_ms"], abs=0.01)
        assert record.output_tokens == theirs["output_tokens"] == 32
        assert record.intended_s <= record.sent_s
    assert summary["ttft_s"]["mean"] >= summary["ttft_raw_s"]["mean"]


def test_aiperf(tmp_path: Path) -> None:
    source = tmp_path / "artifacts"
    source.mkdir()
    shutil.copy(DATA / "aiperf.jsonl", source / "profile_export.jsonl")
    summary = import_results(source, tmp_path / "out")
    lines = [json.loads(line) for line in (DATA / "aiperf.jsonl").read_text().splitlines()]
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert len(records) == len(lines)
    for record, line in zip(records, lines, strict=True):
        metrics = line["metrics"]
        assert (record.event_s[0] - record.sent_s) * 1e3 == pytest.approx(
            metrics["time_to_first_token"]["value"], abs=0.01
        )
        assert len(record.event_s) == len(metrics["inter_chunk_latency"]["value"]) + 1
        assert record.output_tokens == metrics["usage_completion_tokens"]["value"]
    assert summary["valid"]
    assert import_results(DATA / "aiperf.jsonl", tmp_path / "again")["requests"]["ok"] == 4


@pytest.mark.parametrize("name", ["vllm-detailed.json", "vllm-errors.json"])
def test_vllm_own_file_with_single_requests(tmp_path: Path, name: str) -> None:
    theirs = json.loads((DATA / name).read_text())
    summary = import_results(DATA / name, tmp_path)
    records = read_records(tmp_path / "records.jsonl")
    assert len(records) == theirs["num_prompts"]
    assert summary["requests"]["ok"] == theirs["completed"] == 4
    assert summary["requests"]["failed"] == theirs["failed"] == len(summary["failures"])
    for index, record in enumerate(records):
        assert record.prompt_tokens == theirs["input_lens"][index]
        if theirs["errors"][index]:
            assert record.error == "Internal Server Error"
            assert record.outcome is Outcome.STREAM_ERROR
        else:
            assert record.event_s[0] - record.sent_s == pytest.approx(theirs["ttfts"][index], abs=1e-9)
            assert record.event_s[-1] - record.sent_s == pytest.approx(theirs["latencies"][index], abs=2e-3)
            assert record.output_tokens == len(record.event_s) == 12
    for key, statistic, named in (
        ("ttft_s", "mean", "mean_ttft_ms"), ("ttft_s", "p50", "median_ttft_ms"), ("tpot_s", "mean", "mean_tpot_ms"),
        ("itl_s", "mean", "mean_itl_ms"), ("itl_s", "p50", "median_itl_ms"),
    ):  # fmt: skip
        assert summary[key][statistic] * 1e3 == pytest.approx(theirs[named], rel=1e-6)
    assert content(tmp_path)[2]


def test_vllm_own_file_without_them(tmp_path: Path) -> None:
    theirs = json.loads((DATA / "vllm-plain.json").read_text())
    summary = import_results(DATA / "vllm-plain.json", tmp_path)
    assert summary["ttft_s"]["p99"] * 1e3 == pytest.approx(theirs["p99_ttft_ms"])
    assert summary["output_tokens_per_s"]["value"] == theirs["output_throughput"]
    assert (summary["requests"]["ok"], summary["requests"]["failed"]) == (4, 2)
    assert sum(summary["requests"]["by_outcome"].values()) == summary["requests"]["sent"] == 6
    assert any("without intervals" in note for note in summary["notes"])
    assert not (tmp_path / "records.jsonl").exists()


def vllm(detailed: bool) -> dict[str, object]:
    found: dict[str, object] = {
        "model_id": "m", "duration": 2.0, "completed": 2, "failed": 1, "request_throughput": 1.0, "output_throughput": 3.5,
        "mean_ttft_ms": 60.0, "median_ttft_ms": 55.0, "p99_ttft_ms": 90.0, "mean_itl_ms": 10.0, "median_itl_ms": 10.0,
        "p99_itl_ms": 12.0, "mean_tpot_ms": 10.0, "median_tpot_ms": 10.0, "p99_tpot_ms": 11.0,
    }  # fmt: skip
    if detailed:
        found |= {
            "start_times": [5.0, 5.5, 6.0], "ttfts": [0.05, 0.07, 0.0], "itls": [[0.01, 0.01], [0.02, 0.02, 0.02], []],
            "input_lens": [10, 20, 30], "output_lens": [3, 4, 0], "errors": ["", "", "boom"],
        }  # fmt: skip
    return found


def test_vllm_with_single_requests(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(vllm(True)))
    summary = import_results(path, tmp_path / "out")
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert [r.outcome for r in records] == [Outcome.OK, Outcome.OK, Outcome.STREAM_ERROR]
    assert summary["ttft_s"]["mean"] == pytest.approx(0.06)
    assert summary["itl_s"]["count"] == 5
    assert summary["itl_s"]["mean"] == pytest.approx(0.016)


def test_vllm_without_them_keeps_its_own_figures_and_says_so(tmp_path: Path) -> None:
    for name, throughput in (("a", 3.5), ("b", 7.0)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(vllm(False) | {"output_throughput": throughput}))
        summary = import_results(path, tmp_path / name)
        assert summary["ttft_s"] == {"mean": 0.06, "p50": 0.055, "p99": 0.09}
        assert any("without intervals" in note for note in summary["notes"])
        assert content(tmp_path / name)[2]
    found = compare_folders(tmp_path / "a", tmp_path / "b", margin=None)
    assert found["ratio"] == pytest.approx(2.0)
    assert found["verdict"] == "BETTER"
    assert any("assumed" in f["basis"] for f in found["figures"])
    assert not found["same_work"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot read"),
        ("{}", "an unknown format"),
        ('{"benchmarks": [], "metadata": {}}', "0 benchmarks"),
        ('{"benchmarks": [{"requests": {}}], "metadata": {}}', "cannot be read"),
        ('{"output_throughput": 1, "completed": 1}', "cannot be read"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=says):
        import_results(path, tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["guidellm.json", "aiperf.jsonl", "vllm-detailed.json", "vllm-plain.json", "vllm-errors.json"]
)
def test_the_command_shows_what_a_file_has(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "import", str(DATA / name), "--out", str(tmp_path / "out")])
    assert ended.value.code == 0
    assert re.search(r"TTFT +[0-9.]+ ", capsys.readouterr().out)


def test_a_count_that_is_none_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    document = json.loads((DATA / "guidellm.json").read_text())
    document["benchmarks"][0]["requests"]["successful"][0]["cached_tokens"] = {}
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match=r"x\.json looks like a result of guidellm but cannot be read"):
        import_results(tmp_path / "x.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_request_without_times_of_its_tokens_leaves_records_that_are_read(tmp_path: Path) -> None:
    document = json.loads((DATA / "guidellm.json").read_text())
    requests = document["benchmarks"][0]["requests"]
    requests["incomplete"] = [requests["successful"].pop()]
    requests["incomplete"][0]["info"]["timings"]["last_token_iteration"] = None
    (tmp_path / "x.json").write_text(json.dumps(document))
    import_results(tmp_path / "x.json", tmp_path / "out")
    assert [r.outcome for r in read_records(tmp_path / "out" / "records.jsonl")] == [Outcome.OK] * 3 + [Outcome.CUT]


def test_every_importer_says_what_it_reads() -> None:
    assert {name for name, importer in IMPORTERS if importer.what} == {"guidellm", "aiperf", "vllm"}
