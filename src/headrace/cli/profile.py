"""`headrace profile`: show where a step's time goes on the GPU, beside its roofline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add the verb `profile`."""
    app.command("profile")(profile)


def profile(
    model: Annotated[str, typer.Argument(help="hub id, folder, .gguf file or known name")],
    batch: Annotated[int, typer.Option(help="sequences that decode together")] = 1,
    context: Annotated[int, typer.Option(help="prompt tokens of each")] = 512,
    steps: Annotated[int, typer.Option(help="decode steps to watch")] = 32,
    dummy: Annotated[bool, typer.Option(help="random weights instead of the model's own")] = False,
    trace: Annotated[Path | None, typer.Option(help="write a Chrome trace here", show_default=False)] = None,
) -> None:
    """Decode random prompts and print device time per step by kind of kernel, idle time, and the bytes' floor."""
    import random

    from headrace.base.errors import InvalidInput
    from headrace.engine.inprocess import InProcessEngine
    from headrace.engine.launch import launch
    from headrace.spec.config import EngineConfig

    for name, value in (("batch", batch), ("context", context), ("steps", steps)):
        if value < 1:
            raise InvalidInput(f"must be at least 1, not {value}", field=name)
    config = EngineConfig(
        model=model,
        backend="cuda",
        load_format="dummy" if dummy else "auto",
        max_num_seqs=max(batch, 4),
        max_model_len=context + steps + 8,
    )
    core = launch(config)
    from headrace.engine.cuda.timeline import profiled

    engine = InProcessEngine(core)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, core.info.vocab_size) for _ in range(context)] for _ in range(batch)]
    _generate(engine, prompts, 1)
    before = engine.stats.steps
    kinds, span_us = profiled(lambda: _generate(engine, prompts, steps), 1, trace)
    time.sleep(0.05)
    count = engine.stats.steps - before
    engine.stop()
    weights = sum(m.actual_bytes for m in core.info.memory if m.name == "weights")
    kv_bytes = batch * (context + steps / 2) * core.info.kv_bytes_per_token
    floor = {"gemm": weights, "attention": kv_bytes}
    typer.echo(f"{count} steps of {batch} rows at about {context + steps // 2} tokens, per step:")
    for kind in kinds:
        us = kind.us / count
        rate = f"  {floor[kind.kind] / us / 1e6:6.2f} TB/s of what must be read" if kind.kind in floor else ""
        typer.echo(f"  {kind.kind:15s} {us:9.1f} us  {kind.launches / count:6.1f} launches{rate}")
    busy = sum(k.us for k in kinds)
    typer.echo(f"  {'idle':15s} {max(0.0, span_us - busy) / count:9.1f} us")
    typer.echo(f"  {'whole step':15s} {span_us / count:9.1f} us")
    if busy > span_us:
        typer.echo("Kernels overlap (programmatic dependent launch): times of single kinds hold waiting as well.")


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
