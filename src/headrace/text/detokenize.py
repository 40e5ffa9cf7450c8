"""Token ids to text as they come, so that text once given never changes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from headrace.text.tokenizer import Tokenizer


class Detokenizer:
    """The incremental form of `Tokenizer.decode`: the joined results of `push` and `flush` equal it, however split.

    Only complete characters are given out. Bytes that cannot become a character turn into one U+FFFD per maximal
    invalid part, as soon as that is certain; an unfinished character waits. Constant time per token.

    `continuation`: the ids go on after other text (a prompt), so a space before the first word is real and kept.
    Without it a leading space that SentencePiece vocabularies add is taken away.
    """

    __slots__ = ("_leading_space", "_skipped", "_special", "_token_bytes", "_utf8", "_whole_texts", "pending")

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continuation: bool = False) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._special = tokenizer.special_ids
        self._whole_texts = tokenizer.whole_texts
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading_space = "keep" if continuation else tokenizer.leading_space
        self.pending = False
        """Whether the last bytes are an unfinished character."""

    def push(self, ids: Iterable[int]) -> str:
        """Text that the next tokens complete."""
        if self._leading_space != "keep":
            return "".join([self.push_one(id_) for id_ in ids])
        skipped, token_bytes = self._skipped, self._token_bytes
        return self._decode(b"".join([token_bytes(id_) for id_ in ids if id_ not in skipped]))

    def whole(self, token_id: int) -> str | None:
        """What `push_one` would say of a token that is text by itself here and was seen before; else None."""
        return None if self.pending or self._leading_space != "keep" else self._whole_texts.get(token_id)

    def push_one(self, token_id: int) -> str:
        """Text that the next token completes: often one word, at times empty, at times several characters."""
        if (known := self.whole(token_id)) is not None:
            return known
        plain = not self.pending and self._leading_space == "keep"
        if token_id in self._skipped:
            return ""
        raw = self._token_bytes(token_id)
        if self._leading_space != "keep" and raw:
            raw = raw[1:] if self._leading_space == "strip one" and raw[:1] == b" " else raw
            raw = raw.lstrip(b" ") if self._leading_space == "strip in first token" else raw
            self._leading_space = "keep"
        text = self._decode(raw)
        if plain and not self.pending and token_id not in self._special and "\ufffd" not in text:
            self._whole_texts[token_id] = text
        return text

    def flush(self) -> str:
        """End of the ids: U+FFFD for an unfinished character, else nothing."""
        self.pending = False
        return self._utf8.decode(b"", final=True)

    def _decode(self, raw: bytes) -> str:
        text = self._utf8.decode(raw)
        self.pending = bool(self._utf8.getstate()[0])
        return text
