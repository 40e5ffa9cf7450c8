"""An application over a scripted engine, in this process or behind a socket, and what tests ask of it."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import openai
import uvicorn

from headrace.serve.app import create_app
from headrace.serve.connection import connections

MODEL = "tiny"
EOS = (2,)


class Served:
    """An application over a scripted engine, with clients that speak to it inside this process."""

    def __init__(self, engine, tokenizer, template, config):
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.app = create_app(engine, tokenizer, template, config)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test", timeout=60)
        self.openai = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key=(config.api_keys or ("none",))[0], http_client=self.http, max_retries=0
        )

    async def post(self, path, **fields):
        return await self.http.post(path, json=fields)

    async def complete(self, prompt, **fields):
        """The body of a successful completion."""
        response = await self.post("/v1/completions", model=MODEL, prompt=prompt, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    async def chat(self, content, **fields):
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        response = await self.post("/v1/chat/completions", model=MODEL, messages=messages, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    async def refused(self, path="/v1/completions", status=400, **fields):
        """The `error` of a refusal."""
        response = await self.post(path, **({"model": MODEL} | fields))
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return SimpleNamespace(**error)

    async def events(self, path, **fields):
        """All events of a streamed answer; checks the framing."""
        response = await self.post(path, **({"model": MODEL, "stream": True} | fields))
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.text)


def parse_events(text):
    frames = text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames[:-1])
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


class Live(Served):
    """The same behind a real socket, served from the test's own event loop."""

    async def start(self):
        http = connections(self.config.stall_limit_s)
        config = uvicorn.Config(
            self.app, host="127.0.0.1", port=0, log_level="error", http=http, ws="none", loop="none"
        )
        self.server = uvicorn.Server(config)
        self.task = asyncio.create_task(self.server.serve())
        while not self.server.started:
            await asyncio.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        await self.http.aclose()
        self.http = httpx.AsyncClient(base_url=self.url, timeout=60)
        return self

    async def stop(self):
        await self.http.aclose()
        self.server.should_exit = True
        await self.task

    async def open(self, path, **fields):
        """Send a request and return the connection without reading the answer."""
        body = json.dumps({"model": MODEL} | fields).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n".encode()
            + f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        return reader, writer


async def until(condition):
    """Wait for a condition that must come true; the test's own time limit is the only one."""
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("this never came true")
