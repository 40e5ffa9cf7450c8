"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from headrace.serve.protocol.sampling import MAX_LOGPROBS, OTHER_SERVERS, SamplingFields, TokenId

PromptText = Annotated[str, Field(min_length=1)]
PromptIds = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(SamplingFields):
    """Continue one or more prompts given as text or as token ids."""

    UNSUPPORTED: ClassVar = OTHER_SERVERS | {
        "suffix": "this model completes text, it does not fill a gap before a suffix"
    }

    model: str
    prompt: (
        PromptText
        | PromptIds
        | Annotated[list[PromptText], Field(min_length=1)]
        | Annotated[list[PromptIds], Field(min_length=1)]
    )
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="Default 16; clamped to what the context leaves.")
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=128, description="Only as many as n.")
