"""A tokenizer from the vocabulary in a GGUF header, which has no `tokenizer.json`.

Two kinds are built: `gpt2` (byte-level BPE with its merges; `tokenizer.ggml.pre` names how text is cut first) and
`llama` or `gemma4` (SentencePiece BPE with byte fallback, whose merges follow from the vocabulary's scores).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.errors import CorruptCheckpoint, UnsupportedModel
from headrace.text.pretokenizers import byte_level, cut_named
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_folder import put_around

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger(__name__)

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # llama.cpp's token types
_ROLES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
}
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<turn|>")
_GEMMA = {"gemma", "gemma2", "gemma3", "gemma3n"}
_SPACE = "▁"
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""How SentencePiece vocabularies spell the bytes of characters that they lack."""


def build_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """See `Tokenizer.from_gguf`."""
    vocabulary = Vocabulary(metadata)
    backend = make_backend(vocabulary, vocabulary.ids, vocabulary.merges())
    return Tokenizer(backend, special_tokens=vocabulary.roles, eos_token_ids=vocabulary.eos_token_ids())


def make_backend(
    vocabulary: Vocabulary, ids: Mapping[str, int], merges: Sequence[tuple[str, str]]
) -> tokenizers.Tokenizer:
    """The library's object over all of the vocabulary or over a part of it: `ids` by spelling and the merges among them.
    The part must hold the vocabulary's `whole` tokens."""
    make = _byte_level_bpe if vocabulary.model == "gpt2" else _sentencepiece_bpe
    backend = make(vocabulary, ids, merges)
    _add_whole_tokens(backend, vocabulary)
    put_around(
        backend,
        vocabulary.roles.get("bos_token") if vocabulary.add_bos else None,
        vocabulary.roles.get("eos_token") if vocabulary.get("add_eos_token", False) else None,
    )
    return backend


class Vocabulary:
    """The `tokenizer.ggml.*` entries, checked against each other. `ids` by spelling, as the library is to know them."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model = str(self._require("model"))
        if self.model not in ("gpt2", "llama", "gemma4"):
            raise UnsupportedModel(
                f"vocabulary kind {self.model!r} is not supported (known: gpt2, llama, gemma4)",
                field="tokenizer.ggml.model",
                remedy="use the model's folder with tokenizer.json",
            )
        self.architecture = str(metadata.get("general.architecture", ""))
        self.tokens: list[str] = list(self._require("tokens"))
        if not self.tokens:
            raise CorruptCheckpoint("the vocabulary is empty", field="tokenizer.ggml.tokens")
        self._types = np.asarray(self._per_token("token_type", _NORMAL))
        self.roles = {role: self.tokens[id_] for name, role in _ROLES.items() if (id_ := self._id(name)) is not None}
        self.pre = str(self.get("pre", ""))
        if self.model == "gpt2":
            cut_named(self.pre or "default")
        self.gemma = self.model == "gemma4" or (self.model == "llama" and self.architecture in _GEMMA)
        # Gemma's files write runs of spaces as spaces, its merges as runs of ▁.
        self.spellings = _runs_of_spaces_respelled(self.tokens) if self.gemma else self.tokens
        self.ids = dict(zip(self.spellings, range(len(self.spellings)), strict=True))
        if len(self.ids) != len(self.spellings):
            twice = next(text for id_, text in enumerate(self.spellings) if self.ids[text] != id_)
            raise CorruptCheckpoint(f"token {twice!r} is listed twice", field="tokenizer.ggml.tokens")

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    @property
    def add_bos(self) -> bool:
        """BOS as the file says; where it does not, as llama.cpp does for this kind. gemma4's template writes its own
        BOS, so its flag is not followed."""
        if self.model == "gemma4":
            return False
        default = cut_named(self.pre).bos if self.model == "gpt2" and self.pre else self.model == "llama"
        return bool(self.get("add_bos_token", default))

    def texts(self, kind: int) -> list[str]:
        """The tokens of one of llama.cpp's types, as the file spells them."""
        return [text for id_ in np.flatnonzero(self._types == kind).tolist() if (text := self.tokens[id_])]

    def whole(self) -> dict[str, int]:
        """Ids of the tokens that are no result of merging: those found whole in a text, and those of single bytes."""
        found = [*self.roles.values(), *self.texts(_CONTROL), *self.texts(_USER_DEFINED), *BYTE_TOKENS]
        return {text: self.ids[text] for text in found if text in self.ids}

    def merges(self, among: Collection[str] | None = None) -> list[tuple[str, str]]:
        """All merges, best first, or those that make a token of `among` of two others."""
        lines: Sequence[str] | None = self.get("merges")
        if lines is None:
            return self._implied(among)
        if among is not None:
            cuts = ((text[:at], text[at:]) for text in among for at in range(1, len(text)))
            made = {f"{left} {right}" for left, right in cuts if left in among and right in among}
            lines = [line for line in lines if line in made]
        # A symbol may itself hold a space only at its first character, so the cut is the first space after that.
        merges = [(line[:cut], line[cut + 1 :]) for line in lines if (cut := line.find(" ", 1)) > 0]
        if len(merges) != len(lines):
            raise CorruptCheckpoint("a merge is not two symbols", field="tokenizer.ggml.merges")
        return merges

    def _implied(self, among: Collection[str] | None) -> list[tuple[str, str]]:
        if self.model == "gpt2":
            raise CorruptCheckpoint("the file has no tokenizer.ggml.merges", field="tokenizer.ggml.merges")
        if self.gemma:  # its scores do not follow its merge order, the order of its vocabulary does
            scores = [-float(id_) for id_ in range(len(self.tokens))]
        elif self.get("scores") is None:
            raise CorruptCheckpoint("neither merges nor scores are given", field="tokenizer.ggml.scores")
        else:
            scores = np.asarray(self._per_token("scores", 0.0)).tolist()
        return implied_merges(self.spellings, scores, self._types.tolist(), among)

    def eos_token_ids(self) -> list[int]:
        """EOS, then the end-of-turn tokens: those the file names, and the well-known ones that its template writes."""
        template = str(self._metadata.get("tokenizer.chat_template", ""))
        controls = {*self.texts(_CONTROL), *self.texts(_USER_DEFINED)}
        written = [self.tokens.index(text) for text in _TURN_ENDS if text in controls and text in template]
        found = [self._id(name) for name in ("eos", "eot", "eom")]
        return list(dict.fromkeys([*(id_ for id_ in found if id_ is not None), *written]))

    def _require(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise CorruptCheckpoint(
                f"the file has no tokenizer.ggml.{name}",
                field=f"tokenizer.ggml.{name}",
                remedy="give the tokenizer separately, as a folder with tokenizer.json",
            )
        return value

    def _per_token(self, name: str, default: Any) -> Sequence[Any]:
        values: Sequence[Any] | None = self.get(name)
        if values is None:
            return [default] * len(self.tokens)
        if len(values) != len(self.tokens):
            raise CorruptCheckpoint(
                f"{len(values)} entries for {len(self.tokens)} tokens", field=f"tokenizer.ggml.{name}"
            )
        return values

    def _id(self, name: str) -> int | None:
        id_ = self.get(f"{name}_token_id")
        if id_ is None:
            return None
        if not 0 <= int(id_) < len(self.tokens):
            raise CorruptCheckpoint(
                f"id {id_} is outside the vocabulary of {len(self.tokens)}", field=f"tokenizer.ggml.{name}_token_id"
            )
        return int(id_)


def _byte_level_bpe(
    vocabulary: Vocabulary, ids: Mapping[str, int], merges: Sequence[tuple[str, str]]
) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    if not vocabulary.pre:
        log.warning(
            "the file names no pre-tokenizer (tokenizer.ggml.pre); GPT-2's is used, which may not be the model's"
        )
    cut = cut_named(vocabulary.pre or "default")
    backend = Backend(_bpe(models.BPE, ids, merges, ignore_merges=cut.whole_words))
    if cut.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = byte_level(cut)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(
    vocabulary: Vocabulary, ids: Mapping[str, int], merges: Sequence[tuple[str, str]]
) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    unknown = vocabulary.roles.get("unk_token")
    backend = Backend(_bpe(models.BPE, ids, merges, fuse_unk=True, byte_fallback=True, unk_token=unknown))
    spaces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.gemma:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.decoder = decoders.Sequence(spaces)
        return backend
    prefix = bool(vocabulary.get("add_space_prefix", True))
    if vocabulary.architecture == "phi3":
        # Phi-3 puts the space before every stretch of text between special tokens, also one that starts with a space.
        steps = [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE, prepend_scheme="first" if prefix else "never", split=False
        )
    backend.decoder = decoders.Sequence([*spaces, *([decoders.Strip(content=" ", left=1)] if prefix else [])])
    return backend


def _runs_of_spaces_respelled(tokens: Sequence[str]) -> list[str]:
    present = set(tokens)
    return [
        respelled if text and not text.strip(" ") and (respelled := _SPACE * len(text)) not in present else text
        for text in tokens
    ]


def implied_merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], among: Collection[str] | None = None
) -> list[tuple[str, str]]:
    """The merge list of a SentencePiece BPE vocabulary: every cut of a piece into two pieces, best score first; of the pieces
    in `among`, where it is given.

    Of the cuts of one piece the longer left part comes first; pieces of equal score keep the vocabulary's order. Control,
    byte and unknown tokens take no part.
    """
    written = [id_ for id_, kind in enumerate(types) if kind in (_NORMAL, _USER_DEFINED)]
    if among is not None:
        written = [id_ for id_ in written if tokens[id_] in among]
    known = {tokens[id_] for id_ in written}
    written.sort(key=lambda id_: -scores[id_])
    merges: list[tuple[str, str]] = []
    for text in [tokens[id_] for id_ in written]:
        for cut in range(len(text) - 1, 0, -1):
            left = text[:cut]
            if left in known:
                right = text[cut:]
                if right in known:
                    merges.append((left, right))
    return merges


def _bpe(model: Any, ids: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> Any:
    try:
        return model(ids, merges, **options)
    except Exception as error:  # the library raises a bare Exception for merges outside the vocabulary
        raise CorruptCheckpoint(f"the vocabulary is inconsistent: {error}", field="tokenizer.ggml.merges") from None


def _add_whole_tokens(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Control and user-defined tokens are found whole in a text, before any cutting."""
    from tokenizers import AddedToken

    specials = [*vocabulary.texts(_CONTROL), *vocabulary.roles.values()]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in specials])
    plain = [t for t in vocabulary.texts(_USER_DEFINED) if backend.token_to_id(t) is not None]
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])
