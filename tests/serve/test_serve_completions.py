async def test_answers_text(served):
    served.engine.say(" world, hello")
    body = await served.complete("hello", max_tokens=50)
    assert body["choices"] == [{"index": 0, "text": " world, hello", "logprobs": None, "finish_reason": "stop"}]


async def test_chat(served):
    served.engine.say("Hi there")
    body = await served.chat("hello")
    assert body["choices"][0]["message"]["content"] == "Hi there"
    events = await served.events("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "Hi there"
