"""The ladder: steps change one thing each, absent rungs are listed, the figures come from the runs below."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from headrace.base.errors import InvalidInput
from headrace.bench import quality_probe
from headrace.bench.golden import GoldenScript, GoldenServer
from headrace.bench.ladder import LadderSettings, climb
from headrace.bench.report import content
from headrace.bench.run import InvalidRun, Watch
from headrace.bench.rungs import all_rungs, baseline_settings, steps
from headrace.bench.targets import TargetSpec
from headrace.bench.targets._process import RunningTarget, TargetFailed


def test_each_step_changes_one_thing() -> None:
    plain = baseline_settings(all_rungs())
    found = steps(all_rungs())
    below = plain
    for step in found:
        for candidate in step.candidates:
            if step.stack == "alone":
                assert len({k for k in candidate if candidate[k] != plain.get(k)}) == 1
        if step.stack == "stacked":
            changed = {k for k in step.candidates[0] if step.candidates[0][k] != below.get(k)}
            assert changed == set(step.rung.variants[0])
            below = step.candidates[0]
        elif step.stack == "alone" and not any(s.stack == "stacked" for s in found[: found.index(step)]):
            below = step.candidates[0] if below is plain else below
    assert [s.stack for s in found[:3]] == ["baseline"] * 3
    labels = [s.label for s in found]
    assert labels[:4] == ["naive without KV cache", "naive", "engine", "engine + prefix cache"]
    assert len({s.id for s in found}) == len(found)


def opener(log: list[str]):  # type: ignore[no-untyped-def]
    """Golden servers in place of engines: the more techniques, the faster; no speculation, and fp8 only for the KV."""

    @asynccontextmanager
    async def opened(spec: TargetSpec, model: str, _log: Path) -> AsyncIterator[RunningTarget]:
        log.append(spec.label)
        if "drafter" in spec.settings:
            raise TargetFailed("the engine ended with code 2 before it answered:\nheadrace: unknown drafter 'ngram'")
        if spec.settings.get("kv_precision") == "int8":
            raise TargetFailed("the engine ended with code 2 before it answered:\nheadrace: unknown KV precision")
        slots = 1 if spec.name == "naive" else 0
        script = GoldenScript(
            ttft_ms=8, itl_ms=0.5, slots=slots, prefix_cache=spec.settings.get("prefix_cache") == "on", model=model
        )
        server = GoldenServer(script)
        async with TestServer(server.app) as running:
            yield RunningTarget(
                str(running.make_url("/")).rstrip("/"), model, {"engine": spec.name}, ("POST /reset_prefix_cache",), ""
            )

    return opened


PATIENT = 30.0
"""Seconds that the client may be late: these tests share their cores with others."""

SMALL = LadderSettings(
    model="tiny", users=(1, 4), contexts=(64, 128), own=16, output=4, requests=8, repeats=1, max_client_delay_s=PATIENT
)


async def test_a_whole_ladder(tmp_path: Path) -> None:
    log: list[str] = []
    found = await climb(SMALL, tmp_path, Watch(), opener=opener(log))
    by_id = {step["id"]: step for step in found["steps"]}
    assert {i for i, s in by_id.items() if s["status"] == "absent"} == {"alone-speculation", "stacked-speculation"}
    assert "unknown drafter" in by_id["alone-speculation"]["reason"]
    # int8 is refused, the next variant is taken, and the stacked step builds on it.
    assert by_id["alone-kv-quantization"]["settings"] == {"prefix_cache": "off", "kv_precision": "fp8"}
    assert by_id["stacked-kv-quantization"]["settings"] == {"prefix_cache": "on", "kv_precision": "fp8"}
    engine = by_id["engine"]
    assert [(c["users"], c["context"]) for c in engine["cells"]] == [(1, 64), (4, 64), (4, 128)]
    assert all(c["repeats"] == 1 for c in engine["cells"])
    crowd = next(c for c in engine["cells"] if c["users"] == 4)
    assert crowd["speedup"]["value"] > 1, "four at once beat one after another"
    naive = next(step for step in found["steps"] if step["id"] == "naive")
    assert all(cell["speedup"]["low"] == cell["speedup"]["high"] == 1 for cell in naive["cells"]), "it is the measure"
    assert next(c for c in by_id["alone-prefix-cache"]["cells"] if c["users"] == 1)["prefix_hit"] > 0.3
    assert next(c for c in engine["cells"] if c["users"] == 1)["prefix_hit"] == 0
    assert engine["quality_change"]["equal_share"] == 1.0
    assert json.loads((tmp_path / "ladder.json").read_text())["steps"]
    title, _, body, charts = content(tmp_path)
    assert "tiny" in title
    assert "unknown drafter" in body
    assert {"output_tokens_per_s-1", "output_tokens_per_s-4", "ttft_mean_s-by-context"} <= {c.name for c in charts}


async def test_the_order_turns_round_and_absent_rungs_are_not_tried_again(tmp_path: Path) -> None:
    log: list[str] = []
    only = ("naive", "engine", "alone-speculation")
    settings = LadderSettings(
        model="tiny",
        users=(2,),
        contexts=(64,),
        own=16,
        output=4,
        requests=2,
        repeats=3,
        only=only,
        max_client_delay_s=PATIENT,
    )
    found = await climb(settings, tmp_path, Watch(), opener=opener(log))
    names = ["naive" if "naive" in entry else "spec" if "drafter" in entry else "engine" for entry in log]
    assert names == ["naive", "engine", "spec", "engine", "naive", "naive", "engine"]
    assert [s["cells"][0]["repeats"] for s in found["steps"] if s["cells"]] == [3, 3]


class Crash(BaseException):
    """What ends a process in the middle."""


async def test_an_interrupted_ladder_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    only = ("naive", "engine", "alone-kv-quantization", "stacked-kv-quantization", "alone-speculation")
    settings = LadderSettings(
        model="tiny",
        users=(1, 2),
        contexts=(64,),
        own=16,
        output=4,
        requests=2,
        repeats=2,
        only=only,
        max_client_delay_s=PATIENT,
    )
    whole = await climb(settings, tmp_path / "whole", Watch(), opener=opener([]))
    out, opened = tmp_path / "cut", []
    for crash_after in (3, 11, 12, 14):  # cells measured in all when the process ends
        log: list[str] = []

        def record(_record: object, log: list[str] = log, limit: int = crash_after) -> None:
            if len(list(out.glob("*/*/summary.json"))) >= limit:
                raise Crash

        with pytest.raises(Crash):
            await climb(settings, out, Watch(record=record), opener=opener(log))
        opened.append(log)
    kept = {
        path: path.read_bytes()
        for path in out.glob("*/users-*[0-9]/records.jsonl")
        if (path.parent / "summary.json").exists()
    }
    with (out / "steps.jsonl").open("ab") as file:
        file.write(b'{"id":"engine","lab')
    last: list[str] = []
    found = await climb(settings, out, Watch(), opener=opener(last))
    assert {path: path.read_bytes() for path in kept} == kept
    assert last == ["naive:kv_cache=on"], "the order turned round, and all others were done"
    assert sum("drafter" in line for log in opened for line in log) == 1, "what is absent is not tried again"
    fields = ("id", "status", "settings", "stack", "reason")
    assert [[step[f] for f in fields] for step in found["steps"]] == [
        [step[f] for f in fields] for step in whole["steps"]
    ]
    for ours, theirs in zip(found["steps"], whole["steps"], strict=True):
        assert [(c["users"], c["context"], c["repeats"], c["folders"]) for c in ours["cells"]] == [
            (c["users"], c["context"], c["repeats"], c["folders"]) for c in theirs["cells"]
        ]


async def test_weights_are_a_second_axis(tmp_path: Path) -> None:
    log: list[str] = []
    settings = LadderSettings(
        model="tiny",
        users=(1,),
        contexts=(64,),
        own=16,
        output=4,
        requests=2,
        repeats=1,
        weights=("auto", "int8"),
        only=("engine",),
        max_client_delay_s=PATIENT,
    )
    found = await climb(settings, tmp_path, Watch(), opener=opener(log))
    assert [s["weights"] for s in found["steps"]] == ["auto", "int8"]
    assert log == ["headrace:prefix_cache=off", "headrace:weights=int8,prefix_cache=off"]


async def test_nothing_to_measure_is_not_a_result(tmp_path: Path) -> None:
    settings = LadderSettings(model="tiny", repeats=1, only=("alone-speculation",))
    with pytest.raises(InvalidRun, match="unknown drafter"):
        await climb(settings, tmp_path, Watch(), opener=opener([]))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"users": ()}, "--users"),
        ({"users": (0,)}, "--users"),
        ({"contexts": (32,), "own": 32}, "--contexts"),
        ({"repeats": 0}, "--repeats"),
        ({"only": ("nope",)}, "--step"),
    ],
)
def test_bad_ladders_are_refused(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        LadderSettings(model="m", **fields).check()  # type: ignore[arg-type]
    assert raised.value.field == field


def test_quality_changes() -> None:
    words = tuple("a b c d" for _ in quality_probe.PROMPTS)
    same = quality_probe.Quality(words, 10.0)
    other = quality_probe.Quality(("a b x d", *words[1:]), 11.0)
    change = quality_probe.compare(same, other)
    assert change.equal_share == 1 - 1 / len(words)
    assert change.words_until_different == 4 - 2 / len(words)
    assert change.perplexity_ratio == pytest.approx(1.1)
    assert quality_probe.compare(same, quality_probe.Quality(words)).perplexity_ratio is None
    assert len(quality_probe.fixed_text().split()) > 150
