"""Measured points: a table of runs whose columns are split, on reading, into what is given and what was measured.

`Point.inputs` is built from the input columns alone; answers are kept apart in `Point.answers` and reach only the scoring.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.base.errors import HeadraceError, InvalidInput
from headrace.plan.deployment import Inputs, resolve
from headrace.spec import engine_facts, hardware, models
from headrace.spec.campaign import Run, campaign_of
from headrace.spec.model import LatentAttention, MoE

REQUIRED_COLUMNS = ("kind", "model", "gpu")
"""Columns that a file must have; the cells of others are empty where the file has no such column."""
INPUT_COLUMNS = (
    "id",
    "kind",
    "quality",
    "model",
    "gpu",
    "n_gpus",
    "tp",
    "pp",
    "dp",
    "ep",
    "engine",
    "engine_version",
    "weight_dtype",
    "kv_dtype",
    "gpu_mem_util",
    "max_model_len",
    "max_num_batched_tokens",
    "isl",
    "osl",
    "concurrency",
    "extra_input",
)
ANSWER_COLUMNS = (
    "fits",
    "weights_gib_per_gpu",
    "activation_peak_gib",
    "non_torch_gib",
    "cuda_graph_gib",
    "kv_avail_gib_per_gpu",
    "kv_tokens_reported",
    "gpu_blocks",
    "max_concurrency_x",
    "metric",
    "value",
    "ttft_ms",
    "tpot_ms",
)

UNSTATED_CONTEXT = 2048
"""A run whose longest context is not stated counts as fitting when a request of this many tokens does."""


class Answers(msgspec.Struct, frozen=True):
    """What was measured. Never passed to a prediction."""

    fits: bool | None = None
    weights_gib: float | None = None
    kv_gib: float | None = None
    kv_tokens: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    output_tps_per_gpu: float | None = None


class Point(msgspec.Struct, frozen=True):
    """One measured run. `unknown_model`/`unknown_gpu` say why it cannot be predicted (empty: it can); `unreadable` names the
    input cell that could not be read, and then `inputs` holds no more than the names."""

    id: str
    kind: str
    family: str
    inputs: Inputs
    context: int
    answers: Answers
    unknown_model: str = ""
    unknown_gpu: str = ""
    unreadable: str = ""


def read_points(path: Path) -> list[Point]:
    """All points of a file; `InvalidInput` names a missing column. A cell that cannot be read spoils only its row.

    Columns may stand in any order and between others, separated by commas, semicolons or tabs.
    """
    try:
        text = path.read_text(encoding="utf-8-sig").lstrip("\n")
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", field="points") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path.name} is not UTF-8 text: {error.reason}", field="points") from None
    head = text.partition("\n")[0]
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count))
    try:
        rows.fieldnames = [name.strip().lower() for name in rows.fieldnames or ()]
        listed = list(rows)
    except csv.Error as error:
        raise InvalidInput(
            f"{path.name} cannot be read as a table, at line {rows.line_num}: {error}",
            field="points",
            remedy="give a file of comma-separated values, with every quotation mark closed",
        ) from None
    missing = [name for name in REQUIRED_COLUMNS if name not in rows.fieldnames]
    if missing:
        raise InvalidInput(f"{path.name} has no column {missing[0]!r}", field=missing[0])
    points = []
    for number, row in enumerate(listed, start=2):
        given = {name: (row.get(name) or "").strip() for name in INPUT_COLUMNS}
        given["id"] = given["id"] or f"row {number}"
        measured = {name: (row.get(name) or "").strip() for name in ANSWER_COLUMNS}
        points.append(_point(given, measured))
    return points


def _point(given: Mapping[str, str], measured: Mapping[str, str]) -> Point:
    unreadable, block_tokens = "", 16
    try:
        inputs = inputs_of(given)
        block_tokens = inputs.block_tokens or block_tokens
    except InvalidInput as error:
        inputs = Inputs(model=given["model"], gpu=given["gpu"], engine=_engine(given["engine"]))
        unreadable = str(error)
    known = models.known(given["model"])
    try:
        hardware.find(given["gpu"])
        unknown_gpu = ""
    except InvalidInput:
        unknown_gpu = given["gpu"]
    return Point(
        id=given["id"],
        kind=given["kind"],
        family=known.family if known else "unknown",
        inputs=inputs,
        context=inputs.max_model_len or UNSTATED_CONTEXT,
        answers=_answers(measured, block_tokens),
        unknown_model="" if known else given["model"],
        unknown_gpu=unknown_gpu,
        unreadable=unreadable,
    )


def inputs_of(given: Mapping[str, str]) -> Inputs:
    """The question a row asks, from its input columns only."""
    cells = {**given, **_extra(given["extra_input"])}

    def integer(name: str) -> int | None:
        return _integer(cells, name)

    tp, pp = integer("tp") or None, integer("pp") or 1
    dp, ep = integer("dp") or 1, integer("ep") or 1
    n_gpus = _gpus(integer("n_gpus"), tp or 1, pp, dp, ep)
    if tp is None and n_gpus > 1 and dp == 1 and _spreads(given["model"]):
        # Experts over all GPUs and attention replicated is how such models are deployed when no TP is named.
        tp, dp, ep = 1, n_gpus, n_gpus
    fraction = re.search(r"\d*\.\d+|\d+", given["gpu_mem_util"])
    share = float(fraction[0]) if fraction else None
    version = given["engine_version"]
    if not version and (named := re.search(r"\d+\.\d+\.\d+", given["engine"])):
        version = named[0]
    engine = _engine(given["engine"])
    stated = Inputs(
        model=given["model"],
        gpu=given["gpu"],
        n_gpus=n_gpus,
        tp=tp if tp is not None else max(1, n_gpus // (dp * pp)),
        pp=pp,
        dp=dp,
        ep=ep,
        engine=engine,
        engine_version=version,
        weights=_format(given["weight_dtype"]),
        kv=_format(given["kv_dtype"]),
        memory_fraction=share / 100 if share is not None and share > 1 else share,
        max_model_len=integer("max_model_len"),
        max_batched_tokens=integer("max_num_batched_tokens"),
        max_num_seqs=integer("max_num_seqs"),
        block_tokens=integer("block_tokens"),
        isl=integer("isl"),
        osl=integer("osl"),
        concurrency=integer("concurrency"),
        concurrency_scope="unstated",
        draft_tokens=integer("mtp_draft_tokens") or 0,
        eager="enforce_eager" in cells,
        chunked_prefill=cells.get("chunked_prefill") != "off",
        mixed_chunk="enable_mixed_chunk" in cells and "sglang" in engine.lower(),
    )
    return _as_launched(stated)


def _as_launched(stated: Inputs) -> Inputs:
    """The question with the settings that the campaign's own scripts have for such a run (`spec.campaign`), which rows leave out."""
    if stated.isl is None or stated.osl is None or stated.concurrency is None:
        return stated
    try:
        d = resolve(stated)
    except HeadraceError:  # the prediction will say so
        return stated
    run = Run(
        model=d.model.id,
        engine=d.engine,
        version=stated.engine_version,
        gpu=d.gpu.id,
        generation=d.gpu.generation,
        weights=d.weights,
        tp=d.layout.tp,
        isl=stated.isl,
        osl=stated.osl,
        concurrency=stated.concurrency,
    )
    campaign = campaign_of(run)
    return msgspec.structs.replace(
        stated,
        equal_lengths=campaign.shortest == 1.0,
        shortest=campaign.shortest,
        concurrency_scope="server" if campaign.per_server else "unstated",
        **campaign.settings(run),
    )


def _format(cell: str) -> str:
    """A precision as it is written; "auto" for a cell that names none."""
    return "auto" if re.fullmatch(r"[-\u2013?]*|n/?a|none|null|nan|unknown|default", cell, re.IGNORECASE) else cell


def _gpus(stated: int | None, tp: int, pp: int, dp: int, ep: int) -> int:
    """GPUs of a row: those stated, or those that one instance takes where none or too few are."""
    inside = tp % dp == 0  # attention replicas may be counted inside tp
    instance = max(tp if inside and stated is not None and tp * pp <= stated else tp * dp, ep) * pp
    return max(stated or 0, instance)


def _engine(cell: str) -> str:
    """The engine that computes: Dynamo puts a router before another one. A row that names none, or one of which nothing is known
    here, is taken for vLLM."""
    named = re.sub(r"^(?:nvidia[-_ ])?dynamo[-_ /]+(?=\w)", "", cell, flags=re.IGNORECASE)
    try:
        return named if "memory" in engine_facts.find(named).sections else "vllm"
    except InvalidInput:
        return "vllm"


def _spreads(model: str) -> bool:
    from headrace.plan.deployment import find_model

    if models.known(model) is None:
        return False
    layers = find_model(model).spec.layers
    return any(isinstance(x.mlp, MoE) for x in layers) and any(isinstance(x.mixer, LatentAttention) for x in layers)


def _extra(cell: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in cell.split(";") if part.strip())
    return {key.strip(): value.strip() for key, _, value in pairs}


_CELL = re.compile(
    r"(?:tp|pp|dp|ep|x|~)?\s*(\d+(?:\.\d*)?|\.\d+)(?:\s*(k)|e(\d))?\s*%?\s*(?:\([^()]*\))?", re.IGNORECASE
)
"""A number as people write it: `8.0`, `tp8`, `32k` (of 1024), `1e3`, `3,500`, `90%`, with a remark in parentheses or none."""


def _number(cells: Mapping[str, str], name: str) -> float | None:
    """What the cell says; None where it is empty or only says that nothing was set (`auto`, `default`, `max`)."""
    cell = cells.get(name, "").strip()
    if not re.search(r"\d", cell) and cell.lower() not in ("yes", "true", "on"):
        return None
    match = _CELL.fullmatch(re.sub(r"(?<=\d),(?=\d{3}\b)", "", cell))
    if match is None:
        raise InvalidInput(f"row {cells['id']}: {name} must be a number, got {cell!r}", field=name)
    return float(match[1]) * (1024 if match[2] else 10 ** int(match[3] or 0))


def _integer(cells: Mapping[str, str], name: str) -> int | None:
    number = _number(cells, name)
    return None if number is None else int(number)


def _answers(measured: Mapping[str, str], block_tokens: int) -> Answers:
    def number(name: str) -> float | None:
        """A measured value; None for an empty cell and for values that no run has (not a number, zero, negative, infinite)."""
        try:
            value = float(measured[name] or "nan")
        except ValueError:
            return None
        return value if 0 < value < math.inf else None

    tokens = number("kv_tokens_reported")
    if tokens is None and (blocks := number("gpu_blocks")) is not None:
        tokens = blocks * block_tokens
    throughput = number("value") if measured["metric"] == "output_tput_per_gpu" else None
    return Answers(
        fits={"yes": True, "no": False}.get(measured["fits"]),
        weights_gib=number("weights_gib_per_gpu"),
        kv_gib=number("kv_avail_gib_per_gpu"),
        kv_tokens=tokens,
        ttft_ms=number("ttft_ms"),
        tpot_ms=number("tpot_ms"),
        output_tps_per_gpu=throughput,
    )
