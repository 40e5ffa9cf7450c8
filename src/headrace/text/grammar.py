"""Structured output: JSON schemas, regular expressions, choices and Lark grammars become one serialized grammar string
(`Sampling.grammar`), and a `GrammarMatcher` turns that string into a token mask per step.

The front-end compiles and validates (`schema_grammar`, `regex_grammar`, `choice_grammar`, `lark_grammar`); a wrong
grammar is an `InvalidInput` there and never reaches an engine. The executor builds one `GrammarTokens` per vocabulary
and one `GrammarMatcher` per sequence, asks it for a packed mask before each sample and tells it each sampled token.
Masks are plain numpy data: nothing here knows about torch or logits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np
import numpy.typing as npt

from headrace.base.errors import InvalidInput
from headrace.base.units import ceil_div

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One fixed way to write JSON. Free white space lets a small model emit blanks until its token limit."""

_LIMITS = llguidance.LLParserLimits(verbose_errors=False, initial_lexer_fuel=200_000)
"""The work of a lexer's start is a fifth of the library's own limit: whoever asks for more would hold up a step for a second."""


def mask_words(vocab_size: int) -> int:
    """Number of 32-bit words that hold one bit per token."""
    return ceil_div(vocab_size, 32)


def unpack_mask(words: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Packed masks [..., words] as booleans [..., vocab_size]; True means allowed. The slow, obvious reference."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    return bits[..., :vocab_size].astype(np.bool_)


def schema_grammar(schema: Mapping[str, Any] | bool, field: str) -> str:
    """Compile a JSON schema; `InvalidInput` naming `field` if it is malformed, unsatisfiable or never ends."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(laid_out(schema, field)))
    return _validated(grammar, field, "JSON schema")


def regex_grammar(pattern: str, field: str) -> str:
    """Compile a regular expression that the whole output must match (Rust syntax: no look-around, no back-references)."""
    return _validated(llguidance.LLMatcher.grammar_from_regex(pattern), field, "regular expression")


def choice_grammar(choices: Sequence[str], field: str) -> str:
    """The output is exactly one of `choices`."""
    if not choices or not all(choices):
        raise InvalidInput("choices must be one or more strings that are not empty", field=field)
    return lark_grammar("start: " + " | ".join(json.dumps(choice) for choice in choices), field)


def lark_grammar(source: str, field: str) -> str:
    """Compile a grammar in llguidance's variant of Lark, whose rule `start` describes the whole output."""
    return _validated(llguidance.LLMatcher.grammar_from_lark(source), field, "Lark grammar")


def laid_out(schema: Mapping[str, Any] | bool, field: str) -> dict[str, Any]:
    """`schema` with our fixed JSON layout, ready to stand behind `%json` in Lark; refuses schemas without finite instances."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not _SchemaProof(schema, field).has_finite_instance():
        raise InvalidInput(
            "no finite value satisfies this JSON schema: a $ref leads back to itself with no way out",
            field=field,
            remedy="give the recursion a base case, for example anyOf with null, or make the property optional",
        )
    return {**schema, "x-guidance": _LAYOUT}


def _validated(grammar: str, field: str, kind: str) -> str:
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)
    if failed:
        raise InvalidInput(f"this {kind} cannot be used: {messages[0].strip()}", field=field)
    if (reason := _first_steps(grammar)) is not None:
        raise InvalidInput(
            f"this {kind} is too complex to follow: {reason}",
            field=field,
            remedy="use shorter repetitions, fewer alternatives or fewer optional properties in one object",
        )
    return grammar


def _first_steps(grammar: str, steps: int = 8) -> str | None:
    """Why the grammar cannot be followed, if that shows within so many bytes; else it would in the middle of an answer."""
    matcher = llguidance.LLMatcher(_bytes(), grammar, log_level=0, limits=_LIMITS)
    for _ in range(steps):
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = unpack_mask(np.frombuffer(matcher.compute_bitmask(), dtype=np.int32), 256)
        if not allowed.any() or not matcher.consume_token(int(allowed.argmax())):
            break
    return _said(matcher) if matcher.is_error() else None


@functools.cache
def _bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def _said(matcher: llguidance.LLMatcher) -> str:
    """The first sentence of a matcher's error, without its advice to authors of grammars."""
    return str(matcher.get_error()).splitlines()[0].split("; consider")[0].strip()


class _SchemaProof:
    """Least fixed point of "this schema has a finite instance" over the $ref targets of one document."""

    def __init__(self, root: Mapping[str, Any], field: str) -> None:
        self._root = root
        self._field = field
        self._proven: set[str] = set()
        self._asked: set[str] = set()

    def has_finite_instance(self) -> bool:
        """True once the root is proven; false when another round over the asked targets proves nothing new."""
        try:
            return self._prove()
        except RecursionError:
            raise InvalidInput("this JSON schema is nested too deeply", field=self._field) from None

    def _prove(self) -> bool:
        while True:
            if self._finite(self._root):
                return True
            before = (len(self._asked), len(self._proven))
            for pointer in sorted(self._asked):
                if self._finite(self._target(pointer)):
                    self._proven.add(pointer)
            if before == (len(self._asked), len(self._proven)):
                return False

    def _finite(self, schema: Any) -> bool:
        if not isinstance(schema, Mapping):
            return schema is not False
        if "enum" in schema or "const" in schema:
            return True
        if isinstance(pointer := schema.get("$ref"), str):
            self._asked.add(pointer)
            if pointer not in self._proven:
                return False
        if any(not any(self._finite(s) for s in schema[k]) for k in ("anyOf", "oneOf") if _is_list(schema.get(k))):
            return False
        if _is_list(schema.get("allOf")) and not all(self._finite(s) for s in schema["allOf"]):
            return False
        types = schema.get("type")
        names = types if isinstance(types, list) else [types]
        return any(self._finite_as(schema, name) for name in names)

    def _finite_as(self, schema: Mapping[str, Any], name: Any) -> bool:
        if name == "object":
            properties = schema.get("properties")
            required = schema.get("required")
            if not isinstance(properties, Mapping) or not isinstance(required, list):
                return True
            return all(self._finite(properties.get(key, True)) for key in required if isinstance(key, str))
        if name == "array":
            least = schema.get("minItems", 0)
            least = least if isinstance(least, int) else 0
            prefix = schema.get("prefixItems", [])
            parts = list(prefix[:least]) if _is_list(prefix) else []
            if least > len(parts):
                parts.append(schema.get("items", True))
            return all(self._finite(part) for part in parts)
        return True

    def _target(self, pointer: str) -> Any:
        if not pointer.startswith("#"):
            raise InvalidInput(
                f"$ref {pointer!r} points outside of the schema",
                field=self._field,
                remedy="use references that start with #/",
            )
        node: Any = self._root
        for part in pointer[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                raise InvalidInput(f"$ref {pointer!r} points to nothing", field=self._field)
        return node


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


class GrammarTokens:
    """The vocabulary as grammars see it. Building it takes a few hundred milliseconds for a large vocabulary; share it.

    `tokens[i]` holds the raw bytes of token i (empty for ids that have none). Special tokens are never part of
    structured text; those of `eos_token_ids` end it.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        eos_token_ids: Iterable[int],
        special_token_ids: Iterable[int],
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        """`encode`: the tokenizer's own reading of a text (no special tokens). Where a grammar forces a text, only its
        usual spelling is then allowed, as the model has learnt it. Without it the longest tokens are taken."""
        eos = sorted(set(eos_token_ids))
        if not eos:
            raise InvalidInput("structured output needs a tokenizer with an end-of-sequence token", field="grammar")
        self.size = len(tokens)
        self.eos_token_ids = tuple(eos)
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokens, eos[0], special_token_ids, encode))
        self._tokenizer = llguidance.LLTokenizer(wrapper, eos_token=eos)

    @classmethod
    def of(cls, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> GrammarTokens:
        """The vocabulary of a tokenizer; `eos_token_ids` are the model's, which may differ from the tokenizer's."""
        return cls(
            [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)],
            eos_token_ids,
            tokenizer.special_ids,
            lambda text: tokenizer.encode(text, add_special=False, parse_special=False),
        )

    def matcher(self, grammar: str, min_tokens: int = 0) -> GrammarMatcher:
        """A matcher at the start of `grammar` (a string made by one of this module's functions)."""
        return GrammarMatcher(
            self, llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS), min_tokens
        )


class _Vocabulary:
    """What `llguidance.TokenizerWrapper` asks of a tokenizer."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        eos_token_id: int,
        special_token_ids: Iterable[int],
        encode: Callable[[str], Sequence[int]] | None,
    ) -> None:
        self.tokens = list(tokens)
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.special_token_ids = sorted(set(special_token_ids))
        self._encode = encode
        special = set(self.special_token_ids)
        self._ids = {} if encode else {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, data: bytes) -> list[int]:
        if self._encode is not None:
            return list(self._encode(data.decode()))
        ids: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                if (found := self._ids.get(data[start:end])) is not None:
                    ids.append(found)
                    break
            start = end
        return ids


class GrammarMatcher:
    """Follows one sequence through its grammar.

    Loop: `fill(row)`, sample under the mask, `advance(token)`. After a preemption, replay the tokens generated so far
    with `advance`. `min_tokens` holds EOS back only while the grammar allows something else: when the grammar ends,
    the sequence ends, so the mask is never empty.
    """

    def __init__(self, tokens: GrammarTokens, matcher: llguidance.LLMatcher, min_tokens: int) -> None:
        self._tokens = tokens
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._generated = 0
        self._ended = False
        if matcher.is_error():
            raise InvalidInput(f"this grammar cannot be used: {matcher.get_error()}", field="grammar")

    @property
    def ended(self) -> bool:
        """EOS was taken; every later mask allows everything."""
        return self._ended

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write the allowed tokens of the next position into `row` [mask_words(vocab_size)], bit i % 32 of word i // 32.

        Ids beyond the tokenizer's vocabulary (padding of the embedding) are never allowed. Raises `InvalidInput` when
        the grammar has become too complex to follow; only this sequence is then at fault.
        """
        if self._ended:
            row[:] = -1
            return
        allowed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        self._check()
        row[:] = 0
        count = min(len(row), len(allowed))
        row[:count] = allowed[:count]
        if self._generated < self._min_tokens:
            held = [(i >> 5, np.int32(np.uint32(1 << (i & 31)).view(np.int32))) for i in self._tokens.eos_token_ids]
            kept = row.copy()
            for word, bit in held:
                if word < len(kept):
                    kept[word] &= ~bit
            if kept.any():
                row[:] = kept

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidInput(f"the grammar cannot be followed further: {_said(self._matcher)}", field="grammar")

    def advance(self, token_id: int) -> None:
        """Take one sampled token. Raises `InvalidInput` for a token that the mask did not allow."""
        if self._ended:
            return
        self._generated += 1
        if token_id in self._tokens.eos_token_ids and (self._matcher.is_accepting() or self._matcher.is_stopped()):
            self._ended = True
            return
        if not self._matcher.consume_token(token_id):
            self._check()
            raise InvalidInput(f"token {token_id} does not continue the grammar", field="grammar")
