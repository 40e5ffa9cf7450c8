"""`POST /v1/chat/completions`: answer a conversation."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.serve.chunks import Chunks
from headrace.serve.errors import bad_field
from headrace.serve.exchange import Answer, Call, EventStream, json_response
from headrace.serve.front import Batch, Front, JsonDict
from headrace.serve.generation import Ending, Piece, Pieces, Token, shown
from headrace.serve.logprobs import chat_logprobs, prompt_logprobs
from headrace.serve.messages import render
from headrace.serve.protocol.chat import ChatRequest
from headrace.serve.structured import answer_grammar
from headrace.serve.tools import Arguments, CallReader, CallStart, Content, ToolEvent, tool_use


class Chat:
    """Answers chat completion requests."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, call: Call) -> Answer:
        front = self._front
        request = front.parse(ChatRequest, call.body)
        model = front.check_model(request.model)
        max_tokens = _max_tokens(request)
        front.check(request, max_tokens)
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_field("top_logprobs", "top_logprobs needs logprobs to be true.")
        call.held.enter_context(front.gate.admit(request.n or 1, "n"))
        use = tool_use(request)
        grammar = await front.threads.run(answer_grammar, request, use)
        text = await front.threads.run(
            render, front.template, request.messages, use, variables=request.chat_template_kwargs
        )
        ids = await front.threads.run(front.tokenizer.encode, text, add_special=False)
        if not ids:
            raise bad_field("messages", "The chat template turns these messages into no tokens.")
        batch = front.batch(
            call,
            request,
            f"chatcmpl-{secrets.token_hex(16)}",
            model,
            [tuple(ids)],
            prompt_param="messages",
            max_tokens=max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            grammar=grammar,
            continuation=False,
        )
        writers = [_ChoiceWriter(front, request, i, CallReader() if use else None) for i in range(len(batch.runs))]
        pieces = Pieces(batch.runs, front.gate, front.config.request_limit_s)
        if request.stream:
            return EventStream(pieces, _Chunks(batch, writers, request))
        answers = [_Message() for _ in writers]
        prompt_entries: JsonDict = {}
        with pieces as source:
            for piece in await source.all():
                writer = writers[piece.index]
                prompt_entries |= writer.prompt_logprobs(piece)
                for event in writer.read(piece):
                    answers[piece.index].take(event)
                answers[piece.index].tokens.extend(piece.tokens)
        endings = [writer.ending for writer in writers if writer.ending is not None]
        body = _head(batch, "chat.completion")
        body["choices"] = [
            {
                "index": writer.index,
                "message": answer.body(),
                "logprobs": writer.logprobs(answer.tokens),
                "finish_reason": writer.finish_reason,
            }
            for writer, answer in zip(writers, answers, strict=True)
        ]
        body["usage"] = batch.usage(endings)
        body |= prompt_entries
        if request.explain:
            body["explain"] = batch.explanation(endings)
        return json_response(body)


def _max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_field("max_tokens", f"max_tokens is {old} but max_completion_tokens is {new}; send one of them.")
    return old if new is None else new


@dataclass(slots=True)
class _Message:
    """The message of a whole answer, put together from its events."""

    text: str | None = None
    calls: list[JsonDict] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)

    def take(self, event: ToolEvent) -> None:
        match event:
            case Content(text):
                self.text = (self.text or "") + text
            case CallStart(_, call_id, name):
                self.calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case Arguments(index, text):
                self.calls[index]["function"]["arguments"] += text

    def body(self) -> JsonDict:
        message: JsonDict = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            message["tool_calls"] = self.calls
        elif self.text is None:
            message["content"] = ""
        return message


@dataclass(slots=True)
class _ChoiceWriter:
    """Turns the pieces of one sequence into events, and remembers how it ended."""

    front: Front
    request: ChatRequest
    index: int
    calls: CallReader | None
    ending: Ending | None = None
    begun: bool = False

    def is_plain(self, piece: Piece) -> bool:
        """Whether a piece is more text and nothing else."""
        return (
            self.begun
            and piece.ending is None
            and bool(piece.text)
            and self.calls is None
            and not self.request.logprobs
        )

    def read(self, piece: Piece) -> list[ToolEvent]:
        self.ending = piece.ending
        if self.calls is None:
            return [Content(piece.text)] if piece.text else []
        events = self.calls.read(piece.text)
        return events if piece.ending is None else events + self.calls.finish()

    @property
    def finish_reason(self) -> str | None:
        if self.ending is None:
            return None
        return "tool_calls" if self.ending.reason == "stop" and self.calls and self.calls.calls else self.ending.reason

    def logprobs(self, tokens: Sequence[Token]) -> JsonDict | None:
        if not self.request.logprobs:
            return None
        return chat_logprobs(shown(tokens), self.front.tokenizer, self.request.top_logprobs or 0)

    def prompt_logprobs(self, piece: Piece) -> JsonDict:
        """`prompt_logprobs` of the answer, with the first piece of its first choice, if they were asked for."""
        top, first = self.request.prompt_logprobs, not self.begun
        self.begun = True
        if top is None or not first or self.index:
            return {}
        return {"prompt_logprobs": prompt_logprobs(piece.prompt_logprobs, self.front.tokenizer, top)}


def _head(batch: Batch, kind: str) -> JsonDict:
    return {"id": batch.request_id, "object": kind, "created": batch.created, "model": batch.model}


def _delta(event: ToolEvent) -> JsonDict:
    match event:
        case Content(text):
            return {"content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class _Chunks(Chunks):
    """The events of a streamed answer: role, deltas, finish reason for each choice; then usage, if asked for."""

    def __init__(self, batch: Batch, writers: Sequence[_ChoiceWriter], request: ChatRequest) -> None:
        super().__init__(batch, writers, request, _head(batch, "chat.completion.chunk"))
        self._writers = writers
        self._logprobs = bool(request.logprobs)
        self._plain = [self.text_event(w.index, _choice(w, {"content": ""}), "content") for w in writers]

    def of(self, piece: Piece) -> list[bytes]:
        writer = self._writers[piece.index]
        if writer.is_plain(piece):
            return [self._plain[piece.index].of(piece.text, piece.completion_tokens)]
        chunks: list[JsonDict] = []
        if opening := not writer.begun:
            chunks.append(
                self._delta_chunk(writer, {"role": "assistant", "content": ""}) | writer.prompt_logprobs(piece)
            )
            self.count(chunks[0], piece.index, 0)
        deltas = [_delta(event) for event in writer.read(piece)]
        if not deltas and self._logprobs and shown(piece.tokens):
            deltas = [{}]  # tokens of text that is held back still have their log-probabilities
        for i, delta in enumerate(deltas):
            chunks.append(self._delta_chunk(writer, delta, writer.logprobs(piece.tokens) if i == 0 else None))
        if piece.ending is not None:
            last = self._delta_chunk(writer, {})
            last["choices"][0]["finish_reason"] = writer.finish_reason
            chunks.append(last)
        for chunk in chunks[opening:]:
            self.count(chunk, piece.index, piece.completion_tokens)
        if piece.ending is not None:
            self.ended(chunks[-1])
        return [msgspec.json.encode(chunk) for chunk in chunks]

    def _delta_chunk(self, writer: _ChoiceWriter, delta: JsonDict, logprobs: JsonDict | None = None) -> JsonDict:
        return self.chunk(_choice(writer, delta, logprobs))


def _choice(writer: _ChoiceWriter, delta: JsonDict, logprobs: JsonDict | None = None) -> JsonDict:
    return {"index": writer.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
