import json
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import CORPUS, SPECIALS, TEXTS, write_gguf

from headrace.base.errors import CorruptCheckpoint, InvalidInput, UnsupportedModel
from headrace.text.pretokenizers import byte_level, cut_named
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_gguf import implied_merges

pytestmark = pytest.mark.model


def assert_same_ids(ours, theirs, text):
    assert ours.encode(text) == theirs.encode(text)
    plain = ours.encode(text, add_special=False)
    assert plain == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True)
    assert ours.decode(plain, skip_special=False) == theirs.decode(plain, skip_special_tokens=False)


@pytest.mark.parametrize("text", CORPUS)
def test_ids_and_text_equal_transformers(smollm, smollm_oracle, text):
    assert_same_ids(smollm, smollm_oracle, text)
    assert smollm.decode(smollm.encode(text), skip_special=False) == text


def test_random_text_equals_transformers(smollm, smollm_oracle):
    @settings(max_examples=300, deadline=None)
    @given(TEXTS)
    def check(text):
        assert_same_ids(smollm, smollm_oracle, text)

    check()


def test_random_ids_decode_as_transformers_does(smollm, smollm_oracle):
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, smollm.vocab_size - 1), max_size=12), st.booleans())
    def check(ids, skip):
        assert smollm.decode(ids, skip_special=skip) == smollm_oracle.decode(ids, skip_special_tokens=skip)

    check()


def test_facts_of_the_real_model(smollm):
    assert smollm.vocab_size == 49152
    assert (smollm.bos_token_id, smollm.eos_token_id, smollm.eos_token_ids) == (1, 2, (2,))
    assert smollm.special_ids == frozenset(range(17))
    assert smollm.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm.encode("a<|im_end|>")[-1] == 2
    assert 2 not in smollm.encode("a<|im_end|>", parse_special=False)
    assert smollm.decode(smollm.encode("a<|im_end|>", parse_special=False)) == "a<|im_end|>"


@pytest.fixture(scope="module")
def oracles(tmp_path_factory, llama_metadata, gemma_metadata):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("gguf")
    found = {}
    for name, metadata in (("llama", llama_metadata), ("gemma", gemma_metadata)):
        write_gguf(folder / f"{name}.gguf", metadata)
        found[name] = AutoTokenizer.from_pretrained(str(folder), gguf_file=f"{name}.gguf")
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize(
    "text", [*CORPUS, "<|user|>hi<think> x", "<start_of_turn>user\n  a<end_of_turn>\n", "▁x", "<0x41>"]
)
def test_sentencepiece_equals_transformers(kind, text, oracles, request):
    assert_same_ids(request.getfixturevalue(kind), oracles[kind], text)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_sentencepiece_random_text_equals_transformers(kind, oracles, request):
    ours = request.getfixturevalue(kind)

    @settings(max_examples=200, deadline=None)
    @given(TEXTS)
    def check(text):
        assert_same_ids(ours, oracles[kind], text)

    check()


def test_sentencepiece_special_tokens(llama, gemma):
    assert llama.encode("x")[0] == llama.bos_token_id == 1
    assert gemma.eos_token_ids == (gemma.eos_token_id,)
    assert gemma.decode(gemma.encode("  a   b ")) == "  a   b "
    assert llama.decode(llama.encode("a   b ")) == "a   b "
    assert llama.token_bytes(llama.token_id("<0xE4>")) == b"\xe4"


def test_end_of_turn_tokens_come_from_the_file_and_its_template(gemma_metadata):
    turn = gemma_metadata["tokenizer.ggml.tokens"].index("<end_of_turn>")
    named = Tokenizer.from_gguf(gemma_metadata | {"tokenizer.ggml.eot_token_id": turn})
    assert named.eos_token_ids == (1, turn)
    written = Tokenizer.from_gguf(gemma_metadata | {"tokenizer.chat_template": "{{ x }}<end_of_turn>"})
    assert written.eos_token_ids == (1, turn)


def test_implied_merges_are_best_score_first():
    tokens, scores = ["a", "b", "c", "ab", "abc", "bc", "<s>"], [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, 0.0]
    merges = implied_merges(tokens, scores, [1] * 6 + [3])
    assert merges == [("a", "b"), ("ab", "c"), ("a", "bc"), ("b", "c")]


QWEN2 = ["Hello world's 123", "e\u0301 n\u0303", "  x\n\n y", "don'T WE'LL", "中文 12 ½", "a\t b\r\n"]


@pytest.mark.parametrize("text", QWEN2)
def test_qwen2_cut_equals_transformers(text):
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    oracle = Qwen2Tokenizer().backend_tokenizer
    cut = cut_named("qwen2")
    normal = oracle.normalizer.normalize_str(text) if cut.nfc else text
    assert byte_level(cut).pre_tokenize_str(normal) == oracle.pre_tokenizer.pre_tokenize_str(normal)


@pytest.mark.parametrize("text", [*CORPUS, *QWEN2])
@pytest.mark.parametrize("name", ["llama-bpe", "tekken", "gpt-4o", "qwen35", "qwen2"])
def test_cuts_equal_transformers_where_it_has_them(name, text):
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    reference = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    expected = pre_tokenizers.Sequence([reference, level]).pre_tokenize_str(text)
    assert byte_level(cut_named(name)).pre_tokenize_str(text) == expected


@pytest.mark.parametrize("text", CORPUS)
def test_every_cut_keeps_the_whole_text(text):
    from headrace.text.pretokenizers import _ALIASES, _BY_NAME
    from headrace.text.vocabulary import byte_alphabet

    alphabet = byte_alphabet()
    for name in [*_BY_NAME, *_ALIASES]:
        pieces = byte_level(cut_named(name)).pre_tokenize_str(text)
        assert bytes(alphabet[c] for piece, _ in pieces for c in piece) == text.encode()


def test_deepseek_v3_cuts_by_kind():
    def pieces(text):
        return [text[a:b] for _, (a, b) in byte_level(cut_named("deepseek-v3")).pre_tokenize_str(text)]

    assert pieces("1234 中文abc's") == ["123", "4", " ", "中文", "abc", "'s"]


def test_token_bytes_join_to_the_text(tokenizer):
    @settings(max_examples=100, deadline=None)
    @given(TEXTS)
    def check(text):
        ids = tokenizer.encode(text, add_special=False)
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
        assert joined in (tokenizer.decode(ids, skip_special=False), " " + tokenizer.decode(ids, skip_special=False))

    check()


def test_token_text_of_partial_characters(smollm):
    ids = smollm.encode("😀")
    assert b"".join(map(smollm.token_bytes, ids)) == "😀".encode()
    assert smollm.token_text(ids[0]) == "bytes:\\xf0\\x9f"
    assert smollm.token_text(smollm.encode(" the")[0]) == " the"
    assert smollm.token_bytes(10**9) == b""
    assert smollm.decode([10**9, -1, 33]) == smollm.decode([33])


def test_half_a_surrogate_pair_is_refused(smollm):
    with pytest.raises(InvalidInput, match="surrogate pair at character 1"):
        smollm.encode("a\ud800b")


def test_threads_get_the_same_ids(smollm):
    texts = [text * 50 for text in CORPUS]
    expected = [smollm.encode(text) for text in texts]
    results: dict[int, list[list[int]]] = {}

    def work(worker: int) -> None:
        results[worker] = [smollm.encode(text) for text in texts]
        smollm.encode("<|im_end|>", parse_special=False)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[i] == expected for i in range(4))
    assert smollm.encode_batch(texts) == expected


def test_other_threads_run_while_a_long_text_is_encoded(smollm):
    started, ended = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        smollm.encode("The quick brown fox. " * 50_000)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    turns = 0
    while not ended.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 3  # with the GIL held throughout there would be none, or one at the edge


def test_importing_the_room_is_light():
    heavy = ["torch", "transformers", "tokenizers", "jinja2", "numpy"]
    modules = ["", ".tokenizer", ".template", ".stream", ".stop", ".detokenize", ".logprobs"]
    lines = [f"import headrace.text{name}" for name in modules]
    lines += ["import sys", f"print([m for m in {heavy} if m in sys.modules])"]
    out = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def save_folder(folder, tokenizer, **config):
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_folder_equals_gguf(tmp_path, smollm):
    save_folder(tmp_path, smollm, bos_token="<|im_start|>", eos_token={"content": "<|im_end|>", "lstrip": False})
    ours = Tokenizer.from_folder(tmp_path)
    assert [ours.encode(text) for text in CORPUS] == [smollm.encode(text) for text in CORPUS]
    assert (ours.eos_token_ids, ours.bos_token_id, ours.special_ids) == ((2,), 1, smollm.special_ids)
    assert ours.vocab_size == smollm.vocab_size


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
def test_folder_follows_its_config_as_transformers_does(tmp_path, llama, config):
    from transformers import PreTrainedTokenizerFast

    added = {"0": {"content": "<unk>", "special": True}, "900": {"content": "<new>", "special": False}}
    save_folder(tmp_path, llama, bos_token="<s>", eos_token="</s>", added_tokens_decoder=added, **config)
    ours, theirs = Tokenizer.from_folder(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in [*CORPUS, "a<new>b</s>"]:
        assert_same_ids(ours, theirs, text)
    assert ours.vocab_size == len(theirs)


def test_config_adds_bos_where_tokenizer_json_adds_nothing(tmp_path, smollm):
    save_folder(tmp_path, smollm, bos_token="<|im_start|>", eos_token="<|im_end|>", add_bos_token=True)
    assert Tokenizer.from_folder(tmp_path).encode("x") == [1, *smollm.encode("x")]


def test_special_tokens_map_is_read(tmp_path, smollm):
    smollm._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (0,)


def test_missing_or_damaged_folder(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"has no tokenizer.json; it has tokenizer.model") as missing:
        Tokenizer.from_folder(tmp_path)
    assert "save_pretrained" in str(missing.value.remedy)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModel, "'bert'"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "nobody-knows"}, UnsupportedModel, "nobody-knows"),
        ({"tokenizer.ggml.tokens": []}, CorruptCheckpoint, "empty"),
        ({"tokenizer.ggml.tokens": None}, CorruptCheckpoint, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.scores": [0.0]}, CorruptCheckpoint, "1 entries for"),
        ({"tokenizer.ggml.scores": None}, CorruptCheckpoint, "neither merges nor scores"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, CorruptCheckpoint, "outside the vocabulary"),
        ({"tokenizer.ggml.merges": ["a"]}, CorruptCheckpoint, "two symbols"),
        ({"tokenizer.ggml.merges": ["nowhere a"]}, CorruptCheckpoint, "inconsistent"),
    ],
)
def test_damaged_metadata_is_refused(llama_metadata, change, error, words):
    with pytest.raises(error, match=words):
        Tokenizer.from_gguf(llama_metadata | change)


def test_a_token_listed_twice_is_refused(llama_metadata):
    tokens = list(llama_metadata["tokenizer.ggml.tokens"])
    tokens[-1] = tokens[-2]
    with pytest.raises(CorruptCheckpoint, match="listed twice"):
        Tokenizer.from_gguf(llama_metadata | {"tokenizer.ggml.tokens": tokens})


def test_bytes_vocabulary():
    ours = Tokenizer.of_bytes()
    assert ours.encode("é\n") == list("é\n".encode())
    assert ours.vocab_size == 256


@pytest.mark.parametrize("special", SPECIALS)
def test_special_tokens_are_skipped_or_shown(smollm, special):
    ids = smollm.encode(f"a{special}b")
    assert smollm.decode(ids) == "ab"
    assert smollm.decode(ids, skip_special=False) == f"a{special}b"
