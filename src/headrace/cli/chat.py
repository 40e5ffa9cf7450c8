"""`headrace chat`: talk with a model in the terminal."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from headrace.cli._options import engine_options, sampling_options
from headrace.control.params import SamplingParams
from headrace.spec.config import EngineConfig


@engine_options
@sampling_options
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="System message at the start of the conversation.")] = None,
    params: SamplingParams,
    config: EngineConfig,
) -> None:
    """Talk with a model; an empty line or Ctrl-D ends, Ctrl-C cuts an answer short."""
    from headrace.llm import LLM

    with LLM.from_config(config) as llm:
        messages = [] if system is None else [{"role": "system", "content": system}]
        while True:
            try:
                text = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if not text:
                return
            messages.append({"role": "user", "content": text})
            answer = ""
            try:
                with closing(llm.stream(llm.chat_prompt(messages), params)) as deltas:
                    for delta in deltas:
                        answer += delta.text
                        print(delta.text, end="", flush=True)
                        if delta.completion is not None and delta.completion.error is not None:
                            print(f"[{delta.completion.error}]", end="")
            except KeyboardInterrupt:
                print(" [cut short]", end="")
            print()
            messages.append({"role": "assistant", "content": answer})


def register(app: typer.Typer) -> None:
    app.command(name="chat")(chat)
