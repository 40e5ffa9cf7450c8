import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from headrace.base.errors import InvalidInput
from headrace.cli.chat import Conversation, conversational
from headrace.control.params import SamplingParams


class Model:
    """Answers with the number of messages it was sent; `fault` is what happens after the first word."""

    def __init__(self):
        self.sent = []
        self.fault = None
        self.closed = 0

    def chat_prompt(self, messages):
        self.sent.append([(m["role"], m["content"]) for m in messages])
        if self.fault == "refused":
            raise InvalidInput("roles must alternate", field="messages")
        return [1]

    def stream(self, prompt, params):
        try:
            yield SimpleNamespace(text="answer [b] ", completion=None)
            if self.fault == "interrupt":
                raise KeyboardInterrupt
            error = "NaN logits" if self.fault == "failed" else None
            yield SimpleNamespace(text=str(len(self.sent[-1])), completion=SimpleNamespace(error=error))
        finally:
            self.closed += 1


@pytest.fixture
def model():
    return Model()


class TestSamplingOfAConversation:
    """What was asked for, else what the model recommends, else something calmer than the API's default."""

    def test_where_nobody_says_anything(self):
        params, said = conversational(SamplingParams(seed=3), {"repetition_penalty": 1.1})
        assert params == SamplingParams(seed=3, temperature=0.6, min_p=0.1)
        calm = "sampling: temperature 0.6, min-p 0.1"
        default = "--temperature 1 is the API's default"
        assert said == f"{calm}, repetition-penalty 1.1 · {default} · repetition-penalty as the model recommends"
        params, said = conversational(SamplingParams(repetition_penalty=1.3), {"repetition_penalty": 1.1})
        assert params == SamplingParams(repetition_penalty=1.3, temperature=0.6, min_p=0.1)
        assert said == f"{calm}, repetition-penalty 1.3 · {default}"

    @pytest.mark.parametrize("asked", [{"temperature": 1.0}, {"temperature": 0.0}, {"top_k": 5}, {"min_p": 0.0}])
    def test_one_wish_leaves_the_rest_to_the_api(self, asked):
        params, said = conversational(SamplingParams(**asked), {})
        assert params == SamplingParams(**asked)
        assert said == "sampling: " + ", ".join(f"{k.replace('_', '-')} {v:g}" for k, v in asked.items())

    def test_the_model_is_asked_before(self):
        recommended = {"temperature": 1.0, "top_p": 0.95}
        params, said = conversational(SamplingParams(), recommended)
        assert params == SamplingParams()
        assert said == "sampling: temperature 1, top-p 0.95 · temperature, top-p as the model recommends"
        params, said = conversational(SamplingParams(temperature=0.2), recommended)
        assert said == "sampling: temperature 0.2, top-p 0.95 · top-p as the model recommends"


def talk(model, *lines, system=None):
    """What the terminal showed and the conversation after it; a line that is an exception is raised at the prompt."""
    screen = io.StringIO()
    conversation = Conversation(model, None, Console(file=screen, width=200), system)
    left = iter([*lines, EOFError()])

    def ask():
        line = next(left)
        if isinstance(line, BaseException):
            raise line
        if callable(line):
            line()
            return ""
        return line

    conversation.run(ask)
    return screen.getvalue(), conversation


def test_turns_are_sent_with_all_before_them(model):
    shown, _ = talk(model, "one", "  two  ", "", system="be kind")
    assert model.sent[0] == [("system", "be kind"), ("user", "one")]
    assert model.sent[1] == [*model.sent[0], ("assistant", "answer [b] 2"), ("user", "two")]
    assert "answer [b] 2\n" in shown
    assert "answer [b] 4\n" in shown


def test_reset_keeps_the_system_message_and_system_changes_it(model):
    talk(model, "one", "/reset", "two", "/system new one", "three", "/system", "four", system="old")
    assert [s[:-1] for s in model.sent] == [[("system", "old")], [("system", "old")], [("system", "new one")], []]


def test_exit_and_unknown_commands(model):
    shown, _ = talk(model, "/nonsense", "/usr/bin is a path", "/exit", "never sent")
    assert "unknown command /nonsense" in shown
    assert [s[-1][1] for s in model.sent] == ["/usr/bin is a path"]


def test_an_interrupt_stops_the_answer_and_not_the_program(model):
    model.fault = "interrupt"
    shown, conversation = talk(model, "one", lambda: setattr(model, "fault", None), KeyboardInterrupt(), "two")
    assert "cut short" in shown
    assert model.closed == 2
    assert model.sent[1] == [("user", "one"), ("assistant", "answer [b] "), ("user", "two")]
    assert conversation.messages[-1]["content"] == "answer [b] 3"


@pytest.mark.parametrize(("fault", "words"), [("refused", "roles must alternate"), ("failed", "NaN logits")])
def test_a_failed_turn_is_shown_and_forgotten(model, fault, words):
    model.fault = fault
    shown, conversation = talk(model, "one", lambda: setattr(model, "fault", None), "two")
    assert words in shown
    assert model.sent[1] == [("user", "two")]
    assert len(conversation.messages) == 2
