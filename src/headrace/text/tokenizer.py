"""The tokenizer: text to ids and back, from a folder's `tokenizer.json` or from GGUF metadata."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.errors import InvalidInput
from headrace.text.vocabulary import byte_alphabet, decoding_rule

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """Text to token ids and back. Immutable; every method may be called from several threads at once.

    A text and its tokens are related through bytes: each id stands for `token_bytes(id)`, and `decode` is the UTF-8
    reading of the joined bytes, each maximal invalid part becoming one U+FFFD. For ids that come from a text this is
    what the `tokenizers` library decodes; it differs for byte-fallback vocabularies on invalid UTF-8 only, where the
    library replaces a whole run of byte tokens once one of them is invalid, so that a character already shown could
    change with a later token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] | None = None,
        whole: Callable[[], tokenizers.Tokenizer] | None = None,
    ) -> None:
        """`special_tokens`: texts by role (`bos_token`, …). `eos_token_ids`: all that end a turn, the main one first;
        left out, the id of `eos_token`. `whole`: makes the library's object when it is first needed; `backend` is then one
        that has its added tokens and its decoder."""
        self._whole = backend if whole is None else None
        self._make_whole = whole
        self._plain_backend: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.added_ids = frozenset(added)
        self._rule = decoding_rule(_decoder_spec(backend))
        self.leading_space = self._rule.leading_space
        self._bytes: dict[int, bytes] = {id_: token.content.encode() for id_, token in added.items()}
        self.whole_texts: dict[int, str] = {}
        """Texts of ordinary tokens whose bytes are whole characters, as far as detokenizers have met them."""
        # Added tokens may lie beyond a gap, so counting tokens is not enough.
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        ids = {role: backend.token_to_id(text) for role, text in self.special_tokens.items()}
        self.bos_token_id: int | None = ids.get("bos_token")
        self.eos_token_id: int | None = ids.get("eos_token")
        self.eos_token_ids = tuple(
            eos_token_ids if eos_token_ids is not None else [] if self.eos_token_id is None else [self.eos_token_id]
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load `tokenizer.json`, with the special tokens named by `tokenizer_config.json` or
        `special_tokens_map.json`. Raises `InvalidInput` when there is none, `CorruptCheckpoint` when it is damaged."""
        from headrace.text.tokenizer_folder import load_folder

        return load_folder(Path(folder))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from the `tokenizer.ggml.*` entries of a GGUF header. Raises `UnsupportedModel` for a kind of
        vocabulary or a pre-tokenizer that is not known, `CorruptCheckpoint` for entries that disagree."""
        from headrace.text.tokenizer_gguf import build_from_gguf

        return build_from_gguf(metadata)

    @classmethod
    def of_bytes(cls) -> Tokenizer:
        """A vocabulary of the 256 byte values and nothing else (id = byte), for models without a tokenizer."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        backend = Backend(models.BPE(byte_alphabet(), []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return cls(backend)

    def to_json(self) -> str:
        """The vocabulary as the text of a `tokenizer.json`, which `from_folder` and other libraries read."""
        text: str = self._backend.to_str(pretty=False)
        return text

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of a text.

        `add_special`: put the tokens around it that the model was trained with (BOS for many). False for text that a
        chat template rendered, since the template writes them itself.
        `parse_special`: read spellings such as `<|im_end|>` in the text as the special tokens; needed for a rendered
        template, where, as in other servers, the user's words are not told apart from the template's. False reads
        them as plain text.

        Releases the GIL while it works. Raises `InvalidInput` for a text that is not valid Unicode.
        """
        return self.encode_batch([text], add_special=add_special, parse_special=parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """`encode` for several texts, in parallel where there are many."""
        backend = self._encoder(texts) if parse_special else self._without_special()
        try:
            # encode() would hold the GIL throughout; the batch forms release it, and the fast one skips the offsets.
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special)
        except TypeError:
            _refuse_surrogates(texts)
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; ids outside the vocabulary add nothing. `skip_special` leaves special tokens out."""
        from headrace.text.detokenize import Detokenizer

        detokenizer = Detokenizer(self, skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes the token stands for in the middle of a text; they need not be whole UTF-8 characters.

        Empty for an id outside the vocabulary.
        """
        known = self._bytes.get(token_id)
        if known is None:
            spelling = self.spelling(token_id)
            known = b"" if spelling is None else self._rule.token_bytes(spelling)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """The token alone as text; where its bytes are not whole characters, `bytes:\\xf0\\x9f` (OpenAI's form)."""
        return token_string(self.token_bytes(token_id))

    def spelling(self, token_id: int) -> str | None:
        """How the vocabulary writes the token (`Ġthe`, `▁the`, `<0x0A>`); None for an id outside it."""
        if not 0 <= token_id < 2**32:
            return None
        spelling: str | None = self._backend.id_to_token(token_id)
        return spelling

    def token_id(self, spelling: str) -> int | None:
        """The id of a vocabulary spelling, None if there is none."""
        found: int | None = self._backend.token_to_id(spelling)
        return found

    @property
    def _backend(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self._whole is None:
                assert self._make_whole is not None
                self._whole = self._make_whole()
            return self._whole

    def _encoder(self, texts: Sequence[str]) -> tokenizers.Tokenizer:
        """What encodes `texts`."""
        return self._backend

    def _without_special(self) -> tokenizers.Tokenizer:
        # The switch is a property of the library's object, so the other setting needs an object of its own.
        backend = self._backend
        with self._lock:
            if self._plain_backend is None:
                plain = type(backend).from_str(backend.to_str())
                plain.encode_special_tokens = True
                self._plain_backend = plain
            return self._plain_backend


def token_string(raw: bytes) -> str:
    """A token's text, or `bytes:\\xf0\\x9f` where its bytes are not whole characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _decoder_spec(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    decoder = backend.decoder
    if decoder is None:
        return None
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return state


def _refuse_surrogates(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(
                f"the text holds half of a surrogate pair at character {error.start}",
                remedy="send valid Unicode: a character above U+FFFF as both halves of its pair",
            ) from None
