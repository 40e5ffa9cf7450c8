"""How the byte-level BPE families cut a text before merging, by the names GGUF files give them (`tokenizer.ggml.pre`).

The patterns are the ones in the families' own `tokenizer.json` files; a merge never crosses a cut, so ids depend on
them exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace.base.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str, letters: str = r"\p{L}", mark: str = "") -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s\p{{L}}{mark}\p{{N}}]+[\r\n]*|{_TAIL}"


def _o200k(digits: str, contraction: str = "") -> str:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead, tail = r"[^\r\n\p{L}\p{N}]?", f"{contraction}?" if contraction else ""
    return rf"{lead}{upper}*{lower}+{tail}|{lead}{upper}+{lower}*{tail}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


class Cut(NamedTuple):
    """`patterns` are applied one after another, each piece staying whole; `nfc` composes characters first.

    `whole_words`: a word that is itself in the vocabulary is not rebuilt by merges. `bos`: BOS is added unless the
    file says otherwise.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


_LLAMA3 = Cut((_cl100k(r"\p{N}{1,3}"),), whole_words=True, bos=True)
_QWEN2 = Cut((_cl100k(r"\p{N}"),), nfc=True)
_QWEN35 = Cut((_cl100k(r"\p{N}", r"[\p{L}\p{M}]", r"\p{M}"),), nfc=True)
_GPT4O = Cut((_o200k(r"\p{N}{1,3}", _CONTRACTION),))
_SINGLE_DIGITS = Cut((r"\p{N}", _GPT2))
_DEEPSEEK3 = Cut(
    (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
    )
)

# Character classes of DeepSeek's first vocabularies: cased letters, punctuation, Chinese to Korean. Characters that
# Unicode normalization would replace are escaped.
_CASED = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1f7d}"
    r"ᾀ-ᾴᾶ-ᾼ\x{1fbe}ῂ-ῄῆ-ῌῐ-\x{1fd3}ῖ-\x{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    r"𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_MARKS = "!-/:-~！-／：-～‘-‟　-。"
_HAN = "一-龥ࠀ-一가-퟿"

_BY_NAME = {
    "gpt-2": Cut((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "smollm": _SINGLE_DIGITS,
    "gpt-4o": _GPT4O,
    "tekken": Cut((_o200k(r"\p{N}"),), whole_words=True, bos=True),
    "deepseek-v3": _DEEPSEEK3,
    "deepseek-llm": Cut((r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_MARKS}]+", r"\s+$", rf"[{_HAN}]+", r"\p{N}+")),
    "deepseek-coder": Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"[{_HAN}]+", r"\p{N}")),
    "dbrx": Cut((_cl100k(r"\p{N}{1,3}"),)),
}
_ALIASES = {
    **dict.fromkeys(("default", "gpt2", "phi-2", "olmo", "mpt", "jais", "gigachat"), "gpt-2"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "kormo"), "qwen2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "smollm"),
    **dict.fromkeys(("llama4", "kanana2"), "gpt-4o"),
    **dict.fromkeys(("smaug-bpe", "chatglm-bpe"), "dbrx"),
}


def cut_named(name: str) -> Cut:
    """The cut a GGUF file names. Raises `UnsupportedModel` for a name not known."""
    cut = _BY_NAME.get(_ALIASES.get(name, name))
    if cut is None:
        raise UnsupportedModel(
            f"pre-tokenizer {name!r} is not known",
            field="tokenizer.ggml.pre",
            remedy="use the model's folder with tokenizer.json, or a file with one of: "
            + ", ".join(sorted(_BY_NAME | _ALIASES)),
        )
    return cut


def byte_level(cut: Cut) -> PreTokenizer:
    """The `tokenizers` form of a cut, ending in the byte alphabet."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
