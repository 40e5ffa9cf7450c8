"""Offline throughput: an engine in this process, token ids in and out, no HTTP and no tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from headrace.base.errors import InvalidInput
from headrace.base.files import write_atomic
from headrace.bench.endpoint import Endpoint
from headrace.bench.records import META_FILE, SUMMARY_FILE, Outcome, RecordLog, RequestRecord, TokenSource
from headrace.bench.run import InvalidRun
from headrace.bench.settings import RunSettings
from headrace.bench.summary import summarize
from headrace.bench.traffic import IntRange
from headrace.bench.worker import RunMeta, ShareReport
from headrace.control.api import EngineClient, FinishReason
from headrace.control.request import Request, Sampling

FIRST_ID = 3
END_ID = 31_990


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """Token ids of a prompt, and how many tokens are generated for it (EOS ignored, greedy)."""

    token_ids: tuple[int, ...]
    output_tokens: int


def mixed_requests(count: int, seed: int, isl: IntRange, osl: IntRange, end_id: int = END_ID) -> list[OfflineRequest]:
    """`count` requests with lengths uniform over `isl` and `osl` and ids uniform over [3, end_id).

    One `random.Random(seed)` draws, request by request: the prompt's length, its ids, the output's length. This order
    is part of the contract: the same numbers give the same requests to every engine.
    """
    source = Random(seed)
    found = []
    for _ in range(count):
        length = source.randint(isl.low, isl.high)
        ids = tuple(source.randrange(FIRST_ID, end_id) for _ in range(length))
        found.append(OfflineRequest(ids, source.randint(osl.low, osl.high)))
    return found


def prefix_requests(
    count: int, seed: int, prefix: int, own: int, output: int, end_id: int = END_ID
) -> list[OfflineRequest]:
    """`count` requests that share `prefix` tokens and have `own` more each; drawn from one `random.Random(seed)`."""
    source = Random(seed)
    shared = tuple(source.randrange(FIRST_ID, end_id) for _ in range(prefix))
    return [
        OfflineRequest(shared + tuple(source.randrange(FIRST_ID, end_id) for _ in range(own)), output)
        for _ in range(count)
    ]


async def run_offline(
    client: EngineClient, requests: list[OfflineRequest], *, on_done: Callable[[RequestRecord], None] = lambda _r: None
) -> list[RequestRecord]:
    """Submit everything at once and stamp every output; times are seconds since the submission began."""
    origin_s = time.monotonic()

    async def one(index: int, asked: OfflineRequest) -> RequestRecord:
        record = RequestRecord(
            index=index,
            intended_s=0.0,
            prompt_tokens_declared=len(asked.token_ids),
            output_tokens_asked=asked.output_tokens,
            token_source=TokenSource.TOKEN_IDS,
        )
        sampling = Sampling(max_tokens=asked.output_tokens, temperature=0.0, ignore_eos=True)
        request = Request(
            request_id=f"offline-{index}",
            prompt_token_ids=asked.token_ids,
            sampling=sampling,
            arrival_s=time.monotonic(),
        )
        record.sent_s = time.monotonic() - origin_s
        async for output in client.generate(request):
            if output.token_ids:
                record.event_s.append(round(time.monotonic() - origin_s, 7))
                record.event_tokens.append(float(len(output.token_ids)))
            if output.finish is not None:
                finish = output.finish
                record.prompt_tokens, record.output_tokens = finish.prompt_tokens, finish.completion_tokens
                record.cached_tokens, record.finish_reason = finish.cached_tokens, str(finish.reason)
                if finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
                    record.outcome, record.error = Outcome.STREAM_ERROR, finish.error or str(finish.reason)
        record.end_s = time.monotonic() - origin_s
        record.headers_s = record.first_byte_s = record.event_s[0] if record.event_s else record.end_s
        if record.outcome is Outcome.OK and record.output_tokens != asked.output_tokens:
            record.outcome = Outcome.WRONG_LENGTH
            record.error = f"{record.output_tokens} tokens instead of {asked.output_tokens}"
        on_done(record)
        return record

    return list(await asyncio.gather(*(one(index, asked) for index, asked in enumerate(requests))))


def check_fits(requests: list[OfflineRequest], max_model_len: int) -> None:
    """Raise `InvalidInput` when a request is longer than the engine's context."""
    longest = max(len(r.token_ids) + r.output_tokens for r in requests)
    if longest > max_model_len:
        raise InvalidInput(
            f"the longest request has {longest} tokens, the engine takes {max_model_len}",
            field="--isl",
            remedy="shorter ranges, or a larger --max-model-len",
        )


def offline_summary(
    client: EngineClient, records: list[RequestRecord], load: dict[str, str], out: Path | None
) -> dict[str, Any]:
    """The summary of an offline run, with what the engine reports about itself; written to `out` where one is given."""
    info = client.info
    settings = RunSettings(
        endpoint=Endpoint("", info.model), workload="offline", workload_options=load, requests=len(records),
        max_client_delay_s=1e9, target={"engine": "headrace", "info": msgspec.to_builtins(info)},
    )  # fmt: skip
    meta = RunMeta(settings=settings, finished=True)
    summary = summarize(meta, ShareReport(0, 0, 0, False), records, [])
    stats = client.stats
    summary["engine_stats"] = msgspec.to_builtins(stats)
    tokens = sum(r.tokens_out for r in records)
    seconds = summary["duration_s"]
    summary["total_tokens_per_s"] = (tokens + sum(r.prompt_tokens or 0 for r in records)) / seconds if seconds else None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with RecordLog(out / "records.jsonl") as log:
            for record in records:
                log.append(record)
        write_atomic(out / META_FILE, msgspec.json.encode(meta))
        write_atomic(out / SUMMARY_FILE, msgspec.json.format(msgspec.json.encode(summary), indent=1))
    if not summary["valid"]:
        raise InvalidRun("; ".join(summary["invalid_because"]))
    return summary
