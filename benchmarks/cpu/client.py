"""One streaming client for every server: raw asyncio, a small share of the CPU, stamps each event as it arrives."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

from works import Work


@dataclass(frozen=True)
class Reply:
    ttft_s: float
    itl_s: float | None
    tokens: int


class Mismatch(RuntimeError):
    """A server answered something else than was asked; the run is not valid."""


async def ask(port: int, api: str, model: str, prompt: list[int], count: int) -> Reply:
    """Stream one greedy completion of exactly `count` tokens, EOS ignored."""
    if api == "llama":
        path = "/completion"
        body = {"prompt": prompt, "n_predict": count, "ignore_eos": True, "temperature": 0, "stream": True}
        body |= {"cache_prompt": True, "samplers": ["top_k"], "top_k": 1}
    else:
        path = "/v1/completions"
        body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    sent = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    await writer.drain()
    status = await reader.readline()
    if b" 200" not in status:
        raise Mismatch(f"{status!r} {await reader.read(600)!r}")
    first = last = None
    chunks, reported = 0, None
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        now = time.perf_counter()
        if line.startswith(b"data: [DONE]"):
            break
        if api == "llama" and b'"stop":true' in line:
            reported = json.loads(line[6:])["tokens_predicted"]
        elif b'"choices":[]' in line:
            reported = json.loads(line[6:])["usage"]["completion_tokens"]
            continue
        else:
            chunks += 1
        first = first or now
        last = now
    writer.close()
    if first is None or last is None or (reported or chunks) != count:
        raise Mismatch(f"asked for {count} tokens, got {reported} in {chunks} chunks")
    return Reply(first - sent, (last - first) / (count - 1) if count > 1 else None, count)


async def drive(port: int, api: str, model: str, work: Work) -> dict[str, float]:
    """Run a work and return its figures."""
    gate = asyncio.Semaphore(work.concurrency)

    async def one(prompt: list[int], count: int) -> Reply:
        async with gate:
            return await ask(port, api, model, prompt, count)

    began = time.perf_counter()
    replies = await asyncio.gather(*(one(p, n) for p, n in work.requests))
    wall_s = time.perf_counter() - began
    ttfts = sorted(r.ttft_s for r in replies)
    itls = [r.itl_s for r in replies if r.itl_s is not None]
    figures = {
        "wall_s": wall_s,
        "output_tokens_per_s": sum(r.tokens for r in replies) / wall_s,
        "ttft_s_mean": sum(ttfts) / len(ttfts),
        "ttft_s_max": ttfts[-1],
    }
    if itls:
        figures["itl_s_mean"] = sum(itls) / len(itls)
    if work.name == "prefill":
        figures["prefill_tokens_per_s"] = sum(len(p) for p, _ in work.requests) / sum(ttfts)
    return figures
