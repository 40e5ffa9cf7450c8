import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import CORPUS, ids_of, pieces

from headrace.text.detokenize import Detokenizer
from headrace.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model


@pytest.mark.parametrize("skip", [True, False])
def test_deltas_join_to_the_decoded_text(tokenizer, skip):
    @settings(max_examples=200, deadline=None)
    @given(ids_of(tokenizer), st.lists(st.integers(0, 12), max_size=4))
    def check(ids, cuts):
        whole = tokenizer.decode(ids, skip_special=skip)
        detokenizer = Detokenizer(tokenizer, skip_special=skip)
        assert "".join(detokenizer.push(part) for part in pieces(ids, cuts)) + detokenizer.flush() == whole
        single = Detokenizer(tokenizer, skip_special=skip)
        assert "".join(single.push_one(id_) for id_ in ids) + single.flush() == whole

    check()


def test_text_given_out_never_changes(tokenizer):
    @settings(max_examples=100, deadline=None)
    @given(ids_of(tokenizer))
    def check(ids):
        detokenizer, shown = Detokenizer(tokenizer), ""
        for count, id_ in enumerate(ids, start=1):
            shown += detokenizer.push_one(id_)
            assert tokenizer.decode(ids[:count]).startswith(shown)
            assert detokenizer.pending or tokenizer.decode(ids[:count]) == shown
        assert tokenizer.decode(ids).startswith(shown)

    check()


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_sentencepiece_decodes_as_the_library_on_whole_characters(kind, request):
    ours = request.getfixturevalue(kind)

    @settings(max_examples=200, deadline=None)
    @given(ids_of(ours), st.booleans())
    def check(ids, skip):
        text = ours.decode(ids, skip_special=skip)
        if "�" not in text:  # on invalid bytes the library replaces whole runs; see Tokenizer
            assert text == ours._backend.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("text", CORPUS)
def test_a_continuation_keeps_its_first_space(llama, text):
    prompt = llama.encode("Hello, world!")
    both = llama.encode("Hello, world! " + text)
    assert both[: len(prompt)] == prompt or text in ("", " ", "  x", "\n") or text.startswith(" ")
    if both[: len(prompt)] == prompt:
        detokenizer = Detokenizer(llama, continuation=True)
        rest = detokenizer.push(both[len(prompt) :]) + detokenizer.flush()
        assert llama.decode(prompt) + rest == llama.decode(both)


def test_characters_split_over_tokens_appear_once_whole(smollm):
    detokenizer = Detokenizer(smollm)
    deltas = [detokenizer.push_one(id_) for id_ in smollm.encode("😀é👨‍👩‍👧")]
    assert "".join(deltas) == "😀é👨‍👩‍👧"
    assert "�" not in "".join(deltas)
    assert deltas.count("") > 0


def test_invalid_bytes_become_one_replacement_each_maximal_part():
    ours = Tokenizer.of_bytes()
    ids = list(b"a\xf0\x9f\x98b\xff\xe4\xbd")
    assert ours.decode(ids) == "a�b��"
    detokenizer = Detokenizer(ours)
    assert [detokenizer.push_one(id_) for id_ in ids] == ["a", "", "", "", "�b", "�", "", ""]
    assert detokenizer.pending
    assert detokenizer.flush() == "�"
    assert not detokenizer.pending


def test_metaspace_decoder_takes_the_first_space_away():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    vocab = {"▁": 0, "▁a": 1, "b": 2, "▁▁": 3, "<s>": 4}
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<s>"])
    ours = Tokenizer(backend)
    for ids in ([1, 2], [3, 1], [0, 0, 2], [4, 1, 1], [2, 1], []):
        assert ours.decode(ids) == backend.decode(ids)


def test_a_vocabulary_without_decoder_joins_with_spaces():
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ours = Tokenizer(backend)
    assert ours.decode([0, 1, 0]) == backend.decode([0, 1, 0]) == "a b a"


def test_unknown_decoders_are_refused():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    from headrace.base.errors import UnsupportedModel

    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoders.CTC()
    with pytest.raises(UnsupportedModel, match="'CTC'"):
        Tokenizer(backend)
