"""Token counts by a tokenizer of `headrace.text`, for prompts that must be exact before they are sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from headrace.base.errors import HeadraceError, InvalidInput


@cache
def token_counter(name: str) -> Callable[[str], int]:
    """Counts the tokens of a text without special ones. `name`: a folder, a `.gguf` file, a known name or a hub id."""
    from headrace.spec.locate import locate
    from headrace.text.load import load_tokenizer

    try:
        tokenizer = load_tokenizer(locate(name))
    except (HeadraceError, OSError) as error:
        raise InvalidInput(f"cannot load a tokenizer from {name!r}: {error}", field="--tokenizer") from error
    return lambda text: len(tokenizer.encode(text, add_special=False, parse_special=False))
