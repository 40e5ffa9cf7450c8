"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.serve.protocol.chat import Message
from headrace.serve.protocol.sampling import TokenId
from headrace.serve.protocol.strict import StrictModel


class TokenizeRequest(StrictModel):
    """Text, or messages that first go through the chat template; exactly one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(None, description="For `prompt` only. Default true.")
    add_generation_prompt: bool | None = Field(None, description="For `messages` only. Default true.")


class DetokenizeRequest(StrictModel):
    """Token ids back to text; special tokens are written out."""

    model: str | None = None
    tokens: list[TokenId]
