"""Headrace in a Python program: `LLM` runs an engine in this process."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from headrace.base.errors import InvalidInput
from headrace.control.api import EngineInfo, EngineStats, Finish, FinishReason, Output, Timeline
from headrace.control.params import SamplingParams
from headrace.control.request import Request, Sampling
from headrace.control.seeds import choice_seed
from headrace.control.step import TokenLogprobs
from headrace.engine.inprocess import InProcessEngine
from headrace.engine.launch import launch
from headrace.spec.config import EngineConfig
from headrace.spec.locate import locate
from headrace.text.load import load_template, load_tokenizer
from headrace.text.stream import OutputText

__all__ = ["LLM", "Completion", "Delta", "SamplingParams"]

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `prompt_index` and `index`: which prompt it answers, and which of that prompt's `n` answers it is.

    `token_ids`: everything the engine generated up to the end of the text, a final EOS or stop token included.
    `stopped_by`: the stop string or token id that ended the answer; None if neither did. `cached_tokens`: tokens of the prompt
    that came from the prefix cache. `error` is set if `finish_reason` is `error`.
    """

    prompt_index: int
    index: int
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stopped_by: str | int | None
    cached_tokens: int
    timeline: Timeline | None
    error: str | None = None


class Delta(msgspec.Struct, frozen=True):
    """New text of one answer, and the tokens since the last delta (text may lag behind them). The last delta has `completion`."""

    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None


class LLM:
    """A model, loaded and ready. Use it as a context manager or call `close`.

    `options`: fields of `EngineConfig`. `chat_template`: a Jinja file to use instead of the model's own template.
    `generation_config` False ignores the sampling that the model recommends. A wrong option, prompt or token id raises
    `InvalidInput` naming it; a model that cannot be served, `UnsupportedModel`; one too large for the memory, `DoesNotFit`.

    Methods block. Several threads may call them at once; their requests are batched together.
    """

    def __init__(
        self, model: str, *, chat_template: str | Path | None = None, generation_config: bool = True, **options: Any
    ) -> None:
        known = {f.name for f in fields(EngineConfig)}
        for name in options:
            if name not in known:
                raise InvalidInput(
                    f"unknown option {name!r}", field=name, remedy="known: " + ", ".join(sorted(known - {"model"}))
                )
        self._start(EngineConfig(model=model, **options), chat_template, generation_config)

    @classmethod
    def from_config(
        cls, config: EngineConfig, chat_template: str | Path | None = None, *, generation_config: bool = True
    ) -> LLM:
        """The same, from options that are already an `EngineConfig`."""
        llm = cls.__new__(cls)
        llm._start(config, chat_template, generation_config)
        return llm

    def _start(self, config: EngineConfig, chat_template: str | Path | None, generation_config: bool) -> None:
        self.config = config
        self._chat_template = None if chat_template is None else Path(chat_template)
        self.files = locate(config.model, revision=config.revision, cached=config.cache)
        # The tokenizer is built while the weights load: both spend most of their time outside of Python.
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as side:
            text = side.submit(self._load_text)
            # Read with the header; said to be wrong, if it is, before the weights are loaded.
            self.recommended = self.files.sampling() if generation_config else {}
            """Sampling that the model recommends; it holds where `SamplingParams` leaves a field unset."""
            core = launch(config, files=self.files)
            text_s = text.result()
        self.startup_s = {**core.info.startup_s, "tokenizer and template (meanwhile)": text_s}
        self._engine = InProcessEngine(core, overlap=self.config.overlap)
        self._eos_token_ids = self.files.spec().eos_token_ids or self.tokenizer.eos_token_ids

    def _load_text(self) -> float:
        begin_s = time.monotonic()
        self.tokenizer = load_tokenizer(self.files, first_text_soon=True)
        self.template = load_template(self.files, self.tokenizer, self._chat_template)
        return time.monotonic() - begin_s

    @property
    def info(self) -> EngineInfo:
        """Resolved facts: sizes, precisions, memory, notes."""
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters after its latest step."""
        return self._engine.stats

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and free its memory; calls in progress end with reason `abort`."""
        self._engine.stop()

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Complete one prompt or several, each a text or token ids. Answers are in order of the prompts, the `n` of a prompt together."""
        return _collect(self.stream(prompts, params))

    def chat(
        self, messages: Messages | Sequence[Messages], params: SamplingParams | None = None, **template: Any
    ) -> list[Completion]:
        """Answer one conversation or several. `template`: variables for the chat template (`tools`, `enable_thinking`, …)."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(c, **template) for c in conversations], params)  # type: ignore[arg-type]

    def chat_prompt(self, messages: Messages, **template: Any) -> list[int]:
        """Token ids of a conversation up to where the answer begins."""
        return self.tokenizer.encode(self.template.render(messages, **template), add_special=False)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> Generator[Delta, None, None]:
        """Like `generate`, but yields answers piece by piece, interleaved. Closing the iterator early aborts unfinished answers."""
        return self._follow({run.request.request_id: run for run in self._runs(prompts, params or SamplingParams())})

    def _follow(self, runs: dict[str, _Run]) -> Generator[Delta, None, None]:
        arrived: queue.SimpleQueue[Output] = queue.SimpleQueue()
        unfinished = set(runs)
        try:
            for run in runs.values():
                self._engine.submit(run.request, arrived.put)
            while unfinished:
                output = arrived.get()
                run = runs[output.request_id]
                delta = run.take(output)
                if run.text.stopped is not None and output.finish is None:
                    self._engine.abort(output.request_id)  # its ending still comes, with counts and timeline
                if output.finish is not None:
                    unfinished.remove(output.request_id)
                if delta is not None:
                    yield delta
        finally:
            for request_id in unfinished:
                self._engine.abandon(request_id)

    def _runs(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams) -> list[_Run]:
        several = not isinstance(prompts, str) and not all(isinstance(p, int) for p in prompts)
        batch: Sequence[Prompt] = prompts if several else [prompts]  # type: ignore[assignment,list-item]
        vocabulary = self.info.vocab_size
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if not 0 <= token_id < vocabulary:
                    raise InvalidInput(f"token id {token_id} is not in 0 … {vocabulary - 1}", field=name)
        if params.grammar is not None:
            from headrace.text.grammar import lark_grammar

            lark_grammar(params.grammar, "grammar")
        tag, now_s = os.urandom(6).hex(), time.monotonic()
        runs = []
        for p, prompt in enumerate(batch):
            where = f"prompts[{p}]" if several else "prompt"
            ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
            sampling = self._sampling(ids, params, where)
            for c in range(params.n):
                request = Request(
                    request_id=f"{tag}-{p}-{c}",
                    prompt_token_ids=ids,
                    sampling=msgspec.structs.replace(sampling, seed=choice_seed(params.seed, c)),
                    priority=params.priority,
                    arrival_s=now_s,
                )
                text: OutputText[TokenLogprobs] = OutputText(
                    self.tokenizer,
                    params.stops,
                    include_stop=params.include_stop,
                    skip_special=params.skip_special,
                    min_tokens=params.min_tokens,
                )
                runs.append(_Run(p, c, request, text))
        return runs

    def _sampling(self, ids: tuple[int, ...], params: SamplingParams, where: str) -> Sampling:
        if not ids:
            raise InvalidInput("a prompt needs at least one token", field=where)
        for token_id in ids:
            if not isinstance(token_id, int) or not 0 <= token_id < self.info.vocab_size:
                raise InvalidInput(f"token id {token_id!r} is not in 0 … {self.info.vocab_size - 1}", field=where)
        room = self.info.max_model_len - len(ids)
        if room < 1:
            raise InvalidInput(
                f"a prompt of {len(ids):,} tokens leaves no room in the context of {self.info.max_model_len:,}",
                field=where,
                remedy="shorten it, or raise max_model_len",
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        top_p = self._default(params.top_p, "top_p", 1.0)
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            # top_p 0 keeps only the best token
            temperature=0.0 if top_p == 0 else self._default(params.temperature, "temperature", 1.0),
            top_k=max(0, int(self._default(params.top_k, "top_k", 0))),
            top_p=top_p or 1.0,
            min_p=self._default(params.min_p, "min_p", 0.0),
            repetition_penalty=self._default(params.repetition_penalty, "repetition_penalty", 1.0),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=dict(params.logit_bias or {}),
            eos_token_ids=tuple(self._eos_token_ids),
            stop_token_ids=tuple(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            grammar=params.grammar,
        )

    def _default(self, given: float | None, name: str, neutral: float) -> float:
        if given is not None:
            return given
        return self.recommended.get(name, neutral)


def _collect(deltas: Iterable[Delta]) -> list[Completion]:
    done = [delta.completion for delta in deltas if delta.completion is not None]
    return sorted(done, key=lambda c: (c.prompt_index, c.index))


class _Run:
    """One sequence in flight: gathers its outputs into text and, at the end, a `Completion`."""

    def __init__(self, prompt_index: int, index: int, request: Request, text: OutputText[TokenLogprobs]) -> None:
        self.prompt_index = prompt_index
        self.index = index
        self.request = request
        self.text = text
        self._shown: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []

    def take(self, output: Output) -> Delta | None:
        """What to show of an output; None if that is nothing."""
        finish = output.finish
        new: tuple[int, ...] = ()
        shown = ""
        self._prompt_logprobs += output.prompt_logprobs
        if self.text.stopped is None:
            before = self.text.kept_tokens
            ended_by_token = finish is not None and finish.stop_token_id is not None
            shown = self.text.push(output.token_ids, output.logprobs, ended_by_token=ended_by_token).text
            kept = self.text.kept_tokens - before
            new = output.token_ids[:kept]
            self._token_ids += new
            self._logprobs += output.logprobs[:kept]
        if finish is not None:
            shown += self.text.finish().text
        if not (shown or new or finish):
            return None
        self._shown.append(shown)
        completion = None if finish is None else self._completion(finish)
        return Delta(self.prompt_index, self.index, shown, new, completion)

    def _completion(self, finish: Finish) -> Completion:
        stopped = self.text.stopped is not None
        return Completion(
            prompt_index=self.prompt_index,
            index=self.index,
            prompt_token_ids=self.request.prompt_token_ids,
            text="".join(self._shown),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            finish_reason=FinishReason.STOP if stopped else finish.reason,
            stopped_by=self.text.stopped if stopped else finish.stop_token_id,
            cached_tokens=finish.cached_tokens,
            timeline=finish.timeline,
            error=None if stopped else finish.error,
        )
