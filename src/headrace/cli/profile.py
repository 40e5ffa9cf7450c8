"""`headrace profile`: show where a step's time goes on the GPU, beside its roofline."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add the verb `profile`."""
    app.command("profile")(profile)


def profile(
    model: Annotated[str, typer.Argument(help="hub id, folder, .gguf file or known name")],
    batch: Annotated[int, typer.Option(help="sequences that run together")] = 1,
    context: Annotated[int, typer.Option(help="prompt tokens of each")] = 512,
    steps: Annotated[int, typer.Option(help="decode steps to watch; 0: only those that compute the prompts")] = 32,
    weights: Annotated[str, typer.Option(help="precision of the weights, as of `headrace serve`")] = "auto",
    kv: Annotated[str, typer.Option(help="precision of the KV cache, as of `headrace serve`")] = "auto",
    dummy: Annotated[bool, typer.Option(help="random weights instead of the model's own")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="write a timeline of the decode steps here, as a Chrome trace", show_default=False),
    ] = None,
) -> None:
    """Time random prompts, then decoding behind them: device time a step by kind of kernel, what the host takes to launch it,
    and time in which the device is idle, each beside its roofline.
    """
    import random

    from headrace.base.errors import InvalidInput
    from headrace.engine.inprocess import InProcessEngine
    from headrace.engine.launch import launch
    from headrace.spec.config import EngineConfig
    from headrace.spec.locate import locate

    for name, value, least in (("batch", batch, 1), ("context", context, 2), ("steps", steps, 0)):
        if value < least:
            raise InvalidInput(f"must be at least {least}, not {value}", field=name)
    if trace is not None and not steps:
        raise InvalidInput("shows decode steps, of which none are watched", field="trace", remedy="steps above 0")
    config = EngineConfig(
        model=model,
        backend="cuda",
        load_format="dummy" if dummy else "auto",
        weights=weights,
        kv=kv,
        max_num_seqs=max(batch, 4),
        max_model_len=context + steps + 8,
    )
    core = launch(config)
    engine = InProcessEngine(core)
    try:
        rng = random.Random(0)
        # The first prompts warm up: of a size that was not met yet, libraries load kernels.
        warm, prompts = (
            [[rng.randrange(3, core.info.vocab_size) for _ in range(context)] for _ in range(batch)] for _ in range(2)
        )
        spec = locate(model).spec()
        _generate(engine, warm, 1)
        for name, tokens in (("prompts", 1), ("decode", steps)) if steps else (("prompts", 1),):
            watched = _Watched(
                core, lambda n=tokens: _generate(engine, prompts, n), None if name == "prompts" else trace
            )
            typer.echo(f"{name}: {watched.title(core.info.pool_tokens)}")
            for line in table(spec, core.info.weights_precision, core.info.kv_precision, watched):
                typer.echo(line)
    finally:
        engine.stop()


class _Watched:
    """Steps that one call makes: kernels by kind, idle time, what the steps computed and what the host took to launch them."""

    def __init__(self, core: Any, run: Any, trace: Path | None) -> None:
        import torch

        from headrace.engine.cuda.timeline import profiled
        from headrace.engine.roofline import idle_us

        self.card = torch.cuda.get_device_name()
        self.plans: list[Sequence[Any]] = []
        self.launch_us = 0.0
        executor, real = core.executor, core.executor.submit

        def submit(plan: Any) -> Any:
            begin = time.perf_counter()
            step = real(plan)
            if plan.chunks:
                self.launch_us += 1e6 * (time.perf_counter() - begin)
                self.plans.append(plan.chunks)
            return step

        executor.submit = submit
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = trace or Path(folder) / "trace.json"
                self.kinds, self.span_us = profiled(run, 1, path)
                self.idle_us = idle_us(device_spans(json.loads(path.read_text())))
        finally:
            executor.submit = real

    def title(self, pool_tokens: int) -> str:
        rows = max(len(chunks) for chunks in self.plans)
        tokens = sum(c.length for chunks in self.plans for c in chunks)
        return f"{len(self.plans)} steps of up to {rows} sequences, {tokens:,} tokens in all; a pool of {pool_tokens:,}"


def device_spans(trace: dict[str, Any]) -> list[tuple[float, float]]:
    """When kernels and copies ran, (start, end) in us, by a Chrome trace of torch's profiler."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = (e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in kinds)
    return [(e["ts"], e["ts"] + e["dur"]) for e in found]


def table(spec: Any, weights: str, kv: str, watched: Any) -> list[str]:
    """Lines of the table, per step: each kind's time, launches, floor and the floor's share of the time."""
    from headrace.base.errors import InvalidInput
    from headrace.engine.roofline import ceilings, floors

    count = len(watched.plans)
    least: dict[str, float] = {}
    try:
        card = ceilings(watched.card)
    except InvalidInput as unknown:
        lines = [f"  no floors: {unknown}"]
    else:
        lines = [f"  us a step; floors by {card.source}"]
        for chunks in watched.plans:
            for kind, us in floors(spec, weights, kv, chunks, card).items():
                least[kind] = least.get(kind, 0.0) + us / count
    lines.append(f"  {'':15s} {'time':>10s} {'launches':>9s} {'floor':>10s} {'share':>6s}")

    def line(name: str, us: float, launches: str, floor: float | None) -> str:
        beside = "" if floor is None else f" {floor:10.1f}" + (f" {floor / us:6.0%}" if us and floor else "")
        return f"  {name:15s} {us:10.1f} {launches:>9s}{beside}"

    for kind in watched.kinds:
        lines.append(line(kind.kind, kind.us / count, f"{kind.launches / count:.1f}", least.get(kind.kind)))
    whole = sum(least.get(k.kind, 0.0) for k in watched.kinds) if least else None
    lines.append(line("idle", watched.idle_us / count, "", 0.0 if least else None))
    lines.append(line("whole step", watched.span_us / count, "", whole))
    lines.append(line("host", watched.launch_us / count, "", None) + "  (launching a step, beside the device's work)")
    if sum(k.us for k in watched.kinds) > watched.span_us:
        lines.append("  Kernels overlap (programmatic dependent launch): times of single kinds hold waiting as well.")
    return lines


def _generate(engine: Any, prompts: list[list[int]], tokens: int) -> None:
    """Greedy answers of `tokens` tokens to all prompts at once."""
    import queue
    import uuid

    from headrace.control.request import Request, Sampling

    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for prompt in prompts:
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        engine.submit(
            Request(request_id=uuid.uuid4().hex, prompt_token_ids=tuple(prompt), sampling=sampling), arrived.put
        )
    left = len(prompts)
    while left:
        left -= arrived.get().finish is not None
