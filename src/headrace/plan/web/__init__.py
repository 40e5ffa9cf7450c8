"""The planner's web page: one self-contained HTML file over a small JSON API, to serve alone or mounted under `/plan`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from headrace.base.errors import HeadraceError, InvalidInput
from headrace.plan.deployment import MOST, Inputs, find_model, named_weights, resolve
from headrace.plan.fit import fit_deployment, make_pool, rank_memory
from headrace.plan.perf import LOADS, perf_deployment
from headrace.spec import engine_facts, hardware, models
from headrace.spec.precision import KV_PRECISIONS
from headrace.spec.workload import PRESETS

INTEGERS = ("n_gpus", "isl", "osl", "concurrency", "context")
TEXTS = ("model", "gpu", "engine", "weights", "kv")
WEIGHTS = ("auto", "bf16", "fp8", "int8", "int4", "nf4", "mxfp4", "nvfp4")


def app() -> Starlette:
    """The page at `/` and its API under `api/`; every path is relative, so it can be mounted anywhere."""
    return Starlette(
        routes=[
            Route("/", _page),
            Route("/api/options", _options),
            Route("/api/fit", _fit),
            Route("/api/perf", _perf),
        ]
    )


async def _page(request: Request) -> Response:
    if not request.url.path.endswith("/"):
        return RedirectResponse(f"{request.url.path}/?{request.url.query}".rstrip("?"))
    text = resources.files(__package__).joinpath("page.html").read_text()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
    )
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})


async def _options(request: Request) -> Response:
    return _json(options())


async def _fit(request: Request) -> Response:
    return await _answer(fit_view, request)


async def _perf(request: Request) -> Response:
    return await _answer(perf_view, request)


async def _answer(view: Any, request: Request) -> Response:
    try:
        return _json(await run_in_threadpool(view, dict(request.query_params)))
    except HeadraceError as error:
        body = {"error": {"message": error.message, "field": error.field, "remedy": error.remedy}}
        return _json(body, 400 if isinstance(error, InvalidInput) else 422)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def options() -> dict[str, Any]:
    """What the page can choose from."""
    return {
        "models": sorted(models.catalog()),
        "gpus": [{"id": g.id, "name": g.name} for g in hardware.catalog().values()],
        "engines": [e.id for e in engine_facts.engines().values() if "memory" in e.sections],
        "weights": WEIGHTS,
        "kv": ["auto", *KV_PRECISIONS],
        "presets": [msgspec.to_builtins(p) for p in PRESETS.values()],
    }


def _inputs(query: Mapping[str, str]) -> tuple[Inputs, int | None]:
    """The question of a query string; the model must be of the catalog, so that no request reads the disk or the network."""
    values: dict[str, Any] = {}
    for name in TEXTS:
        if query.get(name):
            values[name] = query[name]
    for name in INTEGERS:
        if (cell := query.get(name)) is None or cell == "":
            continue
        try:
            number = int(cell)
        except ValueError:
            raise InvalidInput(f"{name} must be a whole number, got {cell[:40]!r}", field=name) from None
        if not 1 <= number <= MOST:
            raise InvalidInput(f"{name} must be from 1 to {MOST}, got {number}", field=name)
        values[name] = number
    for required in ("model", "gpu"):
        if required not in values:
            raise InvalidInput(f"{required} is missing", field=required)
    asked = values["model"]
    values["model"] = models.find(asked).id
    if values.get("weights", "auto") == "auto":
        values["weights"] = named_weights(asked, find_model(values["model"]).spec) or "auto"
    if price := query.get("price"):
        try:
            values["gpu_price_usd_h"] = float(price)
        except ValueError:
            raise InvalidInput(f"price must be a number, got {price[:40]!r}", field="price") from None
    context = values.pop("context", None)
    if context is not None:
        values["max_model_len"] = context
    return Inputs(**values), context


def fit_view(query: Mapping[str, str]) -> dict[str, Any]:
    """The memory plan, and KV bytes against context for the page's chart."""
    inputs, context = _inputs(query)
    d = resolve(inputs)
    found = fit_deployment(d, context)
    memory = rank_memory(d)
    pool = make_pool(d, memory.pool, memory.caches)
    longest = min(d.model.spec.max_context, 131_072)
    contexts = [1 << k for k in range(10, longest.bit_length())]
    users = inputs.concurrency or 16
    return {
        "fit": found,
        "kv": [{"context": c, "one": pool.request_bytes(c), "all": pool.request_bytes(c) * users} for c in contexts],
        "users": users,
    }


def perf_view(query: Mapping[str, str]) -> dict[str, Any]:
    """Times at the chosen load, and the same against load."""
    inputs, _ = _inputs(query)
    inputs = msgspec.structs.replace(inputs, max_model_len=None, isl=inputs.isl or 1024, osl=inputs.osl or 256)
    chosen = perf_deployment(resolve(inputs))
    series = []
    for load in LOADS:
        p = perf_deployment(resolve(msgspec.structs.replace(inputs, concurrency=load)))
        series.append({"load": load, "ttft_ms": p.ttft_ms, "tpot_ms": p.tpot_ms, "waiting": p.waiting})
    return {"perf": chosen, "series": series}
