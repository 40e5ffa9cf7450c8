"""Offline requests are those of the reference generator, number by number; outputs become records."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.base.errors import InvalidInput
from headrace.bench.offline import check_fits, mixed_requests, offline_summary, prefix_requests, run_offline
from headrace.bench.records import Outcome, read_records
from headrace.bench.run import InvalidRun
from headrace.bench.traffic import IntRange
from headrace.control.api import EngineInfo, EngineStats, Finish, FinishReason, Output
from headrace.control.request import Request

LENGTHS, OUTPUTS = IntRange(128, 1024), IntRange(128, 512)


def digest(requests: object) -> str:
    return hashlib.sha256(json.dumps(requests).encode()).hexdigest()


def test_mixed_requests_are_the_reference_ones() -> None:
    found = mixed_requests(256, 10, LENGTHS, OUTPUTS)
    assert sum(len(r.token_ids) for r in found) == 146_873
    assert sum(r.output_tokens for r in found) == 84_388
    assert found[0].token_ids[:5] == (1070, 14056, 15815, 18945, 489)
    assert (len(found[0].token_ids), found[0].output_tokens) == (713, 449)
    assert found[-1].token_ids[-3:] == (5963, 4880, 5210)
    as_lists = [[list(r.token_ids), r.output_tokens] for r in found]
    assert digest(as_lists) == "ac2e33a86d48efdf804e4fd8b7e765280dcedb7da02009ce77f539c7d178f1cf"


def test_prefix_requests_are_the_reference_ones() -> None:
    found = prefix_requests(64, 1, 2048, 64, 128)
    assert found[0].token_ids[:4] == (4405, 18654, 27771, 26291)
    assert found[-1].token_ids[-2:] == (16759, 22096)
    as_lists = [[list(r.token_ids), r.output_tokens] for r in found]
    assert digest(as_lists) == "bdbb5b5864635984fe5a0857a7979666e227e9b5765bd32d533a218a04acbebc"


class FakeEngine:
    """Gives each request its tokens two at a time; `broken` requests end with an error, `short` ones a token early."""

    state = "ready"
    stats = EngineStats()
    info = EngineInfo(
        model="fake", model_type="x", backend="fake", vocab_size=100, max_model_len=2048, max_num_seqs=8,
        max_batched_tokens=512, block_tokens=16, num_blocks=10, kv_bytes_per_token=1, pool_tokens=160,
        weights_precision="bf16", kv_precision="bf16",
    )  # fmt: skip

    def __init__(self, broken: set[int] = frozenset(), short: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.broken, self.short = broken, short

    async def generate(self, request: Request) -> AsyncIterator[Output]:
        index = int(request.request_id.rsplit("-", 1)[1])
        left = request.sampling.max_tokens - (index in self.short)
        total = left
        while left > 0:
            await asyncio.sleep(0.001)
            yield Output(request.request_id, (7,) * min(2, left))
            left -= 2
        reason = FinishReason.ERROR if index in self.broken else FinishReason.LENGTH
        finish = Finish(reason, len(request.prompt_token_ids), total, 0, error="boom" if index in self.broken else None)
        yield Output(request.request_id, finish=finish)


async def test_outputs_become_records_and_a_summary(tmp_path: Path) -> None:
    engine = FakeEngine()
    requests = mixed_requests(6, 3, IntRange(4, 9), IntRange(3, 8))
    records = await run_offline(engine, requests)  # type: ignore[arg-type]
    assert [r.index for r in records] == list(range(6))
    for record, asked in zip(records, requests, strict=True):
        assert record.outcome is Outcome.OK
        assert sum(record.event_tokens) == asked.output_tokens == record.output_tokens
        assert record.prompt_tokens == len(asked.token_ids)
        assert record.event_s == sorted(record.event_s)
    summary = offline_summary(engine, records, {"seed": "3"}, tmp_path / "o")  # type: ignore[arg-type]
    assert summary["valid"]
    assert summary["tokens"]["output"] == sum(r.output_tokens for r in requests)
    assert summary["output_tokens_per_s"]["value"] > 0
    assert read_records(tmp_path / "o" / "records.jsonl") == records


async def test_failed_requests_are_not_counted_as_work() -> None:
    engine = FakeEngine(broken={0}, short={1})
    records = await run_offline(engine, mixed_requests(4, 3, IntRange(4, 9), IntRange(3, 8)))  # type: ignore[arg-type]
    assert [r.outcome for r in records[:3]] == [Outcome.STREAM_ERROR, Outcome.WRONG_LENGTH, Outcome.OK]
    with pytest.raises(InvalidRun, match="failed"):
        offline_summary(engine, records, {}, None)  # type: ignore[arg-type]


def test_requests_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidInput, match="max-model-len"):
        check_fits(mixed_requests(3, 1, IntRange(50, 60), IntRange(10, 10)), 64)
