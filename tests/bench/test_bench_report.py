"""Every report page is drawn in headless Chromium: all charts appear, nothing is fetched, nothing is cut off at the side."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from headrace.bench import page
from headrace.bench.charts import run_charts
from headrace.bench.compare import SERIES_FILE, Series, compare_runs
from headrace.bench.endpoint import Endpoint
from headrace.bench.records import Outcome, RecordLog, RequestRecord, ServerSample, write_records
from headrace.bench.report import content, write_report
from headrace.bench.run import RunMeta, sum_up
from headrace.bench.series import write_series
from headrace.bench.settings import RunSettings
from headrace.bench.worker import ShareReport

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def make_run(folder: Path, *, seed: int = 0, requests: int = 40, speed: float = 1.0) -> None:
    """A run's folder as if it had been measured, with failures, samples and an objective."""
    source = np.random.default_rng(seed)
    records = []
    for k in range(requests):
        start_s = k * 0.05
        ttft_s = float(source.gamma(8, 0.01)) / speed
        gaps = source.gamma(6, 0.002, 30) / speed
        events = start_s + ttft_s + np.concatenate([[0.0], np.cumsum(gaps)])
        bad = k % 11 == 10
        records.append(
            RequestRecord(
                index=k, intended_s=start_s, sent_s=start_s + 0.001, headers_s=start_s + 0.002, first_byte_s=float(events[0]),
                end_s=float(events[-1]), event_s=events.tolist(), event_tokens=[1.0] * 31, prompt_tokens=100,
                prompt_tokens_declared=100, output_tokens=31, output_tokens_asked=31, http_status=200,
                outcome=Outcome.CUT if bad else Outcome.OK, error="cut <b>here</b>" if bad else "",
            )
        )  # fmt: skip
    folder.mkdir(parents=True)
    write_records(folder / "records.jsonl", records)
    with RecordLog(folder / "samples.jsonl") as log:
        for k in range(20):
            log.append(ServerSample(at_s=k * 0.1, running=k % 5, waiting=k % 3, kv_usage=k / 40))
    settings = RunSettings(
        endpoint=Endpoint("http://x", "a-model"),
        workload="random",
        slo="ttft_p99<90ms,itl_p99<30ms",
        usd_per_hour=2.0,
        max_failures=0.5,
    )
    (folder / "run.json").write_bytes(page_bytes(RunMeta(settings=settings, created="2026-01-01", host={"cores": "2"})))
    sum_up(folder, ShareReport(0, 0, 0, False), engine="vllm")


def page_bytes(meta: RunMeta) -> bytes:
    import msgspec

    return msgspec.json.encode(meta)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of every kind of report."""
    root = tmp_path_factory.mktemp("pages")
    make_run(root / "run")
    sweep = Series(
        kind="sweep",
        title="random against rate",
        x_name="rate",
        facts={"slo": "ttft_p99<90ms", "max_rate_rps": 4.0, "fails_at_rps": 8.0},
    )
    for rate in (1, 2, 4, 8):
        make_run(root / "sweep" / f"rate-{rate}", seed=rate, speed=2.0 / rate**0.5)
        sweep.runs.append({"folder": f"rate-{rate}", "label": str(rate), "x": float(rate)})
    write_series(root / "sweep", sweep)
    repeats = Series(kind="repeats", title="2 repeats")
    for k in (1, 2):
        make_run(root / "repeats" / f"run-{k}", seed=k)
        repeats.runs.append({"folder": f"run-{k}", "label": f"run {k}", "x": None})
    write_series(root / "repeats", repeats)
    (root / "repeats" / "summary.json").write_bytes((root / "repeats" / "run-1" / "summary.json").read_bytes())
    for side in "ab":
        for k in range(1, 5):
            make_run(root / "ab" / f"{side}-{k}", seed=k + 10 * (side == "b"), speed=1.3 if side == "b" else 1.0)
    runs = [[root / "ab" / f"{side}-{k}" for k in range(1, 5)] for side in "ab"]
    found = compare_runs(*runs, "engine one", "engine two", margin=0.05, interleaved=True)
    import msgspec

    (root / "ab" / "comparison.json").write_bytes(msgspec.json.encode(found))
    assert (root / "sweep" / SERIES_FILE).exists()
    kinds = ("run", "sweep", "repeats", "ab")
    return {kind: write_report(root / kind) for kind in kinds}


@pytest.mark.parametrize("kind", ["run", "sweep", "repeats", "ab"])
def test_pages_are_self_contained_and_escaped(pages: dict[str, Path], kind: str) -> None:
    text = pages[kind].read_text()
    body = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert not re.search(r'(src|href)\s*=\s*"', body)
    assert "@import" not in body
    assert "<b>here</b>" not in body
    if kind == "run":
        assert "cut &lt;b&gt;here&lt;/b&gt;" in body
        assert "missed" in body
    assert len(content(pages[kind].parent)[3]) >= 2


def browser(*arguments: str, tmp: Path) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
    ]
    flags += ["--disable-sync", "--hide-scrollbars", f"--user-data-dir={tmp}", "--virtual-time-budget=10000"]
    return subprocess.run([CHROMIUM, *flags, *arguments], capture_output=True, text=True, timeout=120)


@needs_browser
@pytest.mark.browser
@pytest.mark.parametrize("kind", ["run", "sweep", "repeats", "ab"])
def test_every_chart_is_drawn(pages: dict[str, Path], kind: str, tmp_path: Path) -> None:
    charts = content(pages[kind].parent)[3]
    # Offline by force: any host name leads nowhere.
    done = browser(
        "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", pages[kind].as_uri(), tmp=tmp_path / "profile"
    )
    dom = done.stdout
    assert f'data-drawn="{len(charts)}"' in dom, dom[-500:]
    assert "data-failed" not in dom.split("<script>")[0]
    for chart in charts:
        place = dom.split(f'id="chart-{chart.name}"', 1)[1][:20_000]
        assert "<svg" in place
        assert "mark-" in place, f"{chart.name} has no marks"


@needs_browser
@pytest.mark.browser
@pytest.mark.parametrize(
    ("kind", "width"), [("run", 1280), ("sweep", 1280), ("repeats", 1280), ("ab", 1280), ("run", 500)]
)
def test_screenshots_show_something(pages: dict[str, Path], kind: str, width: int, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    browser(f"--window-size={width},2400", f"--screenshot={shot}", pages[kind].as_uri(), tmp=tmp_path / "profile")
    data = shot.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (width, 2400)
    assert len(data) > 60_000, "a page of charts does not compress to almost nothing"


def test_charts_as_png(tmp_path: Path) -> None:
    make_run(tmp_path / "r")
    charts = content(tmp_path / "r")[3]
    for path in page.write_pngs(tmp_path / "png", charts[:2]):
        assert path.read_bytes()[:4] == b"\x89PNG"


def test_a_run_of_failures_only_has_a_page(tmp_path: Path) -> None:
    records = [RequestRecord(index=0, intended_s=0.0, end_s=1.0, outcome=Outcome.REFUSED, error="no")]
    assert [chart.name for chart in run_charts(records, [], None)] == ["timeline"]
