"""The golden server: an OpenAI-compatible endpoint whose token counts and send times are known exactly.

It generates nothing. Event k of a stream leaves at `received + ttft + k * tokens_per_chunk * itl`, on an absolute
schedule, so that errors do not add up; what really left, and when (CLOCK_MONOTONIC), is kept and served as the truth.
One word is one token: the prompt's words are counted, and each token sent is one word.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from aiohttp import web

from headrace.base.errors import InvalidInput
from headrace.bench.prompts import common_words
from headrace.bench.ticker import Ticker

CHAT_TOKENS_PER_MESSAGE = 4
CACHE_BLOCK_TOKENS = 16
_LOG_LIMIT = 200_000


@dataclass(frozen=True, slots=True)
class GoldenScript:
    """How the golden server answers. Times in milliseconds; every `*_every` n hits each n-th request (0: never).

    http_error: a 500 before any stream · error: an error event after `fault_after_tokens` · disconnect: the connection
    is cut there · stall: a pause of `stall_ms` there · empty: a stream that ends without a token · short: half of the
    tokens asked for. `slots`: requests served at once, others queue (0: no limit). `token_words`: words per token text.
    `api_key`: required of requests where it is
    set. `usage`: `final` (OpenAI's include_usage), `continuous` (on each chunk when asked), `none`.
    """

    ttft_ms: float = 50.0
    itl_ms: float = 5.0
    tokens_per_chunk: int = 1
    prefill_us_per_token: float = 0.0
    slots: int = 0
    output_tokens: int = 16
    max_context: int = 1_000_000
    http_error_every: int = 0
    error_every: int = 0
    disconnect_every: int = 0
    stall_every: int = 0
    empty_every: int = 0
    short_every: int = 0
    fault_after_tokens: int = 4
    stall_ms: float = 100.0
    usage: str = "continuous"
    prefix_cache: bool = False
    model: str = "golden"
    api_key: str = ""

    def check(self) -> None:
        """Raise `InvalidInput` naming the option that is wrong."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
                raise InvalidInput(f"must not be negative, got {value}", field=f"--{f.name.replace('_', '-')}")
        if self.tokens_per_chunk < 1:
            raise InvalidInput("must be at least 1", field="--tokens-per-chunk")
        if self.usage not in ("final", "continuous", "none"):
            raise InvalidInput(f"must be final, continuous or none, got {self.usage!r}", field="--usage")

    def event_offsets_s(self, tokens: int) -> list[tuple[float, int]]:
        """(seconds after the stream starts, tokens) of each event of an undisturbed answer of `tokens` tokens."""
        sizes = [min(self.tokens_per_chunk, tokens - done) for done in range(0, tokens, self.tokens_per_chunk)]
        step_s = self.tokens_per_chunk * self.itl_ms / 1e3
        return [(self.ttft_ms / 1e3 + k * step_s, size) for k, size in enumerate(sizes)]


@dataclass(slots=True)
class GoldenTruth:
    """What the server did for one request; times are CLOCK_MONOTONIC seconds."""

    id: str
    received_s: float
    prompt_tokens: int
    cached_tokens: int
    event_s: list[float] = field(default_factory=list)
    event_tokens: list[int] = field(default_factory=list)
    planned_s: list[float] = field(default_factory=list)
    fault: str = ""


class GoldenServer:
    """One golden endpoint. `app` is an aiohttp application; `truth` the log, oldest first (at most the last 200,000)."""

    def __init__(self, script: GoldenScript) -> None:
        script.check()
        self.script = script
        self.truth: deque[GoldenTruth] = deque(maxlen=_LOG_LIMIT)
        self.count = 0
        self._running = 0
        self._waiting = 0
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._cache: set[int] = set()
        self._slots: asyncio.Semaphore | None = None
        self._ticker: Ticker | None = None
        self.app = web.Application(client_max_size=256 * 2**20)
        self.app.cleanup_ctx.append(self._lifetime)
        self.app.router.add_post("/v1/chat/completions", self._chat)
        self.app.router.add_post("/v1/completions", self._completions)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_get("/golden/truth", self._truth)
        self.app.router.add_post("/reset_prefix_cache", self._reset)

    async def _lifetime(self, _app: web.Application) -> Any:
        self._ticker = Ticker()
        self._slots = asyncio.Semaphore(self.script.slots) if self.script.slots else None
        yield
        self._ticker.close()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, _request: web.Request) -> web.Response:
        card = {"id": self.script.model, "object": "model", "created": 0, "owned_by": "golden"}
        return web.json_response({"object": "list", "data": [card | {"max_model_len": self.script.max_context}]})

    async def _truth(self, _request: web.Request) -> web.Response:
        return web.json_response([{f.name: getattr(t, f.name) for f in fields(t)} for t in self.truth])

    async def _reset(self, _request: web.Request) -> web.Response:
        self._cache.clear()
        return web.json_response({})

    async def _metrics(self, _request: web.Request) -> web.Response:
        label = f'{{model_name="{self.script.model}"}}'
        usage = self._running / self.script.slots if self.script.slots else 0.0
        lines = [
            f"vllm:num_requests_running{label} {self._running}",
            f"vllm:num_requests_waiting{label} {self._waiting}",
            f"vllm:kv_cache_usage_perc{label} {usage}",
            f"vllm:prefix_cache_queries_total{label} {self._queried_tokens}",
            f"vllm:prefix_cache_hits_total{label} {self._hit_tokens}",
        ]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        received_s = time.monotonic()
        if self.script.api_key and request.headers.get("Authorization") != f"Bearer {self.script.api_key}":
            return _refuse(401, "golden server: wrong key")
        try:
            body = json.loads(await request.read())
            words, tokens, script = self._parse(body, chat=chat, override=request.headers.get("X-Golden", ""))
        except (ValueError, KeyError, TypeError, InvalidInput) as error:
            return _refuse(400, f"golden server: {error}")
        if len(words) + tokens > script.max_context:
            return _refuse(400, f"context of {script.max_context} tokens is too short for {len(words)} + {tokens}")
        self.count += 1
        truth = GoldenTruth(f"golden-{self.count}", received_s, len(words), self._cached(words))
        truth.fault = self._fault(script)
        self.truth.append(truth)
        if truth.fault == "http_error":
            return _refuse(500, "golden server: planned failure")
        if truth.fault == "short":
            tokens = max(1, tokens // 2)
        if truth.fault == "empty":
            tokens = 0
        self._waiting += 1
        if self._slots:
            await self._slots.acquire()
        self._waiting -= 1
        self._running += 1
        try:
            start_s = time.monotonic() if self._slots else received_s
            start_s += script.prefill_us_per_token * (len(words) - truth.cached_tokens) / 1e6
            stream = _Stream(truth, script, chat=chat, body=body, tokens=tokens, start_s=start_s)
            assert self._ticker is not None
            if body.get("stream"):
                with suppress(ConnectionResetError):  # the client has gone; nobody is left to answer
                    return await stream.send(request, self._ticker)
                return web.Response(status=499)
            return await stream.whole(self._ticker)
        finally:
            self._running -= 1
            if self._slots:
                self._slots.release()

    def _parse(self, body: dict[str, Any], *, chat: bool, override: str) -> tuple[list[str], int, GoldenScript]:
        if chat:
            words = []
            for message in body["messages"]:
                content = message["content"]
                text = content if isinstance(content, str) else " ".join(p.get("text", "") for p in content)
                words += [f"<{message['role']}>"] * CHAT_TOKENS_PER_MESSAGE + text.split()
        else:
            prompt = body["prompt"]
            words = prompt.split() if isinstance(prompt, str) else [str(token) for token in prompt]
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or self.script.output_tokens
        return words, int(asked), override_script(self.script, override)

    def _fault(self, script: GoldenScript) -> str:
        for name in ("http_error", "error", "disconnect", "stall", "empty", "short"):
            every = getattr(script, f"{name}_every")
            if every and self.count % every == 0:
                return name
        return ""

    def _cached(self, words: list[str]) -> int:
        if not self.script.prefix_cache:
            return 0
        hit, running, matching = 0, 0, True
        for end in range(CACHE_BLOCK_TOKENS, len(words) + 1, CACHE_BLOCK_TOKENS):
            running = hash((running, *words[end - CACHE_BLOCK_TOKENS : end]))
            matching = matching and running in self._cache
            hit += CACHE_BLOCK_TOKENS if matching else 0
            self._cache.add(running)
        hit = min(hit, len(words) - 1)
        self._queried_tokens += len(words)
        self._hit_tokens += hit
        return hit


def override_script(script: GoldenScript, text: str) -> GoldenScript:
    """`script` with the fields of `name=value,name=value` replaced (the `X-Golden` request header)."""
    changes: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in script.__dataclass_fields__:
            raise InvalidInput(f"unknown field {name!r}", field="X-Golden")
        kind = type(getattr(script, name))
        changes[name] = value == "true" if kind is bool else kind(value)
    changed = replace(script, **changes)
    changed.check()
    return changed


@dataclass(slots=True)
class _Stream:
    truth: GoldenTruth
    script: GoldenScript
    body: dict[str, Any]
    chat: bool
    tokens: int
    start_s: float

    async def send(self, request: web.Request, ticker: Ticker) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        options = self.body.get("stream_options") or {}
        continuous = self.script.usage == "continuous" and bool(options.get("continuous_usage_stats"))
        sent, late_s = 0, 0.0
        for offset_s, size in self.script.event_offsets_s(self.tokens):
            if self.truth.fault in ("error", "disconnect", "stall") and sent >= self.script.fault_after_tokens:
                if self.truth.fault == "error":
                    error = {"message": "golden server: planned failure", "type": "server_error", "code": 500}
                    await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
                    return response
                if self.truth.fault == "disconnect":
                    if request.transport is not None:
                        request.transport.abort()
                    return response
                late_s = self.script.stall_ms / 1e3
            when_s = self.start_s + offset_s + late_s
            await ticker.sleep_until(when_s)
            last = sent + size == self.tokens
            data = self._chunk(sent, size, "length" if last else None, usage=continuous)
            self._note(when_s, size)
            await response.write(data)
            sent += size
        if self.tokens == 0:
            await ticker.sleep_until(self.start_s + self.script.ttft_ms / 1e3)
            await response.write(self._chunk(0, 0, "stop", usage=False))
        if options.get("include_usage") and self.script.usage != "none":
            frame = self._frame([]) | {"usage": self._usage(sent)}
            await response.write(b"data: " + json.dumps(frame).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def whole(self, ticker: Ticker) -> web.Response:
        offsets = self.script.event_offsets_s(self.tokens)
        when_s = self.start_s + (offsets[-1][0] if offsets else self.script.ttft_ms / 1e3)
        await ticker.sleep_until(when_s)
        self._note(when_s, self.tokens)
        text = _words(0, self.tokens)
        part = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        frame = self._frame([{"index": 0, "finish_reason": "length", "logprobs": None} | part])
        frame["object"] = "chat.completion" if self.chat else "text_completion"
        return web.json_response(frame | {"usage": self._usage(self.tokens)})

    def _note(self, planned_s: float, size: int) -> None:
        self.truth.planned_s.append(planned_s)
        self.truth.event_tokens.append(size)
        self.truth.event_s.append(time.monotonic())

    def _chunk(self, first: int, size: int, finish: str | None, *, usage: bool) -> bytes:
        text = _words(first, size)
        part: dict[str, Any] = {"delta": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        frame = self._frame([{"index": 0, "logprobs": None, "finish_reason": finish} | part])
        if usage:
            frame["usage"] = self._usage(first + size)
        return b"data: " + json.dumps(frame).encode() + b"\n\n"

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {"id": self.truth.id, "object": kind, "created": 0, "model": self.script.model, "choices": choices}

    def _usage(self, completion_tokens: int) -> dict[str, Any]:
        prompt = self.truth.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.truth.cached_tokens},
        }


def _words(first: int, size: int) -> str:
    """Text of tokens `first`, `first + 1`, …: common words, which client-side tokenizers count as one token each too."""
    words = common_words()
    return "".join(f" {words[(first + k) % len(words)]}" for k in range(size))


def _refuse(status: int, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": None}}, status=status)


async def serve_golden(script: GoldenScript, port: int, *, ready: Callable[[int], None]) -> None:
    """Serve on 127.0.0.1:`port` (0: any free one) until cancelled; `ready` is called with the port once it is open."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        raise InvalidInput(f"cannot listen on 127.0.0.1:{port}: {error}", field="--port") from error
    runner = web.AppRunner(GoldenServer(script).app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listening, backlog=1024).start()
        ready(listening.getsockname()[1])
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


@asynccontextmanager
async def golden_process(script: GoldenScript) -> AsyncIterator[str]:
    """A golden server in a process of its own, on a free port; gives its base URL and ends the process afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headrace.bench.golden", json.dumps(asdict(script)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        port = (await asyncio.wait_for(process.stdout.readline(), 60.0)).decode().strip()
        if not port:
            raise RuntimeError("the golden server did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _main() -> None:
    import uvloop

    script = GoldenScript(**json.loads(sys.argv[1]))
    uvloop.run(serve_golden(script, 0, ready=lambda port: print(port, flush=True)))


if __name__ == "__main__":
    _main()
