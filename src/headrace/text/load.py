"""A model's tokenizer and chat template, from the files that `spec.locate` found."""

from __future__ import annotations

from pathlib import Path

from headrace.base.errors import InvalidInput
from headrace.spec.locate import ModelFiles
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer


def load_tokenizer(files: ModelFiles, *, first_text_soon: bool = False) -> Tokenizer:
    """The model's own tokenizer; one of plain bytes for a config that comes without (dummy weights).

    `first_text_soon`: do not wait for all of a GGUF vocabulary (`headrace.text.tokenizer_first`).
    """
    if files.kind == "gguf":
        if first_text_soon:
            from headrace.text.tokenizer_first import FirstTextTokenizer
            from headrace.text.tokenizer_gguf import Vocabulary

            return FirstTextTokenizer(Vocabulary(files.gguf().metadata))
        return Tokenizer.from_gguf(files.gguf().metadata)
    if files.tokenizer_path is None and not files.weights:
        return Tokenizer.of_bytes()
    return Tokenizer.from_folder(files.root)


def load_template(files: ModelFiles, tokenizer: Tokenizer, given: Path | None = None) -> ChatTemplate:
    """The chat template in the Jinja file `given`, else the model's; one that refuses, with a remedy, if it has none.

    `InvalidInput` (field `chat_template`) for a file that cannot be read, `UnsupportedModel` for one that does not compile.
    """
    if given is not None:
        try:
            source = given.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"cannot read {given}: {error}", field="chat_template") from None
        template = ChatTemplate(source, tokenizer.special_tokens)
        template.compile()
        return template
    if files.kind == "gguf":
        return ChatTemplate.from_gguf(files.gguf().metadata, tokenizer.special_tokens)
    return ChatTemplate.from_folder(files.root, tokenizer.special_tokens)
