"""How a request ends that its engine cannot finish, or does not take."""

from __future__ import annotations

from headrace.control.api import EngineState, Finish, FinishReason
from headrace.control.request import Request

# Why a request is turned away in each state but `ready`.
REFUSALS: dict[EngineState, str] = {
    "starting": "the engine is starting",
    "restarting": "the engine is restarting after a failure",
    "draining": "the engine is shutting down",
    "dead": "the engine is not running",
}


def ending(request: Request, completion_tokens: int, reason: FinishReason, error: str) -> Finish:
    return Finish(
        reason=reason,
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=completion_tokens,
        cached_tokens=0,
        error=error,
    )
