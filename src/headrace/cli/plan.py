"""`headrace plan`: does it fit, how fast, what does it cost, which GPU wins - before renting one."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli._help import Verbs
from headrace.cli._plan_options import Target, target_options

if TYPE_CHECKING:
    from headrace.plan.deployment import Inputs

MODEL = Annotated[str, typer.Argument(help="catalog name, hub id, folder, .gguf or config.json", show_default=False)]
ENGINE = Annotated[str, typer.Option(help="headrace, vllm, sglang, tensorrt-llm or llama-cpp")]
ACCEPTANCE = Annotated[float, typer.Option(help="speculation: chance that a proposal is accepted")]
HITS = Annotated[float, typer.Option("--prefix-hit-rate", help="share of prompt tokens found in the prefix cache")]
PRICE = Annotated[float | None, typer.Option(help="dollars per GPU-hour instead of the catalog's", show_default=False)]
JSON = Annotated[bool, typer.Option("--json", help="print JSON on stdout")]


_LISTED = 15
"""Lines of a ranking, and of what it rejected."""


def register(app: typer.Typer) -> None:
    """Add the verb `plan` and its subcommands."""
    plan = Verbs(help="Predict memory, latency, users and dollars; no GPU needed.")
    app.add_typer(plan, name="plan")
    plan.command("fit")(fit)
    plan.command("perf")(perf)
    plan.command("rank")(rank)
    plan.command("simulate")(simulate)
    plan.command("report")(report)
    plan.command("validate")(validate)
    plan.command("refit")(refit)
    plan.command("gpus")(gpus)
    plan.command("models")(models)
    plan.command("web")(web)


@target_options
def fit(
    target: Target,
    context: Annotated[int | None, typer.Option(help="tokens of one request; default: the model's longest")] = None,
    users: Annotated[int | None, typer.Option(help="also report the longest context for this many users")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="print the derivation line by line")] = False,
    report: Annotated[Path | None, typer.Option(help="write a self-contained HTML report")] = None,
    as_json: JSON = False,
) -> None:
    """Memory: does it fit, how many users, which term limits."""
    from headrace.base.errors import InvalidInput
    from headrace.base.units import format_bytes
    from headrace.plan.fit import fit as plan_fit
    from headrace.plan.fit import max_context_for

    if context is not None and context < 1:
        raise InvalidInput(f"context must be at least 1, got {context}", field="context")
    inputs = target.inputs(max_model_len=context)
    if users is not None and users < 1:
        raise InvalidInput(f"users must be at least 1, got {users}", field="users")
    found = plan_fit(inputs, context)
    values = _plain(found)
    if users is not None:
        values["max_context_for_users"] = max_context_for(inputs, users)
    _notes(found.notes)
    if report is not None:
        _write_report(inputs, report)
    if as_json:
        if not explain:
            values.pop("explain")
        _print(values)
        return
    print(f"{found.subject}: {'fits' if found.fits else 'does not fit'} ({found.reason})")
    for item in found.items:
        outside = "" if item.inside else " (outside the fraction)"
        print(f"  {item.name:<24} {format_bytes(item.nbytes):>10}  {item.how}{outside}")
    print(
        f"  users at {found.context:,} tokens: {found.max_users}; longest context of one request: {found.max_context:,}"
    )
    if users is not None:
        print(f"  longest context for {users} users: {values['max_context_for_users']:,}")
    if explain:
        print("\n".join(found.explain))


@target_options
def perf(
    target: Target,
    isl: Annotated[int, typer.Option(help="prompt tokens")] = 1024,
    osl: Annotated[int, typer.Option(help="answer tokens")] = 256,
    concurrency: Annotated[int | None, typer.Option(help="requests in flight; default: as many as fit")] = None,
    acceptance: ACCEPTANCE = 0.7,
    prefix_hit_rate: HITS = 0.0,
    equal_lengths: Annotated[
        bool, typer.Option("--equal-lengths", help="all prompts and all answers have exactly these lengths")
    ] = False,
    shortest: Annotated[
        float, typer.Option(help="lengths are drawn uniformly from this share of --isl and --osl up to them")
    ] = 1.0,
    mixed_chunk: Annotated[
        bool, typer.Option("--mixed-chunk", help="sglang: steps that prefill also decode (its --enable-mixed-chunk)")
    ] = False,
    batch_wait_steps: Annotated[
        int,
        typer.Option(help="tensorrt-llm: decode steps that a prompt waits for others (its batch_wait_timeout_iters)"),
    ] = 0,
    batch_wait_share: Annotated[
        float,
        typer.Option(help="tensorrt-llm: or until they fill this share of a step (its batch_wait_max_tokens_ratio)"),
    ] = 0.0,
    poll_steps: Annotated[
        int, typer.Option(help="sglang: decode steps between checks for new requests (its --scheduler-recv-interval)")
    ] = 1,
    price: PRICE = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="also report what moves the price of a token")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="write a self-contained HTML report")] = None,
    as_json: JSON = False,
) -> None:
    """Latency, throughput and dollars at a load, each with a 90 % interval and a grade."""
    from headrace.plan.perf import perf as plan_perf
    from headrace.plan.search import tornado

    inputs = target.inputs(
        isl=isl,
        osl=osl,
        concurrency=concurrency,
        acceptance=acceptance,
        prefix_hit_rate=prefix_hit_rate,
        equal_lengths=equal_lengths,
        shortest=shortest,
        mixed_chunk=mixed_chunk,
        batch_wait_steps=batch_wait_steps,
        batch_wait_share=batch_wait_share,
        poll_steps=poll_steps,
        gpu_price_usd_h=price,
    )
    found = plan_perf(inputs)
    _notes(found.notes)
    if report is not None:
        _write_report(inputs, report)
    swings = tornado(inputs) if sensitivity else ()
    if as_json:
        _print(_plain(found) | ({"sensitivity": [_plain(s) for s in swings]} if sensitivity else {}))
        return
    print(found.subject)
    for name in (
        "ttft_ms",
        "tpot_ms",
        "output_tokens_per_s_per_gpu",
        "output_tokens_per_s",
        "usd_per_million_output_tokens",
        "usd_per_million_input_tokens",
    ):
        figure = getattr(found, name)
        text = "no price known" if figure is None else _figure(figure)
        print(f"  {name:<32} {text}")
    for s in swings:
        print(f"  {s.what:<32} ${s.low:.3f} .. ${s.high:.3f} per million output tokens")
    if not found.fits:
        print("  it does not fit: see headrace plan fit")


def rank(
    model: MODEL,
    preset: Annotated[
        str, typer.Option(help="premium-chat, async-agents, offline-batch, voice, code, documents")
    ] = "premium-chat",
    gpu: Annotated[list[str] | None, typer.Option(help="restrict to this GPU (repeatable)")] = None,
    gpus: Annotated[list[int] | None, typer.Option(help="GPU counts to try (repeatable); default 1, 2, 4, 8")] = None,
    pp: Annotated[list[int] | None, typer.Option(help="pipeline stages to try (repeatable); default 1 and 2")] = None,
    dp: Annotated[
        list[int] | None,
        typer.Option(help="attention replicas to try, for models with experts (repeatable); default 1, 2, 4, 8"),
    ] = None,
    weights: Annotated[
        list[str] | None, typer.Option(help="weight precisions to try (repeatable); default: auto and fp8")
    ] = None,
    kv: Annotated[
        list[str] | None, typer.Option(help="KV precisions to try (repeatable); default: auto and fp8")
    ] = None,
    engine: ENGINE = "vllm",
    isl: Annotated[int | None, typer.Option(help="prompt tokens instead of the preset's", show_default=False)] = None,
    osl: Annotated[int | None, typer.Option(help="answer tokens instead of the preset's", show_default=False)] = None,
    ttft_ms: Annotated[
        float | None, typer.Option(help="service level instead of the preset's", show_default=False)
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(help="service level instead of the preset's", show_default=False)
    ] = None,
    users: Annotated[int, typer.Option(help="requests that one instance must serve at once")] = 1,
    rate: Annotated[
        float | None,
        typer.Option(help="requests per second that a fleet must serve; its size is reported", show_default=False),
    ] = None,
    price: Annotated[list[str] | None, typer.Option(help="GPU=dollars per hour (repeatable)")] = None,
    as_json: JSON = False,
) -> None:
    """Rank GPUs, counts and precisions by dollars per million tokens; every rejection has its reason and a way out."""
    from headrace.base.errors import InvalidInput
    from headrace.plan.search import Need, layout_name
    from headrace.plan.search import rank as plan_rank
    from headrace.spec import hardware, workload

    chosen = workload.preset(preset)
    slo = workload.Slo(
        chosen.slo.ttft_ms if ttft_ms is None else ttft_ms, chosen.slo.tpot_ms if tpot_ms is None else tpot_ms
    )
    prices: dict[str, float] = {}
    for pair in price or []:
        name, equals, dollars = pair.partition("=")
        try:
            prices[hardware.find(name).id] = float(dollars)
        except ValueError:
            equals = ""
        if not equals:
            raise InvalidInput(f"--price takes GPU=dollars, got {pair!r}", field="price")
    found = plan_rank(
        Need.from_preset(
            model,
            chosen,
            isl=chosen.isl if isl is None else isl,
            osl=chosen.osl if osl is None else osl,
            slo=slo,
            engine=engine,
            gpus=tuple(gpu or ()),
            counts=tuple(gpus or (1, 2, 4, 8)),
            pp=tuple(pp or (1, 2)),
            dp=tuple(dp or (1, 2, 4, 8)),
            weights=tuple(weights or ("auto", "fp8")),
            kv=tuple(kv or ("auto", "fp8")),
            min_users=users,
            rate_rps=rate,
            prices=prices,
        )
    )
    _notes(found.notes)
    if as_json:
        _print(_plain(found))
        return
    for n, c in enumerate(found.candidates[:_LISTED], 1):
        bill = c.usd_per_million_output_tokens
        usd = "no price" if bill is None else f"${bill.value:.2f}/M"
        spread = "" if bill is None else f" ({bill.low:.2f} to {bill.high:.2f})"
        size = "" if c.fleet is None else f", fleet {c.fleet.instances} x {c.gpus}"
        print(
            f"{n:>2}. {c.gpus} x {c.gpu:<16} {layout_name(c):<14} {c.weights:<12} KV {c.kv:<5} batch {c.concurrency:<4} {usd:>10}{spread}  "
            f"TTFT {c.ttft_ms.value:.0f} ms, {c.tpot_ms.value:.1f} ms/token, {c.tpot_ms.grade}{size}"
        )
    if not found.candidates:
        print("nothing meets these service levels")
    _left_out(len(found.candidates))
    print(f"{len(found.rejected)} rejected:")
    for r in found.rejected[:_LISTED]:
        print(f"    {r.gpus} x {r.gpu} {layout_name(r)} {r.weights} KV {r.kv}: {r.reason} -> {r.change}")
    _left_out(len(found.rejected))


def _left_out(count: int) -> None:
    if count > _LISTED:
        print(f"    and {count - _LISTED} more (--json lists all)")


@target_options
def simulate(
    target: Target,
    arrivals: Annotated[str, typer.Option(help="closed, poisson or trace")] = "closed",
    isl: Annotated[int, typer.Option(help="prompt tokens (closed, poisson)")] = 1024,
    osl: Annotated[int, typer.Option(help="answer tokens (closed, poisson)")] = 256,
    spread: Annotated[float, typer.Option(help="lengths vary by this fraction")] = 0.1,
    concurrency: Annotated[int, typer.Option(help="requests in flight (closed)")] = 16,
    rate: Annotated[float, typer.Option(help="requests per second (poisson)")] = 1.0,
    trace: Annotated[str, typer.Option(help="shipped trace or file (trace)")] = "azure-conv",
    speed: Annotated[float, typer.Option(help="replay the trace this many times as fast")] = 1.0,
    requests: Annotated[int, typer.Option(help="how many requests")] = 100,
    ttft_ms: Annotated[float | None, typer.Option(help="service level for goodput", show_default=False)] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="service level for goodput", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="seed of arrivals and lengths")] = 0,
    as_json: JSON = False,
) -> None:
    """Run the engine's own scheduler on a virtual clock against the cost model: percentiles, goodput, prefix hits."""
    from headrace.base.errors import InvalidInput
    from headrace.plan.simulate import simulate as plan_simulate
    from headrace.spec import workload

    if requests < 1:
        raise InvalidInput(f"requests must be at least 1, got {requests}", field="requests")
    match arrivals:
        case "closed":
            stream = workload.burst(requests, isl, osl, seed, spread)
        case "poisson":
            stream = workload.poisson(rate, requests, isl, osl, seed, spread)
        case "trace":
            stream = workload.trace(trace, requests, speed)
        case _:
            raise InvalidInput(f"arrivals must be closed, poisson or trace, got {arrivals!r}", field="arrivals")
    found = plan_simulate(
        target.inputs(),
        stream,
        closed_loop=concurrency if arrivals == "closed" else None,
        slo=workload.Slo(ttft_ms, tpot_ms),
    )
    _notes(found.notes)
    if as_json:
        _print(_plain(found))
        return
    print(f"{found.requests} requests in {found.duration_s:.1f} simulated seconds, {found.steps} steps")
    for name in ("ttft_ms", "itl_ms", "tpot_ms"):
        p = getattr(found, name)
        print(f"  {name:<8} p50 {p.p50:.1f}  p90 {p.p90:.1f}  p95 {p.p95:.1f}  p99 {p.p99:.1f}  mean {p.mean:.1f}")
    print(f"  {found.output_tokens_per_s:.0f} output tokens/s, goodput {found.goodput_rps:.2f} requests/s")
    print(f"  prefix hits {found.prefix_hit_rate:.1%}, preemptions {found.preemptions}, refused {found.refused}")


@target_options
def report(
    target: Target,
    out: Annotated[Path, typer.Option(help="HTML file; PNG and SVG pictures go beside it with --pictures")],
    isl: Annotated[int, typer.Option(help="prompt tokens")] = 1024,
    osl: Annotated[int, typer.Option(help="answer tokens")] = 256,
    concurrency: Annotated[int, typer.Option(help="requests in flight")] = 16,
    preset: Annotated[str, typer.Option(help="service levels to draw and rank by")] = "premium-chat",
    price: PRICE = None,
    pictures: Annotated[Path | None, typer.Option(help="folder for each chart as PNG and SVG")] = None,
) -> None:
    """One self-contained HTML report with every chart; it opens offline."""
    inputs = target.inputs(isl=isl, osl=osl, concurrency=concurrency, gpu_price_usd_h=price)
    _write_report(inputs, out, preset, pictures)


def validate(
    points: Annotated[Path, typer.Argument(help="CSV of measured points", show_default=False)],
    markdown: Annotated[bool, typer.Option("--markdown", help="print the tables of the documentation")] = False,
    as_json: JSON = False,
) -> None:
    """Score the planner on measured runs. Rows that the calibration used are predicted without their model family."""
    from headrace.plan.validate import error_table, validate_file
    from headrace.spec.campaign import campaigns

    names = " or ".join(c.name for c in campaigns())
    print(
        f"note: settings that rows leave out are taken from the launch scripts of {names}, by model and lengths",
        file=sys.stderr,
    )
    found = validate_file(points)
    if as_json:
        _print(found)
        return
    if markdown:
        print(error_table(found))
        return
    memory = found["memory"]
    print(f"memory: {memory['answered']}/{memory['n']} answered, median error {memory['median_error']}, ", end="")
    print(f"wrong fit {memory['wrong_fit']}")
    for name in ("ttft", "tpot", "throughput"):
        m = found[name]
        print(
            f"{name}: {m['answered']}/{m['n']} answered, MAPE {m['mape']}, median {m['median']}, coverage {m['coverage90']}"
        )
    for family, errors in found["by_family"].items():
        print(f"  {family}: " + ", ".join(f"{k} {v['mape']} (n {v['n']})" for k, v in errors.items()))


def refit(
    points: Annotated[Path, typer.Argument(help="CSV of measured points", show_default=False)],
    out: Annotated[Path, typer.Option(help="where to write the calibration")],
    engine_points: Annotated[
        Path | None, typer.Option(help="CSV of measured points of further engines; only their own terms are fitted")
    ] = None,
) -> None:
    """Fit the efficiencies and intervals again (minutes)."""
    from headrace.plan.calibration import write
    from headrace.plan.fitting import calibrate, with_engine
    from headrace.plan.points import read_points

    measured = read_points(points)
    further = read_points(engine_points) if engine_points else []
    found = calibrate(measured)
    write(with_engine(found, further) if further else found, out)
    print(f"wrote {out}")


def gpus(as_json: JSON = False) -> None:
    """The hardware catalog, calibrated entries included."""
    from headrace.spec import hardware

    known = hardware.catalog()
    if as_json:
        _print({gid: _gpu(gpu) for gid, gpu in known.items()})
        return
    for gid, gpu in known.items():
        price = gpu.price()
        usd = "no price" if price is None else f"${price.value:.2f}/h"
        memory, bandwidth = gpu.figure("memory_gib").value, gpu.figure("bandwidth_gbs").value
        print(f"{gid:<18} {gpu.name:<50} {memory:>6.1f} GiB  {bandwidth:>5.0f} GB/s  {usd}")


def models(as_json: JSON = False) -> None:
    """The model catalog."""
    from headrace.spec import models as catalog

    known = catalog.catalog()
    if as_json:
        _print({m.id: {"family": m.family, "parameters": m.parameters, "aliases": m.aliases} for m in known.values()})
        return
    for m in known.values():
        print(f"{m.id:<28} {m.parameters / 1e9:>8.1f} B  {m.family:<12} {m.aliases[0] if m.aliases else ''}")


def web(
    port: Annotated[int, typer.Option(help="port on 127.0.0.1", min=1, max=65535)] = 8090,
    open_browser: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
) -> None:
    """Serve the planner's page on 127.0.0.1."""
    import webbrowser

    import uvicorn

    from headrace.cli._address import check_address
    from headrace.plan.web import app

    check_address("127.0.0.1", port)
    if open_browser:
        webbrowser.open(f"http://127.0.0.1:{port}/")
    print(f"planner on http://127.0.0.1:{port}/", file=sys.stderr)
    uvicorn.run(app(), host="127.0.0.1", port=port, log_level="warning")


def _write_report(inputs: Inputs, out: Path, preset: str = "premium-chat", pictures: Path | None = None) -> None:
    from headrace.plan.report import write_report

    for path in write_report(inputs, out, preset, pictures):
        print(f"wrote {path}", file=sys.stderr)


def _plain(value: Any) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain


def _print(values: Mapping[str, Any]) -> None:
    print(json.dumps(values, indent=2))


def _notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _figure(figure: Any) -> str:
    from headrace.spec.prediction import readable

    return f"{readable(figure.value)}  [{readable(figure.low)} .. {readable(figure.high)}]  {figure.grade}"


def _gpu(gpu: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(gpu), "figures": {name: asdict(figure) for name, figure in gpu.figures.items()}}
