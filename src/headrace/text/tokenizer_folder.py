"""A tokenizer from a model folder: `tokenizer.json` and the files beside it that name its special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.base.errors import CorruptCheckpoint, InvalidInput
from headrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_folder(folder: Path) -> Tokenizer:
    """See `Tokenizer.from_folder`."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (folder / name).is_file()]
        found = f"; it has {', '.join(others)}" if others else ""
        raise InvalidInput(
            f"{folder} has no tokenizer.json{found}",
            field="tokenizer",
            remedy="write one with AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers, or name "
            "another folder that has it",
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error}", field="tokenizer.json") from None
    backend.no_truncation()
    backend.no_padding()

    config = read_json(folder / "tokenizer_config.json")
    roles = _special_roles(read_json(folder / "special_tokens_map.json")) | _special_roles(config)
    known = backend.get_added_tokens_decoder()
    declared = {
        int(id_): AddedToken(**{k: v for k, v in entry.items() if k != "__type"})
        for id_, entry in config.get("added_tokens_decoder", {}).items()
    }
    for id_, token in sorted(declared.items()):
        if id_ not in known:
            backend.add_tokens([token])
    specials = [token for token in declared.values() if token.special] + [
        AddedToken(text, normalized=False, special=True)
        for text in dict.fromkeys([*roles.values(), *_extra_specials(config)])
        if backend.token_to_id(text) is not None and text not in {token.content for token in declared.values()}
    ]
    marked = {token.content for token in known.values() if token.special}
    missing = [token for token in specials if token.content not in marked]
    if missing:
        backend.add_special_tokens(missing)

    if backend.num_special_tokens_to_add(False) == 0:  # tokenizer.json decides; the config speaks where it adds nothing
        put_around(
            backend,
            roles.get("bos_token") if config.get("add_bos_token") else None,
            roles.get("eos_token") if config.get("add_eos_token") else None,
        )
    return Tokenizer(backend, special_tokens=roles)


def put_around(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode` with special tokens put `bos` before and `eos` after a text, where they are given."""
    from tokenizers import processors

    around = [text for text in (bos, eos) if text is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        pair=None,
        special_tokens=[(text, backend.token_to_id(text)) for text in dict.fromkeys(around)],
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an absent file is an empty one. Raises `CorruptCheckpoint`."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptCheckpoint(f"{path} is not JSON: {error}", field=path.name) from None
    if not isinstance(content, dict):
        raise CorruptCheckpoint(f"{path} must hold a JSON object", field=path.name)
    return content


def _special_roles(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by role; each is a string or an object with `content`."""
    found = {role: config.get(role) for role in SPECIAL_ROLES}
    texts = {role: value["content"] if isinstance(value, dict) else value for role, value in found.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _extra_specials(config: dict[str, Any]) -> list[str]:
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    values = extra.values() if isinstance(extra, dict) else extra
    return [value["content"] if isinstance(value, dict) else value for value in values]
