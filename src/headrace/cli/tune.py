"""`headrace tune`: measure this card's best configurations for a model's products and keep them for later starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def tune(
    model: Annotated[str, typer.Argument(help="hub id, folder, .gguf file or known name; only its shapes matter")],
    weights: Annotated[
        str, typer.Option(help="measure products with weights of this format instead of plain ones")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="folder of the table; default: the user's data folder")] = None,
) -> None:
    """Measure matrix products and decode attention on this GPU and write the card's table (minutes)."""
    from headrace.base.errors import InvalidInput
    from headrace.spec.locate import locate

    spec = locate(model).spec()
    try:
        import torch
    except ImportError:
        raise InvalidInput(
            "tuning needs torch and a GPU", field="tune", remedy="pip install 'headrace[engine]'"
        ) from None
    if not torch.cuda.is_available():
        raise InvalidInput("tuning needs a CUDA GPU, and torch sees none", field="tune")
    from headrace.engine.cuda.library_tune import measure_library, plain_products
    from headrace.engine.quant.formats import form
    from headrace.engine.tune import measure, measure_decode, measure_quantized, shapes, write_table

    device = torch.device("cuda:0")
    if weights:
        entries = measure_quantized(shapes(spec), form(weights), device, typer.echo)
        typer.echo(f"written: {write_table(torch.cuda.get_device_name(device), entries, out)}")
        return
    decode = measure_decode(spec, device, typer.echo)
    entries = measure(shapes(spec), device, typer.echo)
    library = measure_library(plain_products(spec), device, typer.echo)
    typer.echo(f"written: {write_table(torch.cuda.get_device_name(device), entries, out, decode, library)}")


def register(app: typer.Typer) -> None:
    app.command(name="tune")(tune)
