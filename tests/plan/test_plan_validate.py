"""The planner against measured points: no answer is read, every row is answered, errors and intervals are as reported."""

import csv
import inspect
import random
from pathlib import Path

import msgspec
import pytest

from headrace.base.errors import InvalidInput
from headrace.plan.calibration import CalibrationSet, key_of, shipped
from headrace.plan.deployment import Inputs, resolve
from headrace.plan.perf import predict
from headrace.plan.points import ANSWER_COLUMNS, INPUT_COLUMNS, read_points
from headrace.plan.validate import predict_point, validate

POINTS = Path(__file__).parent / "data" / "validation_points.csv"


@pytest.fixture(scope="module")
def points():
    return read_points(POINTS)


@pytest.fixture(scope="module")
def scores(points):
    return validate(points)


def test_memory_is_right(scores):
    memory = scores["memory"]
    assert memory["answered"] == memory["n"] >= 15
    assert memory["median_error"] <= 0.02
    assert memory["wrong_fit"] == 0
    assert memory["by_quantity"]["weights"]["max_error"] <= 0.01


def test_every_row_with_a_known_model_and_gpu_is_answered(scores):
    for metric in ("ttft", "tpot", "throughput"):
        assert scores[metric]["answered"] == scores[metric]["n"] > 0
    assert scores["unanswered"] == []


def test_models_with_more_than_five_rows_are_known(points):
    rows = {}
    for p in points:
        rows[p.inputs.model] = rows.get(p.inputs.model, 0) + 1
    unknown = {p.unknown_model for p in points}
    assert not [m for m, n in rows.items() if n > 5 and m in unknown]


def test_intervals_cover_what_they_claim(scores):
    for metric in ("ttft", "tpot"):
        assert 0.85 <= scores[metric]["coverage90"] <= 0.95


def test_errors_are_no_worse_than_reported(scores):
    # Cross-validated by family; docs/planner.md says which families miss the targets.
    assert scores["tpot"]["mape"] < 0.20
    assert scores["tpot"]["median"] < 0.15
    assert scores["ttft"]["mape"] < 0.35
    assert scores["cross_validated_rows"] > 300


def test_no_prediction_reads_an_answer(tmp_path):
    rows = list(csv.DictReader(POINTS.read_text().splitlines()))
    shuffled = [dict(r) for r in rows]
    draw = random.Random(7)
    for column in (*ANSWER_COLUMNS, "comment"):
        values = [r[column] for r in rows]
        draw.shuffle(values)
        for r, value in zip(shuffled, values, strict=True):
            r[column] = value
    other = tmp_path / "permuted.csv"
    with other.open("w", newline="") as out:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(shuffled)
    first, second = read_points(POINTS), read_points(other)
    assert [p.answers for p in first] != [p.answers for p in second]
    step = 7  # every seventh row is enough to see a leak, and quick
    for a, b in list(zip(first, second, strict=True))[::step]:
        assert a.inputs == b.inputs
        assert a.context == b.context
        if not a.unknown_model and not a.unknown_gpu:
            assert predict_point(a.kind, a.inputs, a.context) == predict_point(b.kind, b.inputs, b.context)


def test_predictions_take_inputs_only():
    names = list(inspect.signature(predict_point).parameters)
    assert names == ["kind", "inputs", "context", "calibration"]
    fields = set(Inputs.__struct_fields__)
    assert not fields & set(ANSWER_COLUMNS)
    assert not set(INPUT_COLUMNS) & set(ANSWER_COLUMNS)
    assert "comment" not in INPUT_COLUMNS


def test_a_row_of_the_calibration_is_scored_without_its_family(points):
    calibration = shipped()
    point = next(p for p in points if p.kind == "perf" and p.answers.tpot_ms)
    assert calibration.rows[key_of(resolve(point.inputs))] == point.family
    for family, fold in calibration.folds.items():
        assert not [g for g in fold.calibration.effects if g.startswith(f"{family}|")]
        assert not [c for c in fold.calibration.runs if c.startswith(f"{family}|")]
    blind = predict_point("perf", point.inputs, 1, calibration)
    seeing = predict_point("perf", point.inputs, 1, msgspec.structs.replace(calibration, rows={}))
    assert blind.tpot_ms != seeing.tpot_ms


def test_a_row_of_the_calibration_is_known_by_what_it_names(points):
    change = msgspec.structs.replace
    point = next(p for p in points if p.inputs.model == "meta-llama/Llama-3.1-8B-Instruct" and p.answers.tpot_ms)
    asked = point.inputs
    spelt = change(
        asked,
        model="llama-3.1-8b",
        gpu=resolve(asked).gpu.id,
        engine=resolve(asked).engine,
        engine_version=f"v{asked.engine_version}",
        weights=resolve(asked).weights,
        memory_fraction=0.8,
    )
    assert spelt != asked
    assert key_of(resolve(spelt)) == key_of(resolve(asked)) in shipped().rows
    assert predict_point("perf", change(spelt, memory_fraction=None), 1) == predict_point("perf", asked, 1)
    new = {key_of(resolve(change(asked, **other))) for other in ({"isl": 999}, {"concurrency": 7}, {"engine": "vllm"})}
    assert not new & shipped().rows.keys()
    # What somebody plans for oneself is no published run: it profits from all that was measured.
    assert key_of(resolve(change(asked, concurrency_scope="instance"))) not in shipped().rows


def test_the_shipped_calibration_knows_its_rows(points):
    used = [p for p in points if p.kind == "perf" and not (p.unknown_model or p.unknown_gpu or p.unreadable)]
    assert {key_of(resolve(p.inputs)): p.family for p in used} == shipped().rows


def test_unknown_models_are_listed_not_counted(points):
    scored = validate([p for p in points if p.kind == "memory"])
    assert "Qwen3.8-27B FP8" in scored["unknown_models"]
    assert scored["memory"]["n"] + scored["unknown_rows"] == sum(p.kind == "memory" for p in points)


def test_a_file_without_a_column_is_refused(tmp_path):
    broken = tmp_path / "broken.csv"
    broken.write_text("id,kind,gpu\n1,perf,H100\n")
    with pytest.raises(InvalidInput) as caught:
        read_points(broken)
    assert caught.value.field == "model"
    with pytest.raises(InvalidInput, match="cannot read"):
        read_points(tmp_path / "nowhere.csv")
    broken.write_text('id,kind,model,gpu\n1,perf,llama-3.1-8b,"H100\n' + "2,perf,llama-3.1-8b,H100\n" * 8000)
    with pytest.raises(InvalidInput, match=r"broken\.csv cannot be read as a table, at line \d+") as caught:
        read_points(broken)
    assert caught.value.remedy


@pytest.mark.parametrize("form", ["crlf", "bom", "order", "extra", "semicolons", "tabs", "capitals", "breaks", "gap"])
def test_how_a_file_is_written_does_not_matter(tmp_path, points, form):
    rows = list(csv.DictReader(POINTS.read_text(encoding="utf-8").splitlines()))
    columns = list(rows[0])
    if form == "order":
        random.Random(1).shuffle(columns)
    if form == "extra":
        columns = ["remark", *columns, "zone"]
        rows = [{**row, "remark": 'several\nlines, and "quotes"', "zone": "a"} for row in rows]
    if form == "breaks":
        rows = [{**row, "comment": "a\u2028b\x0cc\nd"} for row in rows]
    path = tmp_path / "points.csv"
    with path.open("w", encoding="utf-8-sig" if form == "bom" else "utf-8", newline="") as file:
        file.write("\n\n" if form == "gap" else "")
        writer = csv.DictWriter(
            file,
            columns,
            lineterminator="\r\n" if form == "crlf" else "\n",
            delimiter={"semicolons": ";", "tabs": "\t"}.get(form, ","),
        )
        writer.writerow({name: f" {name.upper()}" if form == "capitals" else name for name in columns})
        writer.writerows(rows)
    assert read_points(path) == points


@pytest.mark.parametrize(
    ("cell", "engine"),
    [
        ("", "vllm"),
        ("Lvllm (vLLM fork)", "vllm"),
        ("TGI", "vllm"),
        ("dynamo", "vllm"),
        ("dynamo-sglang", "sglang"),
        ("vLLM ROCm", "vllm"),
        ("TensorRT-LLM 1.0", "tensorrt-llm"),
    ],
)
def test_a_row_of_any_engine_is_answered(tmp_path, cell, engine):
    path = tmp_path / "points.csv"
    path.write_text(f"kind,model,gpu,tp,engine,isl,osl,concurrency,ttft_ms\nperf,qwen3-8b,H100,0,{cell},512,64,4,80\n")
    (point,) = read_points(path)
    assert resolve(point.inputs).engine == engine
    assert validate([point])["ttft"]["answered"] == 1


def test_an_answer_that_is_no_measurement_is_an_empty_cell(tmp_path):
    path = tmp_path / "points.csv"
    cells = ["0", "nan", "inf", "-5", "1e400", "12 ms", ""]
    head = "kind,model,gpu,isl,osl,concurrency,ttft_ms,tpot_ms,weights_gib_per_gpu,metric,value"
    runs = [f"perf,llama-3.1-8b,H100,512,64,4,{c},8.5,,output_tput_per_gpu,{c}" for c in cells]
    sizes = [f"memory,llama-3.1-8b,H100,,,,,,{c},," for c in cells]
    path.write_text("\n".join([head, *runs, *sizes, ""]))
    scored = validate(read_points(path))
    assert (scored["ttft"]["n"], scored["throughput"]["n"], scored["tpot"]["n"]) == (0, 0, len(cells))
    assert scored["memory"]["by_quantity"]["weights"]["n"] == 0
    assert scored["unanswered"] == []


def test_columns_that_are_not_there_are_empty_cells(tmp_path):
    path = tmp_path / "points.csv"
    path.write_text("model,gpu,kind,fits\nllama-3.1-8b,H100,memory,yes\nllama-3.1-8b,abacus,memory,yes\nllama-9,H100\n")
    first, second, third = read_points(path)
    assert (first.id, first.inputs.engine, first.inputs.n_gpus, first.answers.fits) == ("row 2", "vllm", 1, True)
    scored = validate([first, second, third])
    assert (scored["memory"]["n"], scored["memory"]["answered"], scored["memory"]["wrong_fit"]) == (1, 1, 0)
    assert (scored["unknown_models"], scored["unknown_gpus"]) == (["llama-9"], ["abacus"])


def test_the_fit_uses_the_efficiencies_that_predictions_use():
    from dataclasses import asdict

    import numpy as np

    from headrace.plan import fitting
    from headrace.plan.costs.roofline import efficiency

    t = fitting.table(read_points(POINTS)[:80])
    assert len(t) > 20
    names = fitting._names(t)
    values = np.random.default_rng(3).normal(0, 0.3, len(names))
    fast, _ = fitting._efficiencies(t, fitting._design(t, names), values)
    for point in (0, len(t) // 2, len(t) - 1):
        slow = efficiency(dict(zip(names, values, strict=True)), *t.keys[t.key_of[point]])
        assert {n: v[point] for n, v in asdict(fast).items()} == pytest.approx(asdict(slow))


def test_the_fit_has_the_right_slopes():
    import numpy as np
    from scipy.optimize import approx_fprime

    from headrace.plan import fitting
    from headrace.plan.costs.roofline import BASE

    t = fitting.table(read_points(POINTS)[:60])
    names = fitting._names(t)
    design = fitting._design(t, names)
    x = np.random.default_rng(5).normal(0, 0.3, len(names))

    def reached(z):
        e, _ = fitting._efficiencies(t, design, z)
        return np.log(np.stack([getattr(e, name) for name in BASE])).ravel()

    _, slope = fitting._efficiencies(t, design, x)
    exact = slope[:, :, None] * design[:, t.key_of]
    assert np.allclose(approx_fprime(x, reached, 1e-6), exact.reshape(-1, len(names)), atol=1e-4)


def test_kernels_are_counted_from_a_plain_layer():
    from headrace.plan.costs.work import rank_model
    from headrace.plan.deployment import resolve

    def launches(model, weights):
        m = rank_model(resolve(Inputs(model=model, gpu="h100-sxm-80", weights=weights)))
        return m.launches / m.layers

    assert launches("llama-3.1-8b", "bf16") == 1.0
    assert launches("llama-3.1-8b", "fp8") == pytest.approx(1.4)
    assert launches("qwen3-32b", "bf16") == pytest.approx(1.1)
    assert launches("deepseek-v2-lite", "bf16") == pytest.approx(1.5)


def test_the_calibration_survives_a_round_trip(tmp_path):
    from headrace.plan.calibration import write

    write(shipped(), tmp_path / "calibration.json")
    assert msgspec.json.decode((tmp_path / "calibration.json").read_bytes(), type=CalibrationSet) == shipped()


def test_the_documented_errors_are_the_generated_ones(scores):
    from headrace.plan.validate import error_table

    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    shown = page.split("<!-- generated: errors -->\n")[1].split("\n<!-- end -->")[0]
    assert shown.strip() == error_table(scores).strip()


def test_cells_as_people_write_them_and_one_that_cannot_be_read(tmp_path):
    rows = list(csv.DictReader(POINTS.read_text().splitlines()))
    plain = next(r for r in rows if r["kind"] == "perf" and r["ttft_ms"] and r["tp"] == "1")
    written = plain | {"n_gpus": "", "tp": "tp2", "isl": "1k", "gpu_mem_util": "90% (default)", "max_model_len": "auto"}
    commas = plain | {"isl": "3,500", "weight_dtype": "n/a", "kv_dtype": "-", "n_gpus": "x8"}
    routed = plain | {"engine": "dynamo-" + plain["engine"], "extra_input": "max_num_seqs=256 (default)"}
    spoilt = plain | {"isl": "1000-2000"}
    path = tmp_path / "written.csv"
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, fieldnames=list(plain))
        writer.writeheader()
        writer.writerows([written, routed, spoilt, commas])
    points = read_points(path)
    first = points[0].inputs
    assert (first.n_gpus, first.tp, first.isl, first.memory_fraction, first.max_model_len) == (2, 2, 1024, 0.9, None)
    assert (points[1].inputs.engine, points[1].inputs.max_num_seqs) == (plain["engine"], 256)
    assert points[3].inputs.n_gpus == 8
    assert (points[3].inputs.isl, points[3].inputs.weights, points[3].inputs.kv) == (3500, "auto", "auto")
    scored = validate(points)
    assert (scored["ttft"]["n"], scored["ttft"]["answered"]) == (4, 3)
    assert [u["id"] for u in scored["unanswered"]] == [spoilt["id"]]
    assert "isl must be a number, got '1000-2000'" in scored["unanswered"][0]["error"]


@pytest.mark.parametrize(
    ("model", "version", "isl", "osl", "extra", "marches"),
    [
        ("qwen3-32b", "0.5.1.post1", 2048, 128, "", True),
        ("qwen3-32b", "v0.5.2", 1000, 100, "", True),
        ("qwen3-32b", "0.5.1.post1", 2048, 128, "enable_mixed_chunk", False),
        ("qwen3-32b", "0.5.6.post2", 2048, 128, "", False),
        ("qwen3-32b", "nightly-dev", 2048, 128, "", False),
        ("qwen3-32b", "0.5.1", 1024, 8192, "", True),
        ("llama-3.1-70b", "0.5.1", 1024, 8192, "", False),
    ],
)
def test_campaigns_say_whether_requests_march_in_step(tmp_path, model, version, isl, osl, extra, marches):
    """By how aiconfigurator's launch templates of these versions start SGLang; InferenceX draws lengths, of the models that it runs."""
    from headrace.plan.workload import traffic

    path = tmp_path / "points.csv"
    path.write_text(
        "kind,model,gpu,tp,n_gpus,engine,engine_version,isl,osl,concurrency,extra_input\n"
        f"perf,{model},h100_sxm,2,2,sglang,{version},{isl},{osl},16,{extra}\n"
    )
    (point,) = read_points(path)
    assert traffic(resolve(point.inputs)).loop.marching == marches


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ("llama-3.1-70b,h200_sxm,4,trtllm,,fp8,1024,1024,32", {"batch_wait_steps": 20, "batch_wait_share": 0.9}),
        ("llama-3.1-70b,h200_sxm,8,trtllm,,fp8,1024,1024,32", {}),
        ("llama-3.1-70b,h200_sxm,4,trtllm,,fp8,1024,8192,32", {}),
        ("llama-3.1-70b,h200_sxm,4,vllm,,fp8,1024,1024,32", {}),
        ("deepseek-r1,b200_sxm,8,sglang,0.5.9,fp8,8192,1024,16", {"poll_steps": 30}),
        ("deepseek-r1,b200_sxm,8,sglang,0.5.9,fp8,8192,1024,4", {"poll_steps": 10}),
        ("deepseek-r1,h200_sxm,8,sglang,0.5.9,fp8,8192,1024,16", {}),
        ("deepseek-r1,b200_sxm,8,sglang,0.5.9,fp8,4000,1000,16", {}),
        ("qwen3.5-397b-a17b,b300_sxm,8,sglang,0.5.9,fp8,1024,1024,64", {"poll_steps": 10}),
        ("llama-3.1-70b,h200_sxm,4,trtllm,,fp8,1024,1024,", {}),
    ],
)
def test_rows_are_asked_as_their_campaign_launches_them(tmp_path, row, settings):
    """By InferenceX's own scripts, in which a concurrency is that of one server; a queue that never empties is no run of theirs."""
    path = tmp_path / "points.csv"
    path.write_text("kind,model,gpu,tp,engine,engine_version,weight_dtype,isl,osl,concurrency\n" + f"perf,{row}\n")
    (point,) = read_points(path)
    plain = {"batch_wait_steps": 0, "batch_wait_share": 0.0, "poll_steps": 1}
    assert {name: getattr(point.inputs, name) for name in plain} == plain | settings
    theirs = point.inputs.concurrency is not None and point.inputs.isl in (1024, 8192)
    assert point.inputs.concurrency_scope == ("server" if theirs else "unstated")
    assert key_of(resolve(point.inputs)) != key_of(
        resolve(msgspec.structs.replace(point.inputs, concurrency_scope="instance"))
    )


def test_the_runs_bear_out_which_versions_march(points):
    """The launch templates draw the line between versions; runs of two of them are each further away on the other side."""
    calibration = shipped()
    errors = {}
    for p in points:
        if p.inputs.engine != "sglang" or not p.inputs.equal_lengths or not p.answers.ttft_ms:
            continue
        fold = calibration.folds[calibration.rows[key_of(resolve(p.inputs))]]
        for mixed in (True, False):
            asked = resolve(msgspec.structs.replace(p.inputs, mixed_chunk=mixed))
            found = predict(asked, fold.calibration, fold.tier, "fitted").ttft_ms.value
            key = (p.inputs.engine_version, mixed == p.inputs.mixed_chunk)
            errors.setdefault(key, []).append(abs(found / p.answers.ttft_ms - 1))
    mean = {key: sum(e) / len(e) for key, e in errors.items()}
    versions = {version for version, _ in mean}
    assert versions == {"0.5.1.post1", "0.5.6.post2"}
    for version in versions:
        assert 2 * mean[version, True] < mean[version, False]
