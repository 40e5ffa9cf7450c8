"""Outputs of a followed request as an iterator. A slow consumer delays nobody: what waits is merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from headrace.control.api import EngineClient, Output
from headrace.control.request import Request


def merge(outputs: list[Output]) -> Output:
    """One output that says what several consecutive ones of the same request said."""
    if len(outputs) == 1:
        return outputs[0]
    return Output(
        request_id=outputs[0].request_id,
        token_ids=tuple(t for o in outputs for t in o.token_ids),
        logprobs=tuple(p for o in outputs for p in o.logprobs),
        prompt_logprobs=tuple(p for o in outputs for p in o.prompt_logprobs),
        finish=outputs[-1].finish,
    )


async def outputs_of(engine: EngineClient, request: Request) -> AsyncGenerator[Output]:
    """Follow a request and yield everything that has arrived since the last turn as one output; leaving early abandons it."""
    pending: list[Output] = []
    arrived = asyncio.Event()

    def sink(output: Output) -> None:
        pending.append(output)
        arrived.set()

    engine.follow(request, sink)
    try:
        while True:
            await arrived.wait()
            arrived.clear()
            output = merge(pending)
            pending.clear()
            yield output
            if output.finish is not None:
                return
    finally:
        engine.abandon(request.request_id)
