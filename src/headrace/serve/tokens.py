"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from headrace.serve.admission import check_ids
from headrace.serve.errors import bad_field
from headrace.serve.exchange import Answer, Call, json_response
from headrace.serve.front import Front
from headrace.serve.messages import render
from headrace.serve.protocol.strict import parse
from headrace.serve.protocol.tokens import DetokenizeRequest, TokenizeRequest


class Tokenize:
    """Text or messages to token ids."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, call: Call) -> Answer:
        front = self._front
        request = parse(TokenizeRequest, call.body)
        front.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise bad_field("prompt", "Send either prompt or messages.")
        if request.messages is None:
            if request.add_generation_prompt is not None:
                raise bad_field("add_generation_prompt", "add_generation_prompt needs messages.")
            text, special = request.prompt or "", request.add_special_tokens is not False
        else:
            if request.add_special_tokens is not None:
                raise bad_field("add_special_tokens", "add_special_tokens needs prompt: the template writes its own.")
            prompted = request.add_generation_prompt is not False
            text = await front.threads.run(
                render, front.template, request.messages, None, add_generation_prompt=prompted
            )
            special = False
        ids = await front.threads.run(front.tokenizer.encode, text, add_special=special)
        return json_response({"count": len(ids), "max_model_len": front.engine.info.max_model_len, "tokens": ids})


class Detokenize:
    """Token ids to text, special tokens included."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, call: Call) -> Answer:
        front = self._front
        request = parse(DetokenizeRequest, call.body)
        front.check_model(request.model)
        check_ids(request.tokens, front.engine.info.vocab_size, "tokens")
        text = await front.threads.run(front.tokenizer.decode, request.tokens, skip_special=False)
        return json_response({"prompt": text})
