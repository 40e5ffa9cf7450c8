"""Texts and small vocabularies for the tests of this folder."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

from gguf import GGUFWriter
from hypothesis import strategies as st

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]

CORPUS = [
    "Hello, world! The quick brown fox jumps over the lazy dog's back; it's 3.14159 times 2026-11-29.",
    "def f(x):\n    if x > 0:\n\t\treturn [x ** 2 for _ in range(10)]\n\n\n    raise ValueError('x')  # no",
    "    leading, trailing    \n\n \t \r\n   and  double   triple    spaces ",
    "Ünïcödé çàractères; Ελληνικά; русский текст; עברית; العربية; हिन्दी; ไทย; 中文字符,日本語テキスト;한국어",
    "😀😃 👨‍👩‍👧‍👦 🇩🇪🏳️‍🌈 e\u0301 n\u0303 ﬁ ½ ² Ⅷ ١٢٣ ⑦ \u00a0\u2003\u200b\u200d\ufeff",
    "1 12 123 1234 12345  6   7    89 0x1F 1e-9 $1,000,000.00 +49 (0)30",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|im_start|> < |im_end|> <|im_en",
    '{"a": [1, 2.5, null, true], "b": {"c": "d\\n"}}<div class="x">&amp;</div>',
    "I'll we've they'd don't CAN'T IT'S 'tis o'clock",
    "aaaaaaaaaaaaaaaaaaaaaaaa\n\n\n\n\n\n----------------========\x00\x01\x7f",
    "",
    " ",
    "\n",
    "  x",
]

TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="ab \n\t19.,'’é中😀\u0301<|_", max_size=60),
    st.lists(st.sampled_from([*CORPUS, *SPECIALS, " ", "\n", "12", "x"]), max_size=4).map("".join),
)


def sentencepiece_vocabulary(corpus: list[str], architecture: str, pieces: int = 400) -> dict:
    """GGUF metadata of a byte-fallback BPE vocabulary trained on `corpus` by counting pairs."""
    words = ["▁" + line.replace(" ", "▁") for line in corpus if line]
    letters = sorted({c for word in words for c in word if ord(c) < 0x2600})
    symbols = [[c for c in word if c in set(letters)] for word in words]
    learned: list[str] = []
    known = set(letters)
    while len(learned) < pieces:
        pairs = Counter(p for word in symbols for p in pairwise(word) if "▁" not in p[1])
        if not pairs:
            break
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        symbols = [_merged(word, left, right) for word in symbols]
        if left + right not in known:
            known.add(left + right)
            learned.append(left + right)
    gemma = architecture.startswith("gemma")
    named = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    turns = ["<start_of_turn>", "<end_of_turn>"] if gemma else ["<|user|>"]
    defined = ["<think>"]
    runs = [" " * n for n in range(2, 6)] if gemma else []
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*named, *turns, *defined, *raw, *runs, *learned, *letters]
    fixed = len(tokens) - len(learned) - len(letters)
    kinds = [3] * (len(named) + len(turns)) + [4] + [6] * 256 + [4 if gemma else 1] * len(runs)
    kinds += [1] * (len(tokens) - len(kinds))
    kinds[named.index("<unk>")] = 2
    scores = [0.0] * fixed + [-float(rank) for rank in range(len(tokens) - fixed)]
    ids = {text: id_ for id_, text in enumerate(tokens)}
    bos, eos = ("<bos>", "<eos>") if gemma else ("<s>", "</s>")
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": ids[bos],
        "tokenizer.ggml.eos_token_id": ids[eos],
        "tokenizer.ggml.unknown_token_id": ids["<unk>"],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": not gemma,
    }


def _merged(word: list[str], left: str, right: str) -> list[str]:
    merged: list[str] = []
    for symbol in word:
        if merged and merged[-1] == left and symbol == right:
            merged[-1] = left + right
        else:
            merged.append(symbol)
    return merged


def write_gguf(path: Path, metadata: dict) -> None:
    """A GGUF file with these metadata and no tensors, written by the reference library."""
    writer = GGUFWriter(str(path), metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def pieces(ids, cuts):
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


def ids_of(tokenizer):
    """Ids of texts, random ids, and runs that break characters apart."""
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    parts = [id_ for id_ in range(tokenizer.vocab_size) if tokenizer.token_text(id_).startswith("bytes:")]
    return st.one_of(
        TEXTS.map(lambda text: tokenizer.encode(text, add_special=False)),
        st.lists(any_id, max_size=12),
        st.lists(st.one_of(st.sampled_from(parts), any_id), max_size=12),
    )
