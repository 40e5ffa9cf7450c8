"""The server as `headrace serve` runs it, over `stub_engine`: `python stub_server.py PORT STEP_MS`."""

from __future__ import annotations

import sys

import uvloop

from headrace.engine.process import EngineProcessClient
from headrace.serve.app import create_app
from headrace.serve.config import ServeConfig
from headrace.serve.server import run
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate
from headrace.text.load import load_template, load_tokenizer

MODEL = "smollm2-135m"


async def serve(port: int, step_ms: str) -> None:
    engine = EngineProcessClient(EngineConfig(model=MODEL, options=(("step_ms", step_ms),)), core="stub_engine:launch")
    files = locate(MODEL)
    await engine.start()
    tokenizer = load_tokenizer(files)
    config = ServeConfig(served_names=(MODEL,), eos_token_ids=files.spec().eos_token_ids)
    try:
        app = create_app(engine, tokenizer, load_template(files, tokenizer), config)
        await run(app, host="127.0.0.1", port=port, drain_s=0, stall_limit_s=config.stall_limit_s)
    finally:
        await engine.close()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2]))
