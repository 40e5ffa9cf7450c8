"""OpenVINO GenAI's continuous batching as a server (run by an environment with `openvino-genai` and `aiohttp`).

OpenVINO has no server of its own on the package index, so this is the thinnest one around its pipeline: one thread calls
`step()`, each token goes out as it is read. Weights come from the GGUF (Q8_0 becomes int8 with a scale per 32).
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading

import numpy as np
import openvino as ov
import openvino_genai as genai
from aiohttp import web

WAITING: queue.Queue[tuple[list[int], int, asyncio.Queue[int]]] = queue.Queue()


def scheduling() -> genai.SchedulerConfig:
    """Settings of its manual for throughput: prefix cache on, prompts split to fit beside running streams."""
    chosen = genai.SchedulerConfig()
    chosen.cache_size, chosen.max_num_seqs, chosen.max_num_batched_tokens = 1, 32, 512
    chosen.enable_prefix_caching = chosen.dynamic_split_fuse = True
    return chosen


def serve_steps(pipeline: genai.ContinuousBatchingPipeline, loop: asyncio.AbstractEventLoop) -> None:
    running: list[tuple[genai.GenerationHandle, asyncio.Queue[int], int]] = []
    number = 0

    def take(block: bool) -> None:
        nonlocal number
        prompt, count, reply = WAITING.get(block=block)
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos, config.do_sample = True, False
        handle = pipeline.add_request(number, ov.Tensor(np.array([prompt], dtype=np.int64)), config)
        running.append((handle, reply, count))
        number += 1

    while True:
        if not running:
            take(True)
        while not WAITING.empty():
            take(False)
        pipeline.step()
        for item in list(running):
            handle, reply, left = item
            while handle.can_read():
                for output in handle.read().values():
                    left -= len(output.generated_ids)
                    for token in output.generated_ids:
                        loop.call_soon_threadsafe(reply.put_nowait, token)
            running.remove(item)
            if left > 0:
                running.append((handle, reply, left))


async def completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    reply: asyncio.Queue[int] = asyncio.Queue()
    WAITING.put((body["prompt"], body["max_tokens"], reply))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    for _ in range(body["max_tokens"]):
        await reply.get()
        await response.write(b'data: {"choices":[{"text":"x"}]}\n\n')
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}, separators=(",", ":"))
    await response.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
    return response


async def main() -> None:
    settings = {"INFERENCE_NUM_THREADS": 2}
    pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], scheduling(), "CPU", settings)
    threading.Thread(target=serve_steps, args=(pipeline, asyncio.get_running_loop()), daemon=True).start()
    app = web.Application()
    app.router.add_get("/health", lambda _: asyncio.sleep(0, web.Response()))
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(sys.argv[2])).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
