"""`headrace chat`: talk with a model in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from headrace.base.errors import HeadraceError, InvalidInput
from headrace.base.process import import_numpy
from headrace.cli._declared import ENGINE, SAMPLING, ChatTemplateFile, Command, GenerationConfig, Option
from headrace.control.params import SamplingParams
from headrace.spec.config import EngineConfig

if TYPE_CHECKING:
    import typer
    from rich.console import Console

    from headrace.llm import LLM

HELP = "/reset forgets the conversation · /system TEXT starts anew with a system message · /exit or Ctrl-D ends"
HINT = "Ctrl-C cuts an answer short · " + HELP


def chat(
    *,
    system: Annotated[str | None, Option("System message at the start of the conversation.")] = None,
    chat_template: ChatTemplateFile = None,
    generation_config: GenerationConfig = True,
    params: SamplingParams,
    config: EngineConfig,
) -> None:
    """Talk with a model in the terminal. Ctrl-C cuts an answer short, Ctrl-D ends; /help lists the commands.

    Sampling that neither you nor the model sets is temperature 0.6 with min-p 0.1: at the API's 1.0 small models ramble.
    """
    if params.n != 1:
        raise InvalidInput(f"n must be 1, not {params.n}: a turn of a conversation has one answer", field="n")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            raise InvalidInput("a conversation shows none", field=name, remedy="`headrace generate --chat --json` does")

    from rich.console import Console

    import_numpy()
    from headrace.llm import LLM

    console = Console(highlight=False)
    with console.status("loading the model"):
        llm = LLM.from_config(config, chat_template, generation_config=generation_config)
    with llm:
        console.print(HINT, style="dim")
        params, said = conversational(params, llm.recommended)
        console.print(said, style="dim")
        Conversation(llm, params, console, system).run(_ask(console))


_SHAPE = ("temperature", "top_k", "top_p", "min_p")
# Of 160 answers of SmolLM2-135M to four plain questions 65 % (57-72) named the right thing so, 61 % (54-68) with 0.8 and 0.05,
# 39 % (32-46) with temperature 1 alone: benchmarks/records/chat/sampling-smollm2-135m.json.
_CALM: Mapping[str, float] = {"temperature": 0.6, "min_p": 0.1}


def conversational(params: SamplingParams, recommended: Mapping[str, float]) -> tuple[SamplingParams, str]:
    """The sampling of a conversation, and a line that says it: what was asked for, else what the model recommends, else
    `_CALM`, of which only all or nothing is taken."""
    names = (*_SHAPE, "repetition_penalty")
    asked = {name: value for name in names if (value := getattr(params, name)) is not None}
    calm = not any(name in asked or name in recommended for name in _SHAPE)
    if calm:
        params = replace(params, temperature=_CALM["temperature"], min_p=_CALM["min_p"])
    held = {**(_CALM if calm else {}), **recommended, **asked}
    said = ["sampling: " + ", ".join(f"{_option(name)} {value:g}" for name, value in held.items())]
    if calm:
        said.append("--temperature 1 is the API's default")
    if left := ", ".join(_option(name) for name in recommended if name not in asked):
        said.append(f"{left} as the model recommends")
    return params, " · ".join(said)


def _option(name: str) -> str:
    return name.replace("_", "-")


class Conversation:
    """One talk with a model. The messages so far are sent with every turn."""

    def __init__(self, llm: LLM, params: SamplingParams, console: Console, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._console = console
        self._system = system
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def run(self, ask: Callable[[], str]) -> None:
        """Answer lines from `ask` until it raises EOFError or a line says /exit."""
        while True:
            try:
                line = ask().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say("Ctrl-D or /exit ends")
                continue
            command, _, rest = line.partition(" ")
            match command:
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/reset":
                    self.reset()
                    self._say("forgotten")
                case "/system":
                    self._system = rest.strip() or None
                    self.reset()
                    self._say("started anew" + ("" if self._system else " without a system message"))
                case "/help":
                    self._say(HELP)
                case _ if line.startswith("/") and line[1:2].isalpha() and "/" not in command[1:]:
                    self._say(f"unknown command {command} · {HELP}")
                case _:
                    self.answer(line)

    def answer(self, text: str) -> None:
        """Send the next message and show the answer as it comes. A turn that fails leaves no trace in the conversation."""
        turn = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        failure: str | None = None
        try:
            with closing(self._llm.stream(self._llm.chat_prompt(turn), self._params)) as deltas:
                for delta in deltas:
                    answer += delta.text
                    self._console.print(delta.text, end="", markup=False, soft_wrap=True)
                    if delta.completion is not None:
                        failure = delta.completion.error
        except KeyboardInterrupt:
            self._console.print(" [cut short]", end="", markup=False, style="dim")
        except HeadraceError as error:
            failure = str(error)
        self._console.print()
        if failure is not None:
            self._console.print(failure, markup=False, style="red", soft_wrap=True)
        else:
            self.messages = [*turn, {"role": "assistant", "content": answer}]

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, style="dim")


def _ask(console: Console) -> Callable[[], str]:
    try:
        import readline  # noqa: F401 - gives input() line editing and history
    except ImportError:
        console.print("no line editing here (Python has no readline)", style="dim")
    return lambda: console.input("[bold]> [/bold]")


COMMAND = Command(chat, {"params": SAMPLING, "config": ENGINE})


def register(app: typer.Typer) -> None:
    from headrace.cli._options import add

    add(app, "chat", COMMAND)
