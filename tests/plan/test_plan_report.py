"""Pictures and the report: every chart is drawn, and the page needs nothing from outside."""

import re
import xml.etree.ElementTree as ET

import msgspec
import pytest

from headrace.plan import charts
from headrace.plan.deployment import Inputs
from headrace.plan.fit import fit
from headrace.plan.report import write_report
from headrace.plan.search import rank
from headrace.spec.prediction import readable

INPUTS = Inputs(model="llama-3.1-8b", gpu="h100-sxm-80", isl=1024, osl=256, concurrency=16)
NAMES = ("memory", "kv", "load", "roofline", "pareto", "sensitivity")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(INPUTS, folder / "out.html", pictures=folder / "pictures")
    return folder


def test_the_report_opens_offline(written):
    page = (written / "out.html").read_text()
    outside = re.findall(r"(?:src|href)=[\"']?(https?:[^\"' >]+)", page)
    assert outside == []
    assert "<script" not in page
    assert "@import" not in page
    assert page.count("<svg") == len(NAMES)


def test_the_report_says_how_sure_it_is(written):
    page = (written / "out.html").read_text()
    assert "90 % interval" in page
    assert "fitted" in page
    assert "rejected" in page


def test_deployments_of_the_ranking_can_be_told_apart(written):
    page = (written / "out.html").read_text()
    best = re.findall(r"<tr><td>(\d+ x [^<]*)</td>", page)
    assert best
    assert all(re.fullmatch(r"\d x \S+ tp\d.*, \w+, KV \w+", name) for name in best)
    assert len(set(best)) == len(best)


def test_ids_of_the_pictures_do_not_collide(written):
    ids = re.findall(r'\bid="([^"]+)"', (written / "out.html").read_text())
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", NAMES)
def test_each_picture_is_a_file(written, name):
    svg = (written / "pictures" / f"{name}.svg").read_text()
    assert ET.fromstring(svg).tag.endswith("svg")
    assert (written / "pictures" / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_plan_that_does_not_fit_says_so_first(tmp_path, monkeypatch):
    from headrace.plan import report

    monkeypatch.setattr(report, "rank", lambda need: rank_of_one(need))
    write_report(msgspec.structs.replace(INPUTS, model="llama-3.1-70b", gpu="a100-sxm-40"), tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    assert "<b>Does not fit</b>: weights take 141 GB" in page
    assert "Times and dollars are those it would have if it did" in page
    assert not re.search(r">[\d., ]*\de[+-]\d", page[: page.index("<svg")])


@pytest.mark.parametrize(
    ("value", "text"),
    [(14893.2, "14,890"), (72.54, "72.54"), (54, "54"), (0.36371, "0.3637"), (1.5e-5, "0.000015"), (99999, "100,000"), (0, "0")],
)  # fmt: skip
def test_figures_are_readable(value, text):
    assert readable(value) == text


def test_the_memory_bar_adds_up_to_the_card():
    found = fit(INPUTS)
    assert sum(r["gib"] for r in charts.memory_rows(found)) == pytest.approx(found.usable_bytes / 2**30, abs=0.01)


def test_prefill_lies_right_of_the_ridge_and_decode_left():
    roof, marks = charts.roofline_rows(INPUTS)
    by_phase = {m["phase"]: m for m in marks}
    ridge = 989e12 / 3350e9
    assert by_phase["prefill"]["intensity"] > ridge > by_phase["decode"]["intensity"]
    assert max(r["intensity"] for r in roof) > by_phase["prefill"]["intensity"]
    for mark in marks:
        assert mark["tflops"] * 1e12 <= min(989e12, 3350e9 * mark["intensity"])
    assert max(r["tflops"] for r in roof) == pytest.approx(989)


def test_nothing_on_the_pareto_front_is_beaten():
    from headrace.plan.search import Need, rank
    from headrace.spec.workload import preset

    need = Need.from_preset("llama-3.1-8b", preset("code"), gpus=("h100-sxm-80", "l40s-48", "a100-sxm-80"))
    rows = charts.pareto_rows(rank(need))
    front = [r for r in rows if r["front"]]
    assert front
    for r in front:
        assert not [x for x in rows if x["usd"] < r["usd"] and x["tpot"] < r["tpot"]]


def test_the_ranking_of_a_report_takes_the_price_that_was_given(tmp_path, monkeypatch):
    from headrace.plan import report

    asked = []
    monkeypatch.setattr(report, "rank", lambda need: asked.append(need) or rank_of_one(need))
    write_report(msgspec.structs.replace(INPUTS, gpu_price_usd_h=7.0), tmp_path / "out.html")
    assert asked[0].prices == {"h100-sxm-80": 7.0}


def rank_of_one(need):
    return rank(msgspec.structs.replace(need, gpus=("h100-sxm-80",), counts=(1,)))
