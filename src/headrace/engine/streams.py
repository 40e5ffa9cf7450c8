"""Outputs on their way from an engine to one consumer each. A slow consumer delays nobody: what waits is merged."""

from __future__ import annotations

import asyncio

from headrace.control.api import FinishReason, Output
from headrace.control.request import Request
from headrace.engine.endings import ending


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


class OutputStream:
    """One request in flight and what its consumer has not taken yet. Belongs to one event loop; not thread-safe.

    It ends exactly once: after a terminal output, later ones are dropped.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ended = False
        self._pending: list[Output] = []
        self._tokens = 0
        self._arrived = asyncio.Event()

    def put(self, output: Output) -> None:
        if self.ended:
            return
        self._tokens += len(output.token_ids)
        self.ended = output.finish is not None
        self._pending.append(output)
        self._arrived.set()

    def end(self, reason: FinishReason, error: str) -> None:
        """End the request from this side, because the engine cannot any more."""
        self.put(Output(self.request.request_id, finish=ending(self.request, self._tokens, reason, error)))

    async def get(self) -> Output:
        """Everything that has arrived since the last call, as one output; waits for at least one."""
        await self._arrived.wait()
        self._arrived.clear()
        pending, self._pending = self._pending, []
        return merge(pending)
