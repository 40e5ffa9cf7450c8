"""The honest baseline: a loop that serves one request after another, batch 1, with or without a KV cache.

It runs the same executor as the engine, so that what a benchmark of both shows is scheduling and nothing else: no
batching, no chunking, no prefix reuse, no overlap. With a cache a token costs one position; without one the whole
sequence is computed again for every token. `python -m headrace.engine.naive MODEL --port P` serves it over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import HeadraceError, InvalidInput
from headrace.base.units import ceil_div
from headrace.control.request import Sampling
from headrace.control.step import BlockAppend, Chunk, Executor, SlotInit, StepPlan
from headrace.engine.backend import Limits
from headrace.engine.launch import choose_backend
from headrace.spec.accounting import cache_layout, default_block_tokens
from headrace.spec.cache import CacheLayout
from headrace.spec.config import EngineConfig
from headrace.spec.locate import ModelFiles, locate

_SLOT = 0


class NaiveLoop:
    """One sequence at a time on an executor of its own; owns it and `close`s it. Not thread-safe.

    The pool holds exactly one sequence of `max_model_len` tokens, block j of cache group g being block
    g × blocks-per-sequence + j, so there is nothing to manage.
    """

    def __init__(self, executor: Executor, layout: CacheLayout, max_model_len: int, *, kv_cache: bool) -> None:
        self.max_model_len = max_model_len
        self.kv_cache = kv_cache
        self._executor = executor
        self._layout = layout
        self._blocks = ceil_div(max_model_len, layout.block_tokens)
        self._step = 0
        self._occupied = False

    def generate(self, prompt: tuple[int, ...], sampling: Sampling) -> Iterator[tuple[int, str]]:
        """(token id, finish reason or "") of each token, the stopping one included.

        The last one has the reason: `stop`, or `length` at `max_tokens` and at the end of the context.
        """
        tokens = list(prompt)
        room = min(sampling.max_tokens, self.max_model_len - len(prompt))
        for done in range(room):
            if done == 0 or not self.kv_cache:
                token = self._run(self._begin(tokens, len(prompt), sampling), 0, len(tokens))
            else:
                token = self._run({}, len(tokens) - 1, 1)
            tokens.append(token)
            if token in sampling.stopping_ids and done + 1 >= sampling.min_tokens:
                yield token, "stop"
                return
            yield token, "length" if done + 1 == room else ""

    def close(self) -> None:
        self._executor.close()

    def _begin(self, tokens: list[int], prompt_length: int, sampling: Sampling) -> dict[str, Any]:
        """Put the sequence into the slot anew, with all the blocks it may ever need."""
        releases = (_SLOT,) if self._occupied else ()
        self._occupied = True
        init = SlotInit(_SLOT, "naive", tuple(tokens), prompt_length, sampling)
        appends = tuple(
            BlockAppend(_SLOT, group, 0, tuple(range(group * self._blocks, (group + 1) * self._blocks)))
            for group in range(self._layout.num_groups)
        )
        return {"releases": releases, "inits": (init,), "appends": appends}

    def _run(self, changes: dict[str, Any], start: int, length: int) -> int:
        plan = StepPlan(step_id=self._step, chunks=(Chunk(_SLOT, start, length, sample=True),), **changes)
        self._step += 1
        (row,) = self._executor.submit(plan).result().rows
        if row.error is not None:
            raise HeadraceError(row.error)
        return row.token_ids[0]


def load(config: EngineConfig, *, kv_cache: bool, files: ModelFiles | None = None) -> NaiveLoop:
    """A naive loop for a model, on the backend that the engine would take for the same configuration."""
    files = files or locate(config.model, revision=config.revision)
    backend, _ = choose_backend(config, files)
    model = backend.load(files, config)
    longest = min(config.max_model_len or model.spec.max_context, model.spec.max_context)
    layout = cache_layout(
        model.spec, model.kv_precision, config.block_tokens or default_block_tokens(model.kv_precision)
    )
    blocks = layout.num_groups * ceil_div(longest, layout.block_tokens)
    executor = model.executor(layout, Limits(blocks, 1, longest, longest))
    return NaiveLoop(executor, layout, longest, kv_cache=kv_cache)


@dataclass(frozen=True, slots=True)
class _Asked:
    prompt: tuple[int, ...]
    sampling: Sampling
    chat: bool
    stream: bool
    usage: bool


class NaiveServer:
    """A minimal OpenAI-compatible front of a `NaiveLoop`: requests queue, one runs at a time."""

    def __init__(self, loop: NaiveLoop, files: ModelFiles, name: str) -> None:
        from headrace.text.load import load_template, load_tokenizer

        self._loop = loop
        self._name = name
        self._tokenizer = load_tokenizer(files)
        self._template = load_template(files, self._tokenizer)
        self._eos = files.spec().eos_token_ids
        self._turn = asyncio.Lock()
        self._count = 0

    def app(self) -> Any:
        """The ASGI application."""
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        async def health(_request: Any) -> Any:
            return JSONResponse({"status": "ok"})

        async def models(_request: Any) -> Any:
            card = {"id": self._name, "object": "model", "created": 0, "owned_by": "headrace"}
            card["max_model_len"] = self._loop.max_model_len
            return JSONResponse({"object": "list", "data": [card]})

        async def chat(request: Any) -> Any:
            return await self._answer(request, chat=True)

        async def completions(request: Any) -> Any:
            return await self._answer(request, chat=False)

        return Starlette(
            routes=[
                Route("/health", health),
                Route("/v1/models", models),
                Route("/v1/chat/completions", chat, methods=["POST"]),
                Route("/v1/completions", completions, methods=["POST"]),
            ]
        )

    async def _answer(self, request: Any, *, chat: bool) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        try:
            asked = self._parse(json.loads(await request.body()), chat=chat)
        except (HeadraceError, ValueError, KeyError, TypeError) as error:
            text = f"{type(error).__name__}: {error}" if not isinstance(error, HeadraceError) else str(error)
            return JSONResponse({"error": {"message": text, "type": "invalid_request_error"}}, status_code=400)
        self._count += 1
        if asked.stream:
            return StreamingResponse(self._stream(asked, f"naive-{self._count}"), media_type="text/event-stream")
        texts, count, reason = [], 0, "length"
        async for text, tokens, finish in self._tokens(asked):
            texts.append(text)
            count, reason = tokens, finish or reason
        frame = self._frame(asked, f"naive-{self._count}", "".join(texts), reason, whole=True)
        return JSONResponse(frame | {"usage": self._usage(asked, count)})

    def _parse(self, body: dict[str, Any], *, chat: bool) -> _Asked:
        if chat:
            text = self._template.render(body["messages"], add_generation_prompt=True)
            ids = self._tokenizer.encode(text, add_special=False)
        else:
            prompt = body["prompt"]
            ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        if not ids or len(ids) >= self._loop.max_model_len:
            raise InvalidInput(f"needs 1 to {self._loop.max_model_len - 1} tokens, got {len(ids)}", field="prompt")
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        sampling = Sampling(
            max_tokens=int(asked),
            temperature=float(body.get("temperature", 1.0)),
            seed=int(body.get("seed") or 0),
            ignore_eos=bool(body.get("ignore_eos")),
            eos_token_ids=tuple(self._eos),
        )
        options = body.get("stream_options") or {}
        if options.get("continuous_usage_stats"):
            raise InvalidInput("is not supported", field="stream_options.continuous_usage_stats")
        return _Asked(tuple(ids), sampling, chat, bool(body.get("stream")), bool(options.get("include_usage")))

    async def _tokens(self, asked: _Asked) -> AsyncIterator[tuple[str, int, str]]:
        """(text, tokens so far, finish reason or "") for each token, computed in a thread, one request at a time."""
        from headrace.text.detokenize import Detokenizer

        detokenizer = Detokenizer(self._tokenizer, continuation=not asked.chat)
        async with self._turn:
            tokens = self._loop.generate(asked.prompt, asked.sampling)
            count, finish = 0, ""
            while not finish:
                token, finish = await asyncio.to_thread(next, tokens)
                count += 1
                text = "" if finish == "stop" else detokenizer.push_one(token)
                yield text + (detokenizer.flush() if finish else ""), count, finish

    async def _stream(self, asked: _Asked, request_id: str) -> AsyncIterator[bytes]:
        count = 0
        try:
            async for text, tokens, finish in self._tokens(asked):
                count = tokens
                if text or finish:
                    yield _event(self._frame(asked, request_id, text, finish or None, whole=False))
        except HeadraceError as error:
            yield _event({"error": {"message": str(error), "type": "server_error"}})
            return
        if asked.usage:
            frame = self._frame(asked, request_id, "", None, whole=False)
            yield _event(frame | {"choices": [], "usage": self._usage(asked, count)})
        yield b"data: [DONE]\n\n"

    def _frame(self, asked: _Asked, request_id: str, text: str, finish: str | None, *, whole: bool) -> dict[str, Any]:
        if asked.chat:
            part: dict[str, Any] = {"message" if whole else "delta": {"role": "assistant", "content": text}}
            kind = "chat.completion" if whole else "chat.completion.chunk"
        else:
            part, kind = {"text": text}, "text_completion"
        choice = {"index": 0, "finish_reason": finish, "logprobs": None} | part
        return {"id": request_id, "object": kind, "created": int(time.time()), "model": self._name, "choices": [choice]}

    def _usage(self, asked: _Asked, count: int) -> dict[str, int]:
        prompt = len(asked.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def _event(frame: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(frame).encode() + b"\n\n"


def main(argv: list[str] | None = None) -> None:
    """Serve a model until interrupted."""
    parser = argparse.ArgumentParser(prog="headrace.engine.naive", description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", default="")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--kv-cache", action=argparse.BooleanOptionalAction, default=True)
    a = parser.parse_args(argv)
    config = EngineConfig(
        model=a.model, backend=a.backend, weights=a.weights, kv=a.kv, threads=a.threads, load_format=a.load_format,
        max_model_len=a.max_model_len,
    )  # fmt: skip
    files = locate(a.model)
    loop = load(config, kv_cache=a.kv_cache, files=files)
    import uvicorn

    server = NaiveServer(loop, files, a.served_model_name or files.name)
    try:
        uvicorn.run(server.app(), host=a.host, port=a.port, log_level="warning")
    finally:
        loop.close()


if __name__ == "__main__":
    main()
