"""What the tokens of a vocabulary stand for, as raw bytes.

A `tokenizers` decoder turns a whole list of tokens into text. Streaming and logprobs need the share of one token, so
the decoder's rules are compiled here into one rule per token (`token bytes`) and one rule for the start of a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from headrace.base.errors import UnsupportedModel

LeadingSpace = Literal["keep", "strip one", "strip in first token"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecodingRule(NamedTuple):
    """`token_bytes` maps a vocabulary spelling to the bytes it stands for in the middle of a text.

    `leading_space` says what happens to a space at the very start of a text (SentencePiece puts one before the first
    word; decoding takes it away again).
    """

    token_bytes: Callable[[str], bytes]
    leading_space: LeadingSpace


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE vocabularies write for each byte (the GPT-2 convention).

    Printable Latin-1 bytes stand for themselves; the other 68 follow, in order, from U+0100 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + rank): byte for rank, byte in enumerate(hidden)}


def decoding_rule(decoder: Mapping[str, Any] | None) -> DecodingRule:
    """Compile the `decoder` entry of a tokenizer.json. Raises `UnsupportedModel` for one that is not per token."""
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if not steps:  # `tokenizers` joins the tokens with spaces when there is no decoder
        return DecodingRule(lambda token: b" " + token.encode(), "strip one")
    if any(step["type"] == "ByteLevel" for step in steps):
        return DecodingRule(_byte_level(steps), "keep")
    return _replacing(steps)


def _byte_level(steps: list[Mapping[str, Any]]) -> Callable[[str], bytes]:
    _refuse_others(steps, {"ByteLevel", "Fuse"})
    alphabet = byte_alphabet()

    def token_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:
            return token.encode()

    return token_bytes


def _replacing(steps: list[Mapping[str, Any]]) -> DecodingRule:
    _refuse_others(steps, {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    leading: LeadingSpace = "keep"
    for step in steps:
        match step["type"]:
            case "Replace":
                if "String" not in step["pattern"]:
                    raise UnsupportedModel(
                        "a Replace decoder with a regular expression", field="tokenizer.json decoder"
                    )
                replacements.append((step["pattern"]["String"], step["content"]))
            case "Metaspace":
                replacements.append((step["replacement"], " "))
                if step.get("prepend_scheme", "always") != "never":
                    leading = "strip in first token"
            case "ByteFallback":
                byte_fallback = True
            case "Strip":
                if (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
                    raise UnsupportedModel(
                        f"a Strip decoder other than one leading space: {step}", field="tokenizer.json decoder"
                    )
                leading = "strip one"

    def token_bytes(token: str) -> bytes:
        if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return DecodingRule(token_bytes, leading)


def _refuse_others(steps: list[Mapping[str, Any]], known: set[str]) -> None:
    for step in steps:
        if step["type"] not in known:
            raise UnsupportedModel(
                f"tokenizer decoder {step['type']!r} is not supported", field="tokenizer.json decoder"
            )
