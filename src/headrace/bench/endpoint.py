"""An OpenAI-compatible endpoint: where it is, how to ask it, and what a probe found out about it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from headrace.base.errors import InvalidInput
from headrace.bench.prompts import PromptWriter, common_words
from headrace.bench.records import MOST_TOKENS

Kind = Literal["chat", "completions"]


class EndpointError(Exception):
    """The endpoint did not answer as an OpenAI-compatible server; the run cannot start (exit code 3)."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go and what they carry.

    `force_length`: requests ask for exactly their output length (`ignore_eos`); `chunk_usage`: the server counts tokens
    on each chunk when asked. Both are found by `probe`. `extra`: further body fields of every request.
    """

    url: str
    model: str
    kind: Kind = "chat"
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 600.0
    include_usage: bool = True
    chunk_usage: bool = False
    force_length: bool = False
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"

    def body(self, prompt: Any, output_tokens: int) -> dict[str, Any]:
        """The JSON body of a streamed request; `prompt` is a list of message dicts, a text or token ids."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": output_tokens, "temperature": 0.0}
        body["messages" if self.kind == "chat" else "prompt"] = prompt
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
            if self.chunk_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        if self.force_length:
            body["ignore_eos"] = True
        return body | dict(self.extra)


def parse_url(url: str) -> str:
    """The base of an endpoint URL without a trailing slash, `/v1` or path of a completion; anything but http(s)://host is refused."""
    parts = urlsplit(url)
    try:
        reachable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, or too large a one
        reachable = False
    if not reachable:
        raise InvalidInput(f"expected http://HOST:PORT, got {url!r}", field="--url")
    return re.sub(r"/v1(/chat)?(/completions)?$", "", url.rstrip("/"))


Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class UsageDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class Usage(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: UsageDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


@dataclass(frozen=True, slots=True)
class Probe:
    """What the probe found: the endpoint with its abilities set, a writer fitted to its tokenizer, its context length."""

    endpoint: Endpoint
    writer: PromptWriter
    max_context: int | None
    notes: tuple[str, ...]


async def find_model(session: aiohttp.ClientSession, base: str, headers: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """The first card of `/v1/models`, or an empty dict where the endpoint does not list models."""
    try:
        async with session.get(f"{base}/v1/models", headers=dict(headers)) as response:
            if response.status != 200:
                return {}
            cards = (await response.json(content_type=None)).get("data") or []
            return dict(cards[0]) if cards else {}
    except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError, LookupError, TypeError):
        return {}


async def probe(endpoint: Endpoint, *, natural_length: bool = False, writer: PromptWriter | None = None) -> Probe:
    """Ask the endpoint a few one-token questions before a run; without a model name the first one it lists is taken.

    They find: whether it accepts `ignore_eos` and per-chunk usage, how many tokens a chat template adds, and whether
    each of our words is one token (two requests: all words once and all words twice). Raises `EndpointError` when even
    the plainest request fails, with the server's own message.
    """
    timeout = aiohttp.ClientTimeout(total=min(120.0, endpoint.timeout_s))
    # One connection per question: some servers close an idle one just as it is chosen again.
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
        notes: list[str] = []
        card = await find_model(session, endpoint.url, endpoint.headers)
        endpoint = endpoint if endpoint.model else replace(endpoint, model=str(card.get("id", "")))
        error = await _accepts(session, endpoint)
        if error:
            without = replace(endpoint, include_usage=False)
            if await _accepts(session, without):
                raise EndpointError(f"{endpoint.url}{endpoint.path} refused a plain request: {error}")
            endpoint = without
            notes.append("the endpoint refuses stream_options: token counts are those of the events")
        if not natural_length:
            forced = replace(endpoint, force_length=True)
            if await _accepts(session, forced):
                notes.append("the endpoint refuses ignore_eos: answers may end early, lengths are not checked")
            else:
                endpoint = forced
        if endpoint.include_usage:
            counted = replace(endpoint, chunk_usage=True)
            if not await _accepts(session, counted):
                endpoint = counted
        if writer is None:
            writer = await _fit_writer(session, endpoint)
        notes.append(f"prompt tokens: {writer.source}")
        meta = card.get("meta")
        context = card.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
        known = isinstance(context, int) and context > 0
        return Probe(endpoint, writer, context if known else None, tuple(notes))


async def _accepts(session: aiohttp.ClientSession, endpoint: Endpoint) -> str:
    """Empty when a two-token request is answered with 200 and no error event, else what the server said."""
    body = endpoint.body(_as_prompt(endpoint.kind, "Say hello"), 2)
    try:
        url = endpoint.url + endpoint.path
        async with session.post(url, json=body, headers=dict(endpoint.headers)) as response:
            text = await response.text(errors="replace")
            if response.status != 200:
                return f"{response.status} {text[:300]}"
            return text[:300] if '"error"' in text and '"choices"' not in text else ""
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"


async def _fit_writer(session: aiohttp.ClientSession, endpoint: Endpoint) -> PromptWriter:
    words = common_words()
    once = await _prompt_tokens(session, endpoint, " ".join(words))
    twice = await _prompt_tokens(session, endpoint, " ".join((*words, *words)))
    if once is None or twice is None or twice <= once:
        return PromptWriter(words)
    per_word = (twice - once) / len(words)
    template = once - (twice - once)
    further = 0
    if endpoint.kind == "chat":
        pair = [{"role": "system", "content": words[0]}, {"role": "user", "content": " ".join(words)}]
        together = await _prompt_tokens(session, endpoint, pair)
        further = max(0, together - once - round(per_word)) if together is not None else 0
    exact = twice - once == len(words)
    how = "each word is one token, checked" if exact else f"{per_word:.3f} tokens per word, measured"
    return PromptWriter(words, 1.0 if exact else per_word, max(0, template), further, None, f"{how} through usage")


async def _prompt_tokens(session: aiohttp.ClientSession, endpoint: Endpoint, prompt: Any) -> int | None:
    body = endpoint.body(_as_prompt(endpoint.kind, prompt) if isinstance(prompt, str) else prompt, 1)
    body.pop("stream_options", None)
    body["stream"] = False
    try:
        async with session.post(endpoint.url + endpoint.path, json=body, headers=dict(endpoint.headers)) as response:
            if response.status != 200:
                return None
            return int((await response.json(content_type=None))["usage"]["prompt_tokens"])
    except (KeyError, TypeError, ValueError, aiohttp.ClientError, TimeoutError):
        return None


def _as_prompt(kind: Kind, text: str) -> Any:
    return [{"role": "user", "content": text}] if kind == "chat" else text
