"""The tokenizer of a first text against the whole vocabulary: the same ids, whatever the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from text_samples import CORPUS, TEXTS

from headrace.base.errors import InvalidInput
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_first import FirstTextTokenizer
from headrace.text.tokenizer_gguf import Vocabulary

pytestmark = pytest.mark.model

KINDS = ("smollm", "smollm as llama-bpe", "smollm as qwen2", "llama", "gemma")


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest) -> tuple[Vocabulary, Tokenizer]:
    """A vocabulary and the whole tokenizer made of it: two of SentencePiece, and SmolLM2's with other cuts: one that takes
    words whole, one that composes characters first."""
    name, _, pre = request.param.partition(" as ")
    metadata = request.getfixturevalue(f"{name}_metadata")
    if pre:
        metadata = metadata | {"tokenizer.ggml.pre": pre}
    return Vocabulary(metadata), Tokenizer.from_gguf(metadata)


def assert_same_first(both: tuple[Vocabulary, Tokenizer], text: str) -> None:
    vocabulary, whole = both
    first = FirstTextTokenizer(vocabulary)
    assert first.encode(text) == whole.encode(text)
    assert first._whole is None, "the whole vocabulary was built"


@pytest.mark.parametrize("text", [*CORPUS, "<|user|>hi<think> x", "▁x", "<0x41>", "€ <0xE2>"])
def test_the_first_text_has_the_ids_of_the_whole_vocabulary(both: tuple[Vocabulary, Tokenizer], text: str) -> None:
    assert_same_first(both, text)


def test_so_has_any_random_one(both: tuple[Vocabulary, Tokenizer]) -> None:
    @settings(max_examples=20, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        assert_same_first(both, text)

    check()


def test_several_first_texts_and_special_tokens_as_the_caller_asks(both: tuple[Vocabulary, Tokenizer]) -> None:
    vocabulary, whole = both
    texts = CORPUS[:7]
    assert FirstTextTokenizer(vocabulary).encode_batch(texts) == whole.encode_batch(texts)
    for options in ({"add_special": False}, {"parse_special": False}):
        assert FirstTextTokenizer(vocabulary).encode(CORPUS[6], **options) == whole.encode(CORPUS[6], **options)


def test_facts_and_later_texts_are_those_of_the_whole(both: tuple[Vocabulary, Tokenizer]) -> None:
    vocabulary, whole = both
    first = FirstTextTokenizer(vocabulary)
    for fact in ("vocab_size", "special_ids", "added_ids", "special_tokens", "bos_token_id", "eos_token_id"):
        assert getattr(first, fact) == getattr(whole, fact), fact
    assert (first.eos_token_ids, first.leading_space) == (whole.eos_token_ids, whole.leading_space)
    some = [*range(0, whole.vocab_size, 97), whole.vocab_size, -1]
    assert [first.spelling(i) for i in some] == [whole.spelling(i) for i in some]
    assert [first.token_bytes(i) for i in some] == [whole.token_bytes(i) for i in some]
    spellings = [s for i in some if (s := whole.spelling(i)) is not None]
    assert [first.token_id(s) for s in spellings] == [whole.token_id(s) for s in spellings]
    assert first._whole is None
    for text in CORPUS[:3]:
        assert first.encode(text) == whole.encode(text)
    assert first._whole is not None
    assert first.to_json() == whole.to_json()


def test_a_long_text_and_being_prepared_build_the_whole(both: tuple[Vocabulary, Tokenizer]) -> None:
    vocabulary, whole = both
    long = " ".join(CORPUS) * 8
    first = FirstTextTokenizer(vocabulary)
    assert first.encode(long) == whole.encode(long)
    assert first._whole is not None
    prepared = FirstTextTokenizer(vocabulary)
    prepared.prepare()
    assert prepared._whole is not None
    assert prepared.encode("a b") == whole.encode("a b")


def test_half_a_surrogate_pair_is_refused_and_the_next_text_is_not(both: tuple[Vocabulary, Tokenizer]) -> None:
    vocabulary, whole = both
    first = FirstTextTokenizer(vocabulary)
    with pytest.raises(InvalidInput, match="surrogate"):
        first.encode("a\ud800")
    assert first.encode("a b") == whole.encode("a b")
