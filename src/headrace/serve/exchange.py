"""One HTTP exchange: read the body, make the answer while watching for a disconnect, send it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.base.errors import EngineDead, InvalidInput, UnsupportedModel
from headrace.serve.begun import begun
from headrace.serve.body import ClientGone, read_body, require_json
from headrace.serve.errors import ApiError, engine_failed, from_invalid_input, unavailable
from headrace.serve.generation import Piece, Pieces

log = logging.getLogger("headrace.serve")


@dataclass(slots=True)
class Call:
    """A request being answered. What is entered into `held` is released when the exchange is over, however it ends."""

    body: bytes
    received_s: float
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class Events(Protocol):
    """What the pieces of a streamed answer become: each event one JSON value, encoded."""

    def of(self, piece: Piece) -> Sequence[bytes]: ...

    def end(self) -> Sequence[bytes]:
        """Events after the last piece."""
        ...


@dataclass(frozen=True, slots=True)
class EventStream:
    """Server-sent events; the end is marked by `[DONE]`. A failure becomes an error event, the last one before the end."""

    pieces: Pieces
    events: Events


Answer = Response | EventStream
Answerer = Callable[[Call], Awaitable[Answer]]


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


class Endpoint:
    """An ASGI app for one POST route. The answerer runs in a task that a disconnect cancels.

    `takes_json`: it reads its body, which must then not say that it is something else than JSON. `refused` is told the errors
    that are answers.
    """

    def __init__(
        self,
        answer: Answerer,
        *,
        max_body_bytes: int,
        takes_json: bool = True,
        refused: Callable[[ApiError], None] = lambda error: None,
    ) -> None:
        self._answer = answer
        self._refused = refused
        self._max_body_bytes = max_body_bytes
        self._takes_json = takes_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received_s = time.monotonic()
        try:
            if self._takes_json:
                require_json(scope)
            body = await read_body(scope, receive, self._max_body_bytes)
        except ClientGone:
            return
        except ApiError as error:
            self._refused(error)
            await error.response()(scope, receive, send)
            return
        work = asyncio.create_task(self._work(Call(body, received_s), scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait([work])
        if not work.cancelled():
            work.result()

    async def _work(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        with call.held:
            try:
                answer = await self._answer(call)
            except Exception as error:
                known = as_api_error(error)
                self._refused(known)
                await known.response()(scope, receive, send)
                return
            if isinstance(answer, EventStream):
                await _send_events(answer, send)
                return
        # places in the queue are free again before the answer is on its way
        await answer(scope, receive, send)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_events(stream: EventStream, send: Send) -> None:
    """One event for each token; those that are there together (choices, a reader that was slow) are sent together."""
    events_of = stream.events.of

    def write(pieces: Sequence[Piece]) -> Awaitable[None] | None:
        body = b"".join([b"data: %b\n\n" % event for piece in pieces for event in events_of(piece)])
        return begun(send({"type": "http.response.body", "body": body, "more_body": True})) if body else None

    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ],
        }
    )
    try:
        with stream.pieces as source:
            await source.pour(write)
        rest = stream.events.end()
    except Exception as error:
        rest = [msgspec.json.encode(as_api_error(error).body())]
    last = b"".join([b"data: %b\n\n" % event for event in (*rest, b"[DONE]")])
    await send({"type": "http.response.body", "body": last, "more_body": False})


def as_api_error(error: Exception) -> ApiError:
    """Any failure as an answer in OpenAI's shape; unforeseen ones are logged and say nothing of our insides."""
    match error:
        case ApiError():
            return error
        case InvalidInput() | UnsupportedModel():
            return from_invalid_input(error)
        case EngineDead():
            return unavailable("The engine is not running; try again shortly.", 2, "engine_not_ready")
        case _:
            log.error("a request failed", exc_info=error)
            return engine_failed("The server failed on this request.")
