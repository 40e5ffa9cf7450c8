"""The shapes of answers, for the OpenAPI document. Answers are written directly; tests hold them against these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorBody(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape):
    error: ErrorBody


class PromptTokensDetails(Shape):
    cached_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class UsageSoFar(Shape):
    """Tokens of a chunk's choice so far (`continuous_usage_stats`)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobsShape(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(Shape):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobsShape | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UsageSoFar | None = None
    explain: dict[str, Any] | None = None


class TopToken(Shape):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenEntry(TopToken):
    top_logprobs: list[TopToken]


class ChatLogprobs(Shape):
    content: list[TokenEntry] | None
    refusal: list[TokenEntry] | None


class CalledFunction(Shape):
    name: str
    arguments: str


class Called(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[Called] | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Shape):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    explain: dict[str, Any] | None = None


class FunctionDelta(Shape):
    name: str | None = None
    arguments: str | None = None


class CalledDelta(Shape):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class Delta(Shape):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CalledDelta] | None = None


class ChatChunkChoice(Shape):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Shape):
    """One event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UsageSoFar | None = None
    prompt_logprobs: PromptLogprobs | None = None
    explain: dict[str, Any] | None = None


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(Shape):
    prompt: str


class TokenizerInfo(Shape):
    """Special tokens as text; null where the model has none."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    vocab_size: int
    model_max_length: int
    chat_template: str | None


class Health(Shape):
    status: Literal["ok", "unavailable"]
    state: Literal["starting", "ready", "restarting", "draining", "dead"]
    model: str | None = None
    backend: str | None = None
    notes: list[str] | None = None


class Engine(Shape):
    """`info`: fields of `headrace.control.api.EngineInfo`; `stats`: of `EngineStats`."""

    info: dict[str, Any]
    stats: dict[str, Any]


class Done(Shape):
    status: Literal["ok"]
