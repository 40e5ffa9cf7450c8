"""`headrace generate`: complete prompts with an engine in this process."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from headrace.base.errors import InvalidInput
from headrace.base.process import collector_paused, import_numpy, process_start_s
from headrace.cli._declared import ENGINE, SAMPLING, ChatTemplateFile, Command, GenerationConfig, Option
from headrace.control.params import SamplingParams
from headrace.spec.config import EngineConfig

if TYPE_CHECKING:
    import typer

    from headrace.llm import LLM, Completion


def generate(
    *,
    prompt: Annotated[list[str], Option("Text to continue; - reads it from stdin. May be repeated.")],
    chat: Annotated[bool, Option("Take each prompt as a user's message and answer it.", "--chat")] = False,
    chat_template: ChatTemplateFile = None,
    generation_config: GenerationConfig = True,
    json: Annotated[bool, Option("Print one JSON object instead of the text.", "--json")] = False,
    timings: Annotated[bool, Option("Report where the time to the first token went.", "--timings")] = False,
    params: SamplingParams,
    config: EngineConfig,
) -> None:
    """Complete one or more prompts and print the text as it comes."""
    started_s = process_start_s()
    prompts = [sys.stdin.read() if text == "-" else text for text in prompt]
    if not all(prompts):
        raise InvalidInput("is empty", field="prompt")
    if chat_template is not None and not chat:
        raise InvalidInput("has no meaning without --chat", field="chat_template")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and not json:
            raise InvalidInput("are shown only with --json", field=name)
    with collector_paused():
        import_numpy()
        from headrace.llm import LLM

        llm = LLM.from_config(config, chat_template, generation_config=generation_config)
    with llm:
        inputs: list[Any] = (
            [llm.chat_prompt([{"role": "user", "content": p}]) for p in prompts] if chat else list(prompts)
        )
        alone = len(inputs) * params.n == 1
        first_s: float | None = None
        done: list[Completion] = []
        for delta in llm.stream(inputs, params):
            if first_s is None and delta.token_ids:
                first_s = time.monotonic()
            if alone and not json:
                print(delta.text, end="", flush=True)
            if delta.completion is not None:
                done.append(delta.completion)
        if alone and not json:
            print()
        done.sort(key=lambda c: (c.prompt_index, c.index))
        seconds = _timings(llm, started_s, first_s, done)
        if json:
            _print_json(llm, done, seconds if timings else None)
        elif not alone:
            for c in done:
                print(f"--- prompt {c.prompt_index}, answer {c.index}\n{c.text}")
        if timings and not json:
            _print_timings(seconds)
        failed = [c.error for c in done if c.error is not None]
    if failed:
        print(f"headrace: {failed[0]}", file=sys.stderr)
        sys.exit(1)


def _timings(llm: LLM, started_s: float, first_s: float | None, done: list[Completion]) -> dict[str, float]:
    """Seconds per stage, in order; the stages up to the first token add up to it, but for those named `meanwhile`."""
    seconds = dict(llm.startup_s)
    ready_s = seconds.pop("engine ready")
    if first_s is not None:
        seconds["first token after that"] = first_s - started_s - ready_s
        seconds["process start to first token"] = first_s - started_s
    timelines = [c.timeline for c in done if c.timeline is not None]
    if timelines:
        seconds["whole answer after the first token"] = max(t.decode_s for t in timelines)
    return seconds


def _print_timings(seconds: dict[str, float]) -> None:
    width = max(map(len, seconds))
    for name, value in seconds.items():
        print(f"{name:<{width}}  {value:8.3f} s", file=sys.stderr)


def _print_json(llm: LLM, done: list[Completion], seconds: dict[str, float] | None) -> None:
    import msgspec

    body: dict[str, object] = {"model": llm.info.model, "backend": llm.info.backend, "completions": done}
    if seconds is not None:
        body["timings_s"] = seconds
    print(msgspec.json.encode(body).decode())


COMMAND = Command(generate, {"params": SAMPLING, "config": ENGINE})


def register(app: typer.Typer) -> None:
    from headrace.cli._options import add

    add(app, "generate", COMMAND)
