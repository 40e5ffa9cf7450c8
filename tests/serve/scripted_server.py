"""A real server process over a scripted engine whose tokens take `argv[1]` seconds each, with `argv[2]` to drain; prints its port."""

import asyncio
import socket
import sys

from scripted_engine import ScriptedEngine

from headrace.serve.app import create_app
from headrace.serve.config import ServeConfig
from headrace.serve.server import run
from headrace.spec.locate import locate
from headrace.text.load import load_template, load_tokenizer


async def main() -> None:
    files = locate("smollm2-135m")
    tokenizer = load_tokenizer(files)
    engine = ScriptedEngine(tokenizer)
    engine.pause_s = float(sys.argv[1])
    config = ServeConfig(served_names=("tiny",), eos_token_ids=(2,))
    app = create_app(engine, tokenizer, load_template(files, tokenizer), config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asyncio.get_running_loop().call_later(0.3, lambda: print("port", port, flush=True))
    await run(app, host="127.0.0.1", port=port, drain_s=float(sys.argv[2]), stall_limit_s=300.0)


asyncio.run(main())
