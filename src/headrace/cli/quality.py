"""`headrace quality`: measure what formats of weights and KV cost in quality, beside the unquantized model."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    """Add the verb `quality`."""
    app.command("quality")(quality)


def quality(
    model: Annotated[str, typer.Argument(help="hub id, folder, .gguf file or known name", show_default=False)],
    weights: Annotated[
        list[str] | None,
        typer.Option(help="precision of the weights; may be repeated; all: whatever the backend offers"),
    ] = None,
    kv: Annotated[
        list[str] | None, typer.Option(help="precision of the KV cache; may be repeated; all: likewise")
    ] = None,
    backend: Annotated[str, typer.Option(help="what computes the formats: native, torch, cuda or auto")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "auto",
    reference: Annotated[
        str,
        typer.Option(help="backend of the unquantized reference: torch, native, cuda; auto: torch if it is installed"),
    ] = "auto",
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to score instead of the built-in one", show_default=False)
    ] = None,
    window: Annotated[int, typer.Option(help="tokens of a window of the text")] = 512,
    stride: Annotated[int, typer.Option(help="tokens by which windows move on; these are scored")] = 256,
    tokens: Annotated[int, typer.Option(help="tokens of the text to use at most")] = 8192,
    prompts: Annotated[int, typer.Option(help="pieces of the text to continue greedily")] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="tokens of each piece")] = 48,
    agreement: Annotated[int, typer.Option(help="tokens of each greedy answer")] = 64,
    questions: Annotated[int, typer.Option(help="how many of the built-in questions to ask")] = 60,
    speed_repeats: Annotated[int, typer.Option(help="how many times to time one sequence alone; 0: not at all")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default=False)] = None,
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the backend of the formats")] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="folder for the reference's logits while this runs", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON on stdout")] = False,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option()] = "warning",
) -> None:
    """Perplexity, KL divergence, changed tokens, greedy agreement and multiple choice of each pair of weights and KV."""
    import logging

    import msgspec

    from headrace.base.errors import InvalidInput
    from headrace.cli._options import pair
    from headrace.engine.quality.choices import built_in
    from headrace.engine.quality.measure import Settings, built_in_text, expand, measure
    from headrace.engine.quality.report import as_text
    from headrace.spec.config import EngineConfig
    from headrace.spec.locate import locate

    logging.basicConfig(level=log_level.upper(), stream=sys.stderr, format="%(message)s")
    settings = Settings(
        window=window,
        stride=stride,
        tokens=tokens,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        agreement=agreement,
        speed_repeats=speed_repeats,
    )
    config = EngineConfig(
        model=model,
        backend=backend,
        device=device,
        threads=threads,
        options=tuple(pair("option", each) for each in option or ()),
    )
    known = built_in()
    if not 0 < questions <= len(known):
        raise InvalidInput(f"must be from 1 to {len(known)}, not {questions}", field="questions")
    if text is None:
        name, content = "Alice's Adventures in Wonderland, chapters I to III", built_in_text()
    else:
        try:
            name, content = text.name, text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"cannot be read: {error}", field="text") from None
    files = locate(model)
    formats = expand(config, files, weights or ["auto"], kv or ["auto"])
    folder = scratch or Path(tempfile.gettempdir())
    if not folder.is_dir():
        raise InvalidInput(f"{folder} is not a folder", field="scratch")
    found = measure(
        config, formats, content, name, known[:questions], settings, reference=reference, scratch=folder, files=files
    )
    print(msgspec.json.encode(found).decode() if as_json else as_text(found))
