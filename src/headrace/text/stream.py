"""A sequence's text as it is generated: which text may be shown, and which tokens it consists of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from headrace.text.detokenize import Detokenizer
from headrace.text.stop import StopMatcher
from headrace.text.tokenizer import Tokenizer

L = TypeVar("L")
"""What travels with a token, its logprobs; this module only carries it."""


class TextToken(NamedTuple, Generic[L]):
    """One generated token and its share of the text.

    A character belongs to the token that completed it (or showed that it never will be one: U+FFFD). So `text` is
    empty for the first tokens of a character spread over several, and for tokens that are not shown. `offset` is where
    `text` starts, in characters from the start of the generated text. `raw` are the token's exact bytes; for a token
    that is not shown, or only in part, the bytes of what is shown.
    """

    token_id: int
    text: str
    offset: int
    raw: bytes
    logprob: L | None

    @property
    def end(self) -> int:
        return self.offset + len(self.text)


class TextDelta(NamedTuple, Generic[L]):
    """Text that may be shown now and exactly the tokens it consists of: `text` is their texts joined."""

    text: str
    tokens: tuple[TextToken[L], ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)


class OutputText(Generic[L]):
    """Turns the token ids of one sequence into deltas of text, cut at the first stop string.

    * Deltas hold whole tokens. A token is held back while any character of it could be part of a stop string or while
      its last bytes are an unfinished character; tokens without text wait for the next one with text.
    * Once a stop string is complete the text ends right before it (after it with `include_stop`), also in the middle
      of a token, which is then reported with the part that is shown. Tokens wholly inside or after the stop string are
      not reported; everything pushed later is ignored. Which stop string wins: see `StopMatcher`.
    * `kept_tokens` counts the tokens that the answer took: all pushed, up to and including the one that completed the
      stop string. It is the number for usage: it does not depend on how many more tokens the engine made before it
      was told to stop, nor on how the ids were split over pushes.
    * Joined over all deltas, text and tokens are the same however the ids are split.

    `continuation`: the text follows a prompt (see `Detokenizer`). `min_tokens`: stop strings complete within the first
    so many tokens are passed over.
    """

    __slots__ = (
        "_detokenizer", "_finished", "_held", "_hidden", "_length", "_min_tokens", "_stop", "_tokenizer", "_whole", "kept_tokens"
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
        continuation: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special, continuation=continuation)
        self._stop = StopMatcher(stops, include_stop=include_stop)
        self._min_tokens = min_tokens
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._held: list[TextToken[L]] = []
        self._whole = 0  # held tokens up to the last one that has text and ends with a whole character
        self._length = 0
        self._finished = False
        self.kept_tokens = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.matched

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[L] = (), *, ended_by_token: bool = False
    ) -> TextDelta[L]:
        """Take the next tokens, with their logprobs if there are any; returns what may be shown now, often nothing.

        `ended_by_token`: the last of them is the EOS or stop id that ended the sequence; it has no text of its own,
        whatever it would stand for.
        """
        if len(token_ids) == 1 and not self._held and not ended_by_token and not self._finished:
            return self._push_one(token_ids[0], logprobs[0] if logprobs else None)
        for index, token_id in enumerate(token_ids):
            if self.stopped is not None or self._finished:
                break
            hide = ended_by_token and index == len(token_ids) - 1
            text = "" if hide else self._detokenizer.push_one(token_id)
            raw = b"" if hide or token_id in self._hidden else self._tokenizer.token_bytes(token_id)
            self._take(TextToken(token_id, text, self._length, raw, logprobs[index] if logprobs else None))
        return self._release()

    def push_text(self, token_id: int) -> str | None:
        """Take the next token if it is what comes mostly, text that may be shown at once, where only its text is wanted.

        None: it was not taken, use `push`.
        """
        if self._held or self._finished or self._stop.strings:
            return None
        text = self._detokenizer.whole(token_id)
        if text:
            self.kept_tokens += 1
            self._length += len(text)
            self._stop.read(text)
        return text or None

    def _push_one(self, token_id: int, logprob: L | None) -> TextDelta[L]:
        """`push` for what comes mostly: one token while none is held back, whose text may be shown at once."""
        if self._stop.matched is not None:
            return TextDelta("", ())
        text = self._detokenizer.push_one(token_id)
        raw = b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)
        token = TextToken(token_id, text, self._length, raw, logprob)
        self._take(token)
        if self._whole and self._stop.safe >= self._length:
            self._held.clear()
            self._whole = 0
            return TextDelta(text, (token,))
        return self._release()

    def finish(self) -> TextDelta[L]:
        """The sequence has ended: everything still held, with U+FFFD for an unfinished character. Empty if called
        again."""
        if not self._finished and self.stopped is None:
            rest = self._detokenizer.flush()
            if rest:
                self._give_to_unfinished(rest)
            self._stop.finish()
        self._finished = True
        return self._release()

    def _take(self, token: TextToken[L]) -> None:
        self.kept_tokens += 1
        self._held.append(token)
        self._length += len(token.text)
        self._stop.read(token.text, may_stop=self.kept_tokens >= self._min_tokens)
        if token.text and not self._detokenizer.pending:
            self._whole = len(self._held)

    def _give_to_unfinished(self, text: str) -> None:
        """The bytes of an unfinished character became text; the last token that has bytes, still held, owns it."""
        owner = max(index for index, token in enumerate(self._held) if token.raw)
        self._held[owner] = self._held[owner]._replace(text=self._held[owner].text + text)
        for index in range(owner + 1, len(self._held)):
            self._held[index] = self._held[index]._replace(offset=self._held[index].offset + len(text))
        self._length += len(text)
        self._stop.read(text, may_stop=self.kept_tokens >= self._min_tokens)

    def _release(self) -> TextDelta[L]:
        held, safe = self._held, self._stop.safe
        if self.stopped is not None:
            count = 1 + max((i for i, token in enumerate(held) if token.text and token.offset < safe), default=-1)
            released = [_shown(token, safe) for token in held[:count]]
            self._held = []
        else:
            count = len(held) if self._finished else self._whole
            while not self._finished and count and not (held[count - 1].text and held[count - 1].end <= safe):
                count -= 1
            released, self._held = held[:count], held[count:]
            self._whole -= count
        return TextDelta("".join([token.text for token in released]), tuple(released))


def _shown(token: TextToken[L], cut: int) -> TextToken[L]:
    """The part of a token before character `cut` of the text."""
    if token.end <= cut:
        return token
    text = token.text[: cut - token.offset]
    return token._replace(text=text, raw=text.encode())


def prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[L] = ()) -> TextDelta[L]:
    """A prompt's text with its tokens, for echo. `logprobs` starts with the prompt's second token; the first has none."""
    output: OutputText[L] = OutputText(tokenizer, continuation=False)
    first, rest = output.push(token_ids[:1]), output.push(token_ids[1:], logprobs)
    last = output.finish()
    return TextDelta(first.text + rest.text + last.text, first.tokens + rest.tokens + last.tokens)
