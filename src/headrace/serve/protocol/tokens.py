"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from headrace.serve.protocol.chat import Message
from headrace.serve.protocol.sampling import JsonObject, TokenId
from headrace.serve.protocol.strict import StrictModel


class TokenizeText(StrictModel):
    """Text to token ids."""

    UNSUPPORTED: ClassVar = {
        "messages": "send either prompt or messages",
        "add_generation_prompt": "it is for messages only",
    }

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = Field(None, description="Put BOS and the like around it. Default true.")


class TokenizeMessages(StrictModel):
    """Messages to the token ids that a chat completion would send."""

    UNSUPPORTED: ClassVar = {
        "prompt": "send either prompt or messages",
        "add_special_tokens": "the chat template writes its own special tokens",
    }

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    chat_template_kwargs: JsonObject | None = Field(None, description="Variables for the chat template.")
    add_generation_prompt: bool | None = Field(None, description="Up to where an answer begins. Default true.")


class DetokenizeRequest(StrictModel):
    """Token ids back to text; special tokens are written out."""

    model: str | None = None
    tokens: list[TokenId]
