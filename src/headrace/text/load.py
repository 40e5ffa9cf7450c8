"""A model's tokenizer and chat template, from the files that `spec.locate` found."""

from __future__ import annotations

from headrace.spec.locate import ModelFiles
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The model's own tokenizer; one of plain bytes for a config that comes without (dummy weights)."""
    if files.kind == "gguf":
        return Tokenizer.from_gguf(files.gguf().metadata)
    if files.tokenizer_path is None and not files.weights:
        return Tokenizer.of_bytes()
    return Tokenizer.from_folder(files.root)


def load_template(files: ModelFiles, tokenizer: Tokenizer) -> ChatTemplate:
    """The model's chat template; one that refuses, with a remedy, if the model has none."""
    if files.kind == "gguf":
        return ChatTemplate.from_gguf(files.gguf().metadata, tokenizer.special_tokens)
    return ChatTemplate.from_folder(files.root, tokenizer.special_tokens)
