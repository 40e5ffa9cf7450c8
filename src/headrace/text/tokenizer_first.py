"""A tokenizer whose first text need not wait until the library has built the whole vocabulary.

Merging joins neighbours, so whatever is made on the way is a piece of the text as it is cut into symbols. A vocabulary of
just the tokens that occur in that text, and of the merges that make them, in their order, therefore gives the same ids; it
is small and made at once. The whole is built for the next text, for a long one, or when `prepare` is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_gguf import Vocabulary, make_backend

if TYPE_CHECKING:
    import tokenizers

_LONGEST = 4096
"""Characters of a first text; for more, the whole vocabulary is built at once."""


class FirstTextTokenizer(Tokenizer):
    """See `Tokenizer`. `CorruptCheckpoint` for merges that disagree with the tokens comes when the whole is built."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        symbols = {text: id_ for text, id_ in vocabulary.ids.items() if len(text) == 1}
        self._symbols = symbols | vocabulary.whole()
        self._cutter: tokenizers.Tokenizer | None = make_backend(vocabulary, self._symbols, [])
        super().__init__(
            self._cutter,
            special_tokens=vocabulary.roles,
            eos_token_ids=vocabulary.eos_token_ids(),
            whole=lambda: make_backend(vocabulary, vocabulary.ids, vocabulary.merges()),
        )
        self.vocab_size = len(vocabulary.tokens)

    def prepare(self) -> None:
        """Build the whole vocabulary now rather than with the next text."""
        self._cutter = None
        _ = self._backend

    def spelling(self, token_id: int) -> str | None:
        spellings = self._vocabulary.spellings
        return spellings[token_id] if 0 <= token_id < len(spellings) else None

    def token_id(self, spelling: str) -> int | None:
        return self._vocabulary.ids.get(spelling)

    def _encoder(self, texts: Sequence[str]) -> tokenizers.Tokenizer:
        cutter, self._cutter = self._cutter, None
        if cutter is None or self._whole is not None or sum(map(len, texts)) > _LONGEST:
            return self._backend
        try:
            cut = cutter.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:  # not Unicode, which the caller explains
            return cutter
        spellings = self._vocabulary.spellings
        symbols = "\n".join("".join([spellings[id_] for id_ in encoding.ids]) for encoding in cut)
        ids = {text: id_ for text, id_ in self._vocabulary.ids.items() if text in symbols}
        ids |= self._symbols
        return make_backend(self._vocabulary, ids, self._vocabulary.merges(ids.keys()))
