"""`headrace serve`: an OpenAI-compatible server over an engine in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headrace.base.errors import InvalidInput
from headrace.cli._declared import ENGINE, ChatTemplateFile, Command, GenerationConfig, Option
from headrace.spec.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    import typer
    from starlette.types import ASGIApp

    from headrace.serve.config import ServeConfig
    from headrace.spec.locate import ModelFiles
    from headrace.text.template import ChatTemplate
    from headrace.text.tokenizer import Tokenizer


def serve(
    *,
    host: Annotated[str, Option("Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option("Port to listen on.", least=1, most=65535)] = 8000,
    served_model_name: Annotated[
        list[str], Option("Name that clients use for the model; the first is the one in answers. May be repeated.")
    ] = [],  # noqa: B006
    api_key: Annotated[
        list[str],
        Option("Key that clients must send. May be repeated; HEADRACE_API_KEY adds more, comma-separated."),
    ] = [],  # noqa: B006
    api_key_file: Annotated[Path | None, Option("File with more keys, one per line.")] = None,
    generation_config: GenerationConfig = True,
    chat_template: ChatTemplateFile = None,
    max_waiting: Annotated[int, Option("Sequences that may wait before clients get 429.")] = 512,
    max_sequences: Annotated[int, Option("Most sequences in one request: prompts times n.")] = 256,
    max_body_bytes: Annotated[int, Option("Largest request body.")] = 8 * 2**20,
    request_limit_s: Annotated[float, Option("Seconds after which a request ends with an error.")] = 1800.0,
    stall_limit_s: Annotated[
        float, Option("Seconds after which a client that reads nothing of its answer is disconnected.")
    ] = 300.0,
    drain_s: Annotated[float, Option("Seconds that running requests may take after SIGTERM.")] = 30.0,
    cors_origin: Annotated[list[str], Option("Origin that browsers may call from. May be repeated.")] = [],  # noqa: B006
    ignore_unknown_fields: Annotated[
        bool,
        Option("Ignore unknown request fields instead of refusing them.", "--ignore-unknown-fields"),
    ] = False,
    tokenizer_threads: Annotated[int, Option("Threads that encode and decode text.", least=1)] = 2,
    access_log: Annotated[bool, Option("Log every request.", "--access-log")] = False,
    log_level: Annotated[str, Option("debug, info, warning or error.")] = "info",
    config: EngineConfig,
) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    import logging
    import os

    level = logging.getLevelName(log_level.upper())
    if not isinstance(level, int):
        raise InvalidInput(f"{log_level!r} is not debug, info, warning or error", field="log_level")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    from headrace.cli._address import check_address
    from headrace.serve.config import SamplingDefaults, ServeConfig
    from headrace.serve.keys import load_keys
    from headrace.spec.locate import locate

    check_address(host, port)
    keys = load_keys(api_key, os.environ.get("HEADRACE_API_KEY"), api_key_file)
    files = locate(config.model, revision=config.revision, cached=config.cache)
    recommended = files.sampling() if generation_config else {}
    logging.getLogger("headrace.serve").info(
        "sampling where a request sets none: %s",
        ", ".join(f"{name} {value:g}" for name, value in recommended.items()) + " as the model recommends"
        if recommended
        else "temperature 1 and nothing else, OpenAI's defaults",
    )
    settings = ServeConfig(
        served_names=tuple(served_model_name) or (files.name,),
        eos_token_ids=files.spec().eos_token_ids,
        sampling_defaults=SamplingDefaults.of(recommended),
        api_keys=keys,
        max_body_bytes=max_body_bytes,
        max_waiting=max_waiting,
        max_sequences=max_sequences,
        request_limit_s=request_limit_s,
        stall_limit_s=stall_limit_s,
        drain_s=drain_s,
        cors_origins=tuple(cors_origin),
        tokenizer_threads=tokenizer_threads,
        ignore_unknown_fields=ignore_unknown_fields,
    )

    import uvloop

    uvloop.run(_serve(config, settings, files, chat_template, host, port, access_log))


async def _serve(
    config: EngineConfig,
    settings: ServeConfig,
    files: ModelFiles,
    chat_template: Path | None,
    host: str,
    port: int,
    access_log: bool,
) -> None:
    import asyncio
    import logging
    from dataclasses import replace

    from headrace.engine.process import EngineProcessClient

    log = logging.getLogger("headrace.serve")
    engine = EngineProcessClient(config)
    # While the engine loads in its own process, this one gets ready to talk.
    starting = asyncio.create_task(engine.start())
    try:
        tokenizer, template = await asyncio.to_thread(_texts, files, chat_template)
        pages = await asyncio.to_thread(_pages)
        from headrace.serve.app import create_app
        from headrace.serve.server import run

        info = await starting
        if not settings.eos_token_ids:
            settings = replace(settings, eos_token_ids=tokenizer.eos_token_ids)
        app = create_app(engine, tokenizer, template, settings, mounts=pages)

        def listening() -> None:
            log.info(
                "serving %s (%s, weights %s, context %s, %s of KV pool) on http://%s:%d/v1",
                settings.served_names[0],
                info.backend,
                info.weights_precision,
                f"{info.max_model_len:,}",
                f"{info.pool_tokens:,} tokens",
                host,
                port,
            )

        await run(
            app,
            host=host,
            port=port,
            access_log=access_log,
            drain_s=settings.drain_s,
            stall_limit_s=settings.stall_limit_s,
            listening=listening,
        )
    finally:
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        await engine.close()


def _texts(files: ModelFiles, chat_template: Path | None) -> tuple[Tokenizer, ChatTemplate]:
    from headrace.text.load import load_template, load_tokenizer

    tokenizer = load_tokenizer(files)
    return tokenizer, load_template(files, tokenizer, chat_template)


def _pages() -> Mapping[str, ASGIApp]:
    """Pages of other packages that the server shows beside the API."""
    from headrace.plan import web

    return {"/plan": web.app()}


COMMAND = Command(serve, {"config": ENGINE})


def register(app: typer.Typer) -> None:
    from headrace.cli._options import add

    add(app, "serve", COMMAND)
