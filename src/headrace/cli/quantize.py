"""`headrace quantize`: round a model's weights to a smaller format and write a folder that can be served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def quantize(
    model: Annotated[
        str, typer.Argument(help="unquantized model: hub id, folder, .gguf file or known name", show_default=False)
    ],
    weights: Annotated[
        str, typer.Option(help="format of the matrices, such as int4-g128, int4-g128-asym, int8, w8a8, fp8")
    ],
    out: Annotated[Path, typer.Option(help="folder to write; an unfinished one of the same command is continued")],
    method: Annotated[str, typer.Option(help="rtn (round to nearest), awq or gptq")] = "rtn",
    calibrate: Annotated[
        Path | None,
        typer.Option(help="UTF-8 text on which awq and gptq observe the model's activations", show_default=False),
    ] = None,
    samples: Annotated[int, typer.Option(help="pieces of the calibration text")] = 64,
    length: Annotated[int, typer.Option(help="tokens of each piece")] = 512,
    act_order: Annotated[bool, typer.Option(help="gptq: quantize columns with the largest activations first")] = True,
    damping: Annotated[
        float, typer.Option(help="gptq: share of its mean that is added to the Hessian's diagonal")
    ] = 0.01,
    grid: Annotated[int, typer.Option(help="awq: how many exponents are tried for the scales of a layer")] = 20,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="module to leave unquantized, besides embedding, head, routers and norms; re:… is a regular expression"
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default=False)] = None,
) -> None:
    """Quantize layer by layer. The same command continues a run that was interrupted."""
    from headrace.base.errors import InvalidInput
    from headrace.base.units import format_bytes
    from headrace.spec.config import MOST_THREADS
    from headrace.spec.locate import locate

    if (threads or 1) > MOST_THREADS:
        raise InvalidInput(f"must be at most {MOST_THREADS}, not {threads}", field="threads")
    for name, value in (("samples", samples), ("length", length), ("grid", grid), ("threads", threads)):
        if value is not None and value < 1:
            raise InvalidInput(f"must be at least 1, not {value}", field=name)
    if not 0.0 < damping < 1.0:
        raise InvalidInput(f"must be between 0 and 1, not {damping}", field="damping")
    files = locate(model)
    try:
        import torch
    except ImportError:
        raise InvalidInput(
            "quantizing needs torch", field="quantize", remedy="pip install 'headrace[engine]'"
        ) from None
    from headrace.engine.quant import posttraining
    from headrace.engine.quant.policy import Policy

    if threads is not None:
        torch.set_num_threads(threads)
    calibration = None
    if calibrate is not None:
        from headrace.text.load import load_tokenizer

        try:
            text = calibrate.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"cannot be read: {error}", field="calibrate") from None
        calibration = posttraining.CalibrationText.of(load_tokenizer(files).encode(text), samples, length)

    def say(progress: posttraining.Progress) -> None:
        state = "finished before" if progress.resumed else f"relative loss {progress.loss:.2e}"
        typer.echo(f"layer {progress.done} of {progress.total}: {state}", err=True)

    result = posttraining.quantize(
        files,
        weights,
        method,
        out,
        calibration=calibration,
        settings=posttraining.Settings(act_order=act_order, damping=damping, grid=grid),
        policy=Policy(modules=tuple(keep or ())),
        report=say,
    )
    mean = sum(result.losses) / len(result.losses)
    typer.echo(
        f"{result.folder}: {format_bytes(result.bytes_after)} instead of {format_bytes(result.bytes_before)}, "
        f"mean relative loss {mean:.2e}"
    )


def register(app: typer.Typer) -> None:
    app.command(name="quantize")(quantize)
