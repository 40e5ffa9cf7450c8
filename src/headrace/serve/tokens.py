"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.serve.admission import check_ids
from headrace.serve.exchange import Answer, Call, json_response
from headrace.serve.front import Front
from headrace.serve.messages import render
from headrace.serve.protocol.tokens import DetokenizeRequest, TokenizeMessages, TokenizeText


class Tokenize:
    """Text or messages to token ids."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, call: Call) -> Answer:
        front = self._front
        request = _parse(front, call.body)
        front.check_model(request.model)
        if isinstance(request, TokenizeText):
            text, special = request.prompt, request.add_special_tokens is not False
        else:
            prompted = request.add_generation_prompt is not False
            text = await front.threads.run(
                render,
                front.template,
                request.messages,
                None,
                add_generation_prompt=prompted,
                variables=request.chat_template_kwargs,
            )
            special = False
        ids = await front.threads.run(front.tokenizer.encode, text, add_special=special)
        return json_response({"count": len(ids), "max_model_len": front.engine.info.max_model_len, "tokens": ids})


def _parse(front: Front, body: bytes) -> TokenizeText | TokenizeMessages:
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        content = None  # what is wrong with it is told below
    if isinstance(content, dict) and content.get("messages") is not None:
        return front.parse(TokenizeMessages, body)
    return front.parse(TokenizeText, body)


class Detokenize:
    """Token ids to text, special tokens included."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, call: Call) -> Answer:
        front = self._front
        request = front.parse(DetokenizeRequest, call.body)
        front.check_model(request.model)
        check_ids(request.tokens, front.engine.info.vocab_size, "tokens")
        text = await front.threads.run(front.tokenizer.decode, request.tokens, skip_special=False)
        return json_response({"prompt": text})


def tokenizer_info(front: Front) -> dict[str, Any]:
    """What a client needs to know of the tokenizer beside the other two: special tokens as text, and the chat template.

    With the three a client can work on tokens without files of the model; lm-eval's `tokenizer_backend=remote` does.
    """
    roles = ("bos_token", "eos_token", "pad_token", "unk_token")
    sources = front.template.sources
    return {role: front.tokenizer.special_tokens.get(role) for role in roles} | {
        "vocab_size": front.engine.info.vocab_size,
        "model_max_length": front.engine.info.max_model_len,
        "chat_template": sources.get("default") or next(iter(sources.values()), None),
    }
