"""`headrace bench`: load tests with intervals against any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from headrace.base.errors import HeadraceError, InvalidInput
from headrace.bench.job import Job
from headrace.bench.load_options import LoadOptions
from headrace.cli._bench_options import load_options
from headrace.cli._help import Verbs
from headrace.cli._options import engine_options
from headrace.spec.config import EngineConfig
from headrace.spec.prediction import Prediction

Url = Annotated[str, typer.Option("--url", help="Base URL of an OpenAI-compatible endpoint.", show_default=False)]
TargetText = Annotated[
    str,
    typer.Option(
        "--target",
        help="Engine to start for the run: NAME[:setting=value,…] (see headrace bench targets).",
        show_default=False,
    ),
]
Model = Annotated[
    str, typer.Option("--model", help="Model name the endpoint serves, or model to start.", show_default=False)
]
Out = Annotated[Path, typer.Option("--out", help="New folder for records, summary and report.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")]
WithReport = Annotated[bool, typer.Option("--report/--no-report", help="Write report.html beside the summary.")]


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    bench = Verbs(help="Load tests with intervals against any OpenAI-compatible endpoint.")
    for command in (run, resume, ab, compare, ladder, offline, report_, import_, golden, workloads, targets):
        name = command.__name__.strip("_").replace("_", "-")
        bench.command(name)(_with_options(command))
    app.add_typer(bench, name="bench")


def _with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the options that its parameters `load` and `config` stand for."""
    if "load" in command.__annotations__:
        return load_options(command)
    return engine_options(command) if "config" in command.__annotations__ else command


def run(
    load: LoadOptions,
    out: Out,
    url: Url = "",
    target: TargetText = "",
    model: Model = "",
    repeats: Annotated[int, typer.Option(help="Whole runs, for intervals between runs.")] = 1,
    find_max: Annotated[bool, typer.Option("--find-max", help="Search for the highest rate that meets --slo.")] = False,
    plan: Annotated[
        str,
        typer.Option(
            help="Compare the figures with a plan: GPU[:tp=2,weights=fp8,model=NAME,…], or a file written by `headrace plan perf --json`."
        ),
    ] = "",
    as_json: AsJson = False,
    report: WithReport = True,
) -> None:
    """Send traffic and measure it. A list of rates or concurrencies makes a sweep."""
    job = Job.of("run", load, url=url, target=target, model=model, repeats=repeats, find_max=find_max, plan=plan)
    _conclude(out, _do_run(load, out, job, **job.options), as_json=as_json, report=report)


def _do_run(
    load: LoadOptions, out: Path, job: Job | None, *, url: str, target: str, model: str, repeats: int, find_max: bool,
    plan: str,
) -> dict[str, Any]:  # fmt: skip
    """`job`: what a new folder is begun with; None where the folder goes on."""
    from headrace.bench import series
    from headrace.bench.endpoint import parse_url
    from headrace.bench.run import check
    from headrace.bench.slo import Slo
    from headrace.bench.targets import TargetSpec, parse_target
    from headrace.bench.targets._process import open_target

    if bool(url) == bool(target):
        raise InvalidInput("give one of --url and --target", field="--url")
    if repeats < 1:
        raise InvalidInput(f"must be at least 1, got {repeats}", field="--repeats")
    swept, values = load.points()
    if sum((bool(values), repeats > 1, find_max)) > 1:
        raise InvalidInput("a sweep, --repeats and --find-max cannot be combined", field="--repeats", remedy="use one")
    if find_max and not load.slo:
        raise InvalidInput("is needed by --find-max", field="--slo", remedy="--slo ttft_p99<500ms,itl_p99<50ms")
    if find_max and load.concurrency:
        raise InvalidInput("has no meaning with --find-max", field="--concurrency")
    spec = TargetSpec("url", {}, parse_url(url)) if url else parse_target(target)
    settings = load.settings(model=model if url else "") if not values else load.point(swept, values[0])
    points = [(value, load.point(swept, value)) for value in values]
    start_rps = _start_of_search(load.rate) if find_max else 0.0
    for each in (load.point("rate", str(start_rps)),) if find_max else (settings, *(point for _, point in points)):
        check(each)
    if plan and (values or find_max):
        raise InvalidInput("needs a single load", field="--plan", remedy="without a sweep and --find-max")
    predict = _prediction(plan, model, "" if url else spec.name) if plan else None
    _begin(out, job)

    async def go() -> dict[str, Any]:
        with _progress(load) as watch:
            async with open_target(spec, model, out / "target.log") as running:
                shared: dict[str, Any] = {"target": running, "headroom": load.headroom, "natural": load.natural_length}
                if find_max:
                    return await series.search(settings, Slo.parse(load.slo), start_rps, out, watch, **shared)
                if points:
                    return await series.sweep(settings, points, swept, out, watch, **shared)
                if repeats > 1:
                    return await series.repeats(settings, repeats, out, watch, **shared)
                from headrace.bench.records import META_FILE
                from headrace.bench.run import resume as go_on
                from headrace.bench.run import run as once

                aimed = series.aimed(settings, running)
                if (out / META_FILE).exists():
                    return await go_on(out, watch, aim=aimed)
                return await once(aimed, out, watch, headroom=load.headroom, natural_length=load.natural_length)

    summary = _finish(go())
    if predict is not None:
        from headrace.bench.planned import set_beside

        summary = set_beside(out, summary, predict(summary))
    return summary


def _start_of_search(rate: str | None) -> float:
    """The rate that a search begins with."""
    try:
        return 1.0 if rate is None else float(rate)
    except ValueError:
        raise InvalidInput(
            f"{rate!r} is not a rate that a search can start from", field="--rate", remedy="give a number"
        ) from None


def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of an interrupted run, sweep, search, ab or ladder.")],
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", show_envvar=False, help="Key of the run, which is not stored."),
    ] = None,
    header: Annotated[
        list[str], typer.Option("--header", help="NAME: VALUE, a header that held a key; may be repeated.")
    ] = [],  # noqa: B006
    as_json: AsJson = False,
    report: WithReport = True,
) -> None:
    """Continue what was interrupted: finished runs and recorded requests stay, the rest is sent."""
    from headrace.bench.job import read_job
    from headrace.bench.run import resume as go_on

    async def go() -> dict[str, Any]:
        with _progress(None) as watch:
            return await go_on(folder, watch, api_key=api_key)

    job = read_job(folder)
    if job is None:
        _conclude(folder, _finish(go()), as_json=as_json, report=report)
        return
    match job.verb:
        case "run":
            load = job.load_options(api_key=api_key, header=tuple(header))
            _conclude(folder, _do_run(load, folder, None, **job.options), as_json=as_json, report=report)
        case "ab":
            load = job.load_options(api_key=api_key, header=tuple(header))
            found = _do_ab(load, folder, None, **job.options)
            _write_report(folder, report)
            _say_comparison(found, as_json)
        case "ladder":
            _say_ladder(folder, _do_ladder(folder, None, **job.options), as_json=as_json, report=report)


def ab(
    load: LoadOptions,
    a: Annotated[str, typer.Option("--a", help="First target: URL or NAME[:setting=value,…].")],
    b: Annotated[str, typer.Option("--b", help="Second target.")],
    out: Out,
    model: Model = "",
    model_b: Annotated[str, typer.Option(help="Model of the second target, where it has another name.")] = "",
    pairs: Annotated[int, typer.Option(help="Pairs of runs, an even number from 4.")] = 8,
    margin: Annotated[str, typer.Option(help="Loss that is acceptable, such as 5%.", show_default=False)] = "",
    metric: Annotated[str, typer.Option(help="The figure that decides.")] = "output_tokens_per_s",
    as_json: AsJson = False,
    report: WithReport = True,
) -> None:
    """Run two targets interleaved (A B B A) and judge B against A."""
    job = Job.of("ab", load, a=a, b=b, model=model, model_b=model_b, pairs=pairs, margin=margin, metric=metric)
    found = _do_ab(load, out, job, **job.options)
    _write_report(out, report)
    _say_comparison(found, as_json)


def _do_ab(
    load: LoadOptions, out: Path, job: Job | None, *, a: str, b: str, model: str, model_b: str, pairs: int, margin: str,
    metric: str,
) -> dict[str, Any]:  # fmt: skip
    """`job`: what a new folder is begun with; None where the folder goes on."""
    from headrace.bench import series
    from headrace.bench.compare import check_metric
    from headrace.bench.run import check
    from headrace.bench.stats import check_pairs, parse_share
    from headrace.bench.targets import parse_target
    from headrace.bench.targets._process import open_target

    if load.points()[1]:
        raise InvalidInput("a sweep cannot be interleaved", field="--rate" if load.rate else "--concurrency")
    settings, share = load.settings(), parse_share(margin, "--margin") if margin else None
    check(settings)
    specs = parse_target(a), parse_target(b)
    check_pairs(pairs)
    check_metric(metric)
    _begin(out, job)

    async def go() -> dict[str, Any]:
        with _progress(load) as watch:
            async with (
                open_target(specs[0], model, out / "target-a.log") as first,
                open_target(specs[1], model_b or model, out / "target-b.log") as second,
            ):
                for running, name in ((first, model), (second, model_b or model)):
                    if name and not running.info.get("engine"):
                        running.model = name
                return await series.interleaved(
                    settings,
                    first,
                    second,
                    (specs[0].label, specs[1].label),
                    pairs,
                    out,
                    watch,
                    margin=share,
                    primary=metric,
                    headroom=load.headroom,
                    natural=load.natural_length,
                )

    return _finish(go())


def compare(
    a: Annotated[Path, typer.Argument(help="Folder of the first run, or of its repeats.")],
    b: Annotated[Path, typer.Argument(help="Folder of the second run, or of its repeats.")],
    margin: Annotated[str, typer.Option(help="Loss that is acceptable, such as 5%.", show_default=False)] = "",
    metric: Annotated[str, typer.Option(help="The figure that decides.")] = "output_tokens_per_s",
    run_noise: Annotated[
        str, typer.Option(help="Noise between runs that is assumed where each side has one run.")
    ] = "3%",
    out: Annotated[Path | None, typer.Option("--out", help="New folder for the comparison and its report.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare finished runs: ratios with intervals, a verdict, and a mark where they were not interleaved."""
    import msgspec

    from headrace.base.files import write_atomic
    from headrace.bench.compare import COMPARISON_FILE, compare_folders
    from headrace.bench.stats import parse_share

    found = compare_folders(
        a,
        b,
        margin=parse_share(margin, "--margin") if margin else None,
        noise=parse_share(run_noise, "--run-noise"),
        primary=metric,
    )
    if out is not None:
        _new_folder(out)
        write_atomic(out / COMPARISON_FILE, msgspec.json.format(msgspec.json.encode(found), indent=1))
        _write_report(out, True)
    _say_comparison(found, as_json)


def ladder(
    model: Annotated[str, typer.Argument(help="Model to serve: known name, folder, .gguf file or hub id.")],
    out: Out,
    users: Annotated[str, typer.Option(help="Concurrent users, a list.")] = "1,4,8",
    contexts: Annotated[str, typer.Option(help="Prompt tokens, a list.")] = "256,1024",
    own: Annotated[int, typer.Option(help="Tokens of a prompt that no other has; the rest is shared.")] = 32,
    output: Annotated[int, typer.Option(help="Output tokens.")] = 32,
    requests: Annotated[int, typer.Option(help="Requests in each cell.")] = 16,
    repeats: Annotated[int, typer.Option(help="Times that everything is measured.")] = 3,
    weights: Annotated[str, typer.Option(help="Weight precisions, a list: the second axis.")] = "auto",
    engine: Annotated[
        list[str],
        typer.Option("--engine", help="NAME=VALUE, a setting of every step (threads, context, …); may be repeated."),
    ] = [],  # noqa: B006
    step: Annotated[list[str], typer.Option("--step", help="Only this step; may be repeated.")] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Seed of the words.")] = 0,
    idle_wait: Annotated[
        float, typer.Option(help="Seconds to wait before each cell for the host to become idle.")
    ] = 0.0,
    as_json: AsJson = False,
    report: WithReport = True,
) -> None:
    """Measure naive loop, engine and each technique, alone and stacked, against users and context."""
    job = Job.of(
        "ladder", model=model, users=users, contexts=contexts, own=own, output=output, requests=requests, repeats=repeats,
        weights=weights, engine=engine, step=step, seed=seed, idle_wait=idle_wait,
    )  # fmt: skip
    _say_ladder(out, _do_ladder(out, job, **job.options), as_json=as_json, report=report)


def _do_ladder(
    out: Path, job: Job | None, *, model: str, users: str, contexts: str, own: int, output: int, requests: int,
    repeats: int, weights: str, engine: list[str], step: list[str], seed: int, idle_wait: float,
) -> dict[str, Any]:  # fmt: skip
    """`job`: what a new folder is begun with; None where the folder goes on."""
    from headrace.bench.ladder import LadderSettings, climb

    settings = LadderSettings(
        model=model,
        users=_whole_numbers(users, "--users"),
        contexts=_whole_numbers(contexts, "--contexts"),
        own=own,
        output=output,
        requests=requests,
        repeats=repeats,
        weights=tuple(part.strip() for part in weights.split(",") if part.strip()),
        common=dict(_pair(text) for text in engine),
        seed=seed,
        only=tuple(step),
        idle_wait_s=idle_wait,
    )
    settings.check()
    _begin(out, job)

    async def go() -> dict[str, Any]:
        with _progress(None) as watch:
            return await climb(settings, out, watch)

    return _finish(go())


def _say_ladder(out: Path, found: dict[str, Any], *, as_json: bool, report: bool) -> None:
    import msgspec

    from headrace.bench.terminal import print_ladder

    _write_report(out, report)
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        print_ladder(found)


def offline(
    config: EngineConfig,
    requests: Annotated[int, typer.Option(help="Requests, all submitted at once.", min=1)] = 256,
    isl: Annotated[str, typer.Option(help="Prompt tokens, N or LOW:HIGH.")] = "128:1024",
    osl: Annotated[str, typer.Option(help="Output tokens, N or LOW:HIGH.")] = "128:512",
    request_seed: Annotated[int, typer.Option("--seed", help="Seed of the requests.")] = 0,
    prefix: Annotated[
        int, typer.Option(help="Tokens that all prompts share (isl and osl are then single numbers).")
    ] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="New folder for records and summary.")] = None,
    as_json: AsJson = False,
) -> None:
    """Throughput of an engine in this process, token ids in and out."""
    import msgspec

    from headrace.bench import offline as bench
    from headrace.bench.terminal import print_summary
    from headrace.bench.traffic import IntRange

    lengths, outputs = IntRange.parse(isl, "--isl"), IntRange.parse(osl, "--osl")
    if prefix and (lengths.low != lengths.high or outputs.low != outputs.high):
        raise InvalidInput("takes single numbers with --prefix", field="--isl")
    if out is not None:
        _new_folder(out)

    async def go() -> dict[str, Any]:
        from headrace.engine.inprocess import InProcessEngine
        from headrace.engine.launch import launch

        client = InProcessEngine(launch(config), overlap=config.overlap)
        try:
            end_id = min(bench.END_ID, client.info.vocab_size)
            if prefix:
                asked = bench.prefix_requests(requests, request_seed, prefix, lengths.low, outputs.low, end_id)
            else:
                asked = bench.mixed_requests(requests, request_seed, lengths, outputs, end_id)
            bench.check_fits(asked, client.info.max_model_len)
            with _progress(None) as watch:
                warm = bench.mixed_requests(2, request_seed + 1, IntRange(8, 8), IntRange(2, 2), end_id)
                await bench.run_offline(client, warm)
                records = await bench.run_offline(client, asked, on_done=watch.record)
            load = {"isl": isl, "osl": osl, "prefix": str(prefix), "seed": str(request_seed), "end_id": str(end_id)}
            return bench.offline_summary(client, records, load, out)
        finally:
            await client.close()

    summary = _finish(go(), resumable=False)
    if as_json:
        print(msgspec.json.encode(summary).decode())
    else:
        print_summary(summary, out or Path())


def report_(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, its repeats, a sweep, a comparison or a ladder.")],
    png: Annotated[bool, typer.Option("--png", help="Also write each chart as a PNG file.")] = False,
) -> None:
    """Write report.html again from what a folder holds, and its charts as PNG files."""
    from headrace.bench import page
    from headrace.bench.report import content, write_report

    typer.echo(write_report(folder))
    if png:
        for path in page.write_pngs(folder / "charts", content(folder)[3]):
            typer.echo(path)


def import_(
    source: Annotated[Path, typer.Argument(help="Result of guidellm, aiperf or vllm bench serve.")],
    out: Out,
    as_json: AsJson = False,
    report: WithReport = True,
) -> None:
    """Import another tool's result, to compare and report it like a run of ours."""
    from headrace.bench.importers import import_results

    if not source.exists():
        raise InvalidInput(f"{source} does not exist", field="FILE")
    _new_folder(out)
    _conclude(out, import_results(source, out), as_json=as_json, report=report)


def golden(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8100,
    ttft_ms: Annotated[float, typer.Option(help="Milliseconds from the request to the first event.")] = 50.0,
    itl_ms: Annotated[float, typer.Option(help="Milliseconds per token after that.")] = 5.0,
    tokens_per_chunk: Annotated[int, typer.Option(help="Tokens in each event.")] = 1,
    prefill_us_per_token: Annotated[float, typer.Option(help="Microseconds added per uncached prompt token.")] = 0.0,
    slots: Annotated[int, typer.Option(help="Requests served at once, others queue; 0: no limit.")] = 0,
    output_tokens: Annotated[int, typer.Option(help="Tokens of an answer when the request sets no limit.")] = 16,
    max_context: Annotated[int, typer.Option(help="Longest prompt plus answer.")] = 1_000_000,
    prefix_cache: Annotated[bool, typer.Option(help="Treat known prefixes as found in a simulated cache.")] = False,
    http_error_every: Annotated[int, typer.Option(help="Each n-th request gets a 500.")] = 0,
    error_every: Annotated[int, typer.Option(help="Each n-th stream carries an error event.")] = 0,
    disconnect_every: Annotated[int, typer.Option(help="Each n-th stream is cut.")] = 0,
    stall_every: Annotated[int, typer.Option(help="Each n-th stream stalls for --stall-ms.")] = 0,
    empty_every: Annotated[int, typer.Option(help="Each n-th stream ends without a token.")] = 0,
    short_every: Annotated[int, typer.Option(help="Each n-th answer has half of its tokens.")] = 0,
    fault_after_tokens: Annotated[int, typer.Option(help="Where in a stream errors, cuts and stalls come.")] = 4,
    stall_ms: Annotated[float, typer.Option(help="Length of a stall.")] = 100.0,
    usage: Annotated[str, typer.Option(help="Token counts: final, continuous or none.")] = "continuous",
    model: Annotated[str, typer.Option(help="Name of the model it claims to serve.")] = "golden",
    api_key: Annotated[str, typer.Option(help="Key that requests must carry.", show_default=False)] = "",
) -> None:
    """Serve answers whose token counts and send times are known exactly; GET /golden/truth reports what was really sent."""
    import signal

    from headrace.bench.golden import GoldenScript, serve_golden

    given = dict(locals())
    names = GoldenScript.__dataclass_fields__
    script = GoldenScript(**{name: given[name] for name in names})
    script.check()
    if not 0 <= port <= 65_535:
        raise InvalidInput(f"must be from 0 to 65535, got {port}", field="--port")

    def ready(bound: int) -> None:
        print(f"golden server on http://127.0.0.1:{bound}", file=sys.stderr, flush=True)

    async def until_told() -> None:
        serving = asyncio.ensure_future(serve_golden(script, port, ready=ready))
        # Set explicitly: a shell starts background jobs with SIGINT ignored, and Python leaves it so.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    _run(until_told())


def workloads() -> None:
    """List the workloads and their options."""
    from dataclasses import fields

    from headrace.bench.workloads import WORKLOADS

    for name, kind in WORKLOADS:
        options = ", ".join(f"{f.name.replace('_', '-')}={f.default}" for f in fields(kind.options))
        arrivals = "; has its own arrivals" if kind.has_arrivals else ""
        typer.echo(f"{name:18} {kind.what}{arrivals}{chr(10) + ' ' * 19 + '--set ' + options if options else ''}")


def targets() -> None:
    """List the engines that can be started and the settings each takes."""
    from headrace.bench.targets import TARGETS

    for name, target in TARGETS:
        settings = sorted({key.partition(".")[0] for key in target.facts.flags} | {"bin", "args", "env.NAME"})
        typer.echo(f"{name:14} {' '.join(target.facts.command)}{chr(10)}{' ' * 15}settings: {', '.join(settings)}")


def _whole_numbers(text: str, field: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InvalidInput(f"expected whole numbers, got {text!r}", field=field) from None


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidInput(f"expected NAME=VALUE, got {text!r}", field="--engine")
    return name.strip().replace("-", "_"), value.strip()


def _run(work: Coroutine[Any, Any, Any], resumable: bool = False) -> Any:
    """Run to the end. SIGTERM ends it as Ctrl-C does: what was started is stopped, what was recorded stays."""
    import signal

    told = False

    async def until_told() -> Any:
        def end() -> None:
            nonlocal told
            told = True
            running.cancel()

        running = asyncio.ensure_future(work)
        with contextlib.suppress(NotImplementedError):  # not on Windows
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        return await running

    try:
        import uvloop
    except ImportError:  # not on Windows
        runner: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run
    else:
        runner = uvloop.run
    try:
        return runner(until_told())
    except (asyncio.CancelledError, KeyboardInterrupt) as ended:
        number = signal.SIGINT if isinstance(ended, KeyboardInterrupt) else signal.SIGTERM
        if number is signal.SIGTERM and not told:
            raise
        further = "; what was recorded stays, bench resume FOLDER continues it" if resumable else ""
        print(f"headrace: ended by {number.name}{further}", file=sys.stderr)
        raise typer.Exit(128 + number) from None


def _finish(work: Coroutine[Any, Any, dict[str, Any]], *, resumable: bool = True) -> dict[str, Any]:
    """Run to the end; a run that cannot be done ends the command with code 3 and the reason."""
    from headrace.bench.run import InvalidRun
    from headrace.bench.targets._process import TargetFailed

    try:
        found: dict[str, Any] = _run(work, resumable)
    except (InvalidRun, TargetFailed) as error:
        _not_valid([str(error)])
    except BaseExceptionGroup as group:
        wanted = group.subgroup((InvalidRun, TargetFailed))
        if wanted is None:
            raise
        _not_valid([str(error) for error in wanted.exceptions])
    return found


def _not_valid(because: list[str]) -> NoReturn:
    for reason in because:
        print(f"headrace: the run is not valid: {reason}", file=sys.stderr)
    raise typer.Exit(3)


def _conclude(out: Path, summary: dict[str, Any], *, as_json: bool, report: bool) -> None:
    import msgspec

    from headrace.bench.terminal import print_summary

    _write_report(out, report)
    if as_json:
        print(msgspec.json.encode(summary).decode())
    else:
        print_summary(summary, out)
    if not summary["valid"]:
        _not_valid(summary["invalid_because"])


def _write_report(out: Path, wanted: bool) -> None:
    if wanted:
        from headrace.bench.report import write_report

        write_report(out)


def _say_comparison(found: dict[str, Any], as_json: bool) -> None:
    import msgspec

    from headrace.bench.terminal import print_comparison

    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        print_comparison(found)


def _begin(out: Path, job: Job | None) -> None:
    """Make the folder of a new command; one that goes on has it."""
    if job is not None:
        from headrace.bench.job import write_job

        _new_folder(out)
        write_job(out, job)


def _new_folder(out: Path) -> None:
    from headrace.bench.job import JOB_FILE

    # A command that was refused after its folder had been made left its options there and nothing else.
    if out.exists() and (not out.is_dir() or any(path.name != JOB_FILE for path in out.iterdir())):
        raise InvalidInput(f"{out} is not a new or empty folder", field="--out", remedy="choose another")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot make {out}: {error.strerror}", field="--out") from error


def _progress(load: LoadOptions | None) -> Any:
    from headrace.bench.terminal import live

    return live(load.requests if load else None)


def _prediction(plan: str, model: str, engine: str) -> Callable[[dict[str, Any]], Prediction]:
    """What makes the plan once the run's real lengths and concurrency are known; wrong input is refused here and now."""
    from headrace.bench.planned import read_prediction, traffic_of

    if Path(plan).exists():
        found = read_prediction(Path(plan))
        return lambda _summary: found
    import msgspec

    from headrace.plan.deployment import Inputs
    from headrace.plan.perf import prediction

    gpu, _, rest = plan.partition(":")
    given: dict[str, str] = {"model": model, "gpu": gpu} | ({"engine": engine} if engine else {})
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise InvalidInput(f"expected NAME=VALUE, got {part!r}", field="--plan")
        given[name.strip().replace("-", "_")] = value.strip()
    known = {f.name for f in msgspec.structs.fields(Inputs)}
    if unknown := sorted(set(given) - known):
        raise InvalidInput(f"unknown {unknown[0]!r}", field="--plan", remedy=", ".join(sorted(known)))

    def predict(traffic: dict[str, Any]) -> Prediction:
        try:
            return prediction(msgspec.convert({**traffic, **given}, Inputs, strict=False))
        except (HeadraceError, msgspec.ValidationError) as error:
            raise InvalidInput(f"no plan for {plan!r}: {error}", field="--plan") from error

    predict({"isl": 128, "osl": 128, "concurrency": 1})
    return lambda summary: predict(traffic_of(summary))
