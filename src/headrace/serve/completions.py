"""`POST /v1/completions`: continue prompts given as text or as token ids."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.control.step import TokenLogprobs
from headrace.serve.admission import check_ids
from headrace.serve.chunks import Chunks
from headrace.serve.errors import bad_field
from headrace.serve.exchange import Answer, Call, EventStream, json_response
from headrace.serve.front import Batch, Front, JsonDict
from headrace.serve.generation import Ending, Piece, Pieces, shown
from headrace.serve.logprobs import CompletionLogprobs, joined_logprobs, prompt_logprobs
from headrace.serve.protocol.completions import CompletionRequest
from headrace.serve.structured import answer_grammar
from headrace.text.stream import OutputText

DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class Prompt:
    """One prompt: its ids, and each token's text for an echo (empty when none is wanted)."""

    ids: tuple[int, ...]
    echo: tuple[str, ...] = ()


class Completions:
    """Answers completion requests."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, call: Call) -> Answer:
        front = self._front
        request = front.parse(CompletionRequest, call.body)
        model = front.check_model(request.model)
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        front.check(request, max_tokens)
        n = request.n or 1
        if request.best_of is not None and request.best_of != n:
            raise bad_field(
                "best_of", f"best_of is {request.best_of} and n is {n}; only best_of equal to n is offered."
            )
        given = _as_list(request)
        call.held.enter_context(front.gate.admit(len(given) * n, "prompt" if len(given) > 1 else "n"))
        prompts = await self._prompts(request, given)
        grammar = None
        if request.structured_outputs is not None:
            grammar = await front.threads.run(answer_grammar, request)
        asked = [] if request.prompt_logprobs is None else [request.prompt_logprobs]
        if request.echo and request.logprobs is not None:
            asked.append(request.logprobs)
        batch = front.batch(
            call,
            request,
            f"cmpl-{secrets.token_hex(16)}",
            model,
            [prompt.ids for prompt in prompts],
            prompt_param="prompt" if _is_single(request) else lambda i: f"prompt[{i}]",
            max_tokens=max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=max(asked, default=None),
            grammar=grammar,
            continuation=True,
        )
        writers = [_ChoiceWriter(front, request, i, prompts[i // n]) for i in range(len(batch.runs))]
        pieces = Pieces(batch.runs, front.gate, front.config.request_limit_s)
        if request.stream:
            return EventStream(pieces, _Chunks(batch, writers, request))
        parts: list[list[JsonDict]] = [[] for _ in writers]
        with pieces as source:
            for piece in await source.all():
                choice = writers[piece.index].write(piece)
                if choice is not None:
                    parts[piece.index].append(choice)
        body = _head(batch)
        body["choices"] = [_joined(choices) for choices in parts]
        endings = [writer.ending for writer in writers if writer.ending is not None]
        body["usage"] = batch.usage(endings)
        if request.explain:
            body["explain"] = batch.explanation(endings)
        return json_response(body)

    async def _prompts(self, request: CompletionRequest, given: Sequence[str | list[int]]) -> list[Prompt]:
        front = self._front
        texts = [item for item in given if isinstance(item, str)]
        encoded = iter(await front.threads.run(front.tokenizer.encode_batch, texts) if texts else ())
        prompts: list[Prompt] = []
        for i, item in enumerate(given):
            if isinstance(item, str):
                ids = tuple(next(encoded))
                if not ids:
                    raise bad_field("prompt", "The prompt has no tokens.")
            else:
                ids = tuple(item)
                check_ids(ids, front.engine.info.vocab_size, "prompt" if _is_single(request) else f"prompt[{i}]")
            echo: tuple[str, ...] = ()
            if request.echo and len(ids) < front.engine.info.max_model_len:  # longer ones are refused below
                added = (
                    isinstance(item, str)
                    and ids[0] == front.tokenizer.bos_token_id
                    and not item.startswith(front.tokenizer.special_tokens.get("bos_token", "\0"))
                )
                echo = await front.threads.run(self._token_texts, ids, added)
            prompts.append(Prompt(ids, echo))
        return prompts

    def _token_texts(self, ids: tuple[int, ...], added_bos: bool) -> tuple[str, ...]:
        """Each token's share of the prompt's text; a BOS that the tokenizer added by itself has none."""
        text: OutputText[None] = OutputText(self._front.tokenizer, skip_special=False, continuation=False)
        shown = ids[1:] if added_bos else ids
        tokens = text.push(shown).tokens + text.finish().tokens
        return ("",) * added_bos + tuple(token.text for token in tokens)


def _as_list(request: CompletionRequest) -> list[str | list[int]]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def _is_single(request: CompletionRequest) -> bool:
    return isinstance(request.prompt, str) or isinstance(request.prompt[0], int)


@dataclass(slots=True)
class _ChoiceWriter:
    """Writes the choices of one sequence: its echo before its first piece, then piece by piece."""

    front: Front
    request: CompletionRequest
    index: int
    prompt: Prompt
    ending: Ending | None = None
    _begun: bool = False
    _logprobs: CompletionLogprobs | None = field(default=None)

    def __post_init__(self) -> None:
        if self.request.logprobs is not None:
            self._logprobs = CompletionLogprobs(self.front.tokenizer, self.request.logprobs)

    def is_plain(self, piece: Piece) -> bool:
        """Whether a piece's choice is its text and nothing else."""
        asked = self.request.logprobs is not None or self.request.echo or self.request.prompt_logprobs is not None
        return piece.ending is None and bool(piece.text) and not asked

    def write(self, piece: Piece) -> JsonDict | None:
        """The choice for the next chunk; None when there is nothing to tell."""
        tokens: list[tuple[str, TokenLogprobs | None]] = []
        extra: JsonDict = {}
        text = piece.text
        if not self._begun:
            self._begun = True
            if self.request.echo:
                entries = (None, *piece.prompt_logprobs)
                shares = self.prompt.echo
                tokens += list(zip(shares, entries, strict=True)) if self._logprobs is not None else []
                text = "".join(shares) + text
            if self.request.prompt_logprobs is not None:
                extra["prompt_logprobs"] = prompt_logprobs(
                    piece.prompt_logprobs, self.front.tokenizer, self.request.prompt_logprobs
                )
        # Who reads log-probabilities counts tokens, so the one that ended the sequence has an entry too, with empty text.
        said = shown(piece.tokens) if self._logprobs is None else piece.tokens
        tokens += [(token.text, token.logprob) for token in said]
        self.ending = piece.ending
        if not text and not tokens and not extra and piece.ending is None:
            return None
        logprobs = None if self._logprobs is None else self._logprobs.take(tokens)
        return _choice(self.index, text, logprobs, None if piece.ending is None else piece.ending.reason) | extra


def _choice(index: int, text: str, logprobs: JsonDict | None, finish_reason: str | None = None) -> JsonDict:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _head(batch: Batch) -> JsonDict:
    return {"id": batch.request_id, "object": "text_completion", "created": batch.created, "model": batch.model}


class _Chunks(Chunks):
    """The events of a streamed answer; `explain` is on the last one."""

    def __init__(self, batch: Batch, writers: Sequence[_ChoiceWriter], request: CompletionRequest) -> None:
        super().__init__(batch, writers, request, _head(batch))
        self._writers = writers
        self._plain = [self.text_event(w.index, _choice(w.index, "", None), "text") for w in writers]

    def of(self, piece: Piece) -> list[bytes]:
        writer = self._writers[piece.index]
        if writer.is_plain(piece):
            return [self._plain[piece.index].of(piece.text, piece.completion_tokens)]
        choice = writer.write(piece)
        if choice is None:
            return []
        chunk = self.chunk(choice)
        self.count(chunk, piece.index, piece.completion_tokens)
        self.ended(chunk)
        return [msgspec.json.encode(chunk)]


def _joined(choices: Sequence[JsonDict]) -> JsonDict:
    """The chunks of one choice as the choice of a whole answer."""
    whole = {key: value for choice in choices for key, value in choice.items()}
    whole["text"] = "".join(choice["text"] for choice in choices)
    if choices[0]["logprobs"] is not None:
        whole["logprobs"] = joined_logprobs([choice["logprobs"] for choice in choices])
    return whole
