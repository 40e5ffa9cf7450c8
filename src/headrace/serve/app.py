"""The ASGI application: an OpenAI-compatible API over one engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from headrace.control.api import EngineClient
from headrace.serve.chat import Chat
from headrace.serve.completions import Completions
from headrace.serve.config import ServeConfig
from headrace.serve.errors import ApiError
from headrace.serve.exchange import Answer, Answerer, Call, Endpoint, as_api_error, json_response
from headrace.serve.front import Front
from headrace.serve.gate import Gate
from headrace.serve.keys import KeyRing, RequireKey
from headrace.serve.metrics import Metrics
from headrace.serve.openapi import openapi_document
from headrace.serve.texts import TextThreads
from headrace.serve.tokens import Detokenize, Tokenize, tokenizer_info
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

OPEN_PATHS = ("/health", "/metrics", "/openapi.json")
"""Answered without a key: what load balancers, scrapers and client generators need."""


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    config: ServeConfig,
    mounts: Mapping[str, ASGIApp] | None = None,
) -> Starlette:
    """The application. `engine` must be ready; the caller closes it. `mounts`: further apps by path prefix, not behind
    the key. `app.state.gate` is the way in and out of draining (see `serve.server`)."""
    gate = Gate(engine, max_waiting=config.max_waiting, max_sequences=config.max_sequences)
    metrics = Metrics(engine, config.served_names[0])
    threads = TextThreads(config.tokenizer_threads)
    front = Front(engine, tokenizer, template, config, gate, metrics, threads)
    created = int(time.time())
    document = openapi_document(engine.info, config)

    def model_card(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "headrace",
            "max_model_len": engine.info.max_model_len,
        }

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [model_card(name) for name in config.served_names]})

    async def model(request: Request) -> Response:
        return json_response(model_card(front.check_model(request.path_params["model"])))

    async def health(request: Request) -> Response:
        state = "draining" if gate.draining else engine.state
        body: dict[str, object] = {"status": "ok" if state == "ready" else "unavailable", "state": state}
        if state != "starting":
            info = engine.info
            body |= {"model": info.model, "backend": info.backend, "notes": list(info.notes)}
        return json_response(body, 200 if state == "ready" else 503)

    async def show_engine(request: Request) -> Response:
        return json_response({"info": engine.info, "stats": engine.stats})

    async def show_tokenizer(request: Request) -> Response:
        return json_response(tokenizer_info(front))

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def show_openapi(request: Request) -> Response:
        return json_response(document)

    async def flush(call: Call) -> Answer:
        gate.check_open()
        await engine.flush_prefix_cache()
        return json_response({"status": "ok"})

    def post(path: str, answer: Answerer, *, takes_json: bool = True) -> Route:
        endpoint = Endpoint(
            answer, max_body_bytes=config.max_body_bytes, takes_json=takes_json, refused=metrics.refused
        )
        return Route(path, endpoint, methods=["POST"])

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        threads.close()

    routes = [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
        post("/v1/completions", Completions(front)),
        post("/v1/chat/completions", Chat(front)),
        post("/tokenize", Tokenize(front)),
        post("/detokenize", Detokenize(front)),
        Route("/tokenizer_info", show_tokenizer, methods=["GET"]),
        post("/reset_prefix_cache", flush, takes_json=False),
        Route("/health", health, methods=["GET"]),
        Route("/engine", show_engine, methods=["GET"]),
        Route("/metrics", show_metrics, methods=["GET"]),
        Route("/openapi.json", show_openapi, methods=["GET"]),
        *(Mount(path, mounted) for path, mounted in (mounts or {}).items()),
    ]
    open_paths = (
        *OPEN_PATHS,
        *(path.rstrip("/") for path in mounts or ()),
        *(f"{p.rstrip('/')}/" for p in mounts or ()),
    )
    ring = KeyRing(config.api_keys)
    middleware = [Middleware(RequireKey, ring=ring, open_paths=open_paths, refused=metrics.refused)]
    if config.cors_origins:
        cors = Middleware(
            CORSMiddleware, allow_origins=list(config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
        middleware.insert(0, cors)
    app = Starlette(
        routes=routes,
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _api_error},
    )
    app.state.gate = gate
    app.state.metrics = metrics
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Routing errors (404, 405) in OpenAI's shape, which say what is served."""
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow", "")
    text = {
        404: f"There is nothing at {request.url.path}; served: {_served(request.app)}.",
        405: f"{request.method} is not offered here; use {allowed}.",
    }
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = text.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})).response()


def _served(app: Starlette) -> str:
    """OpenAI's paths that are here, with their methods; the document has the others."""
    found = [
        f"{next(m for m in route.methods or () if m != 'HEAD')} {route.path}"
        for route in app.routes
        if isinstance(route, Route) and route.path.startswith("/v1/")
    ]
    return (
        ", ".join(sorted(found, reverse=True)).replace("{model:path}", "{model}") + "; GET /openapi.json has the rest"
    )


async def _api_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response()
