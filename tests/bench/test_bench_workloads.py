"""Workloads: every one is seeded, reproducible, of the declared lengths and sharing, and honest about what it leaves out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import pytest

from headrace.base.errors import InvalidInput
from headrace.bench.prompts import PromptWriter, common_words
from headrace.bench.traffic import Call, Fitting, IntRange, Message, Session, TrafficContext
from headrace.bench.workloads import WORKLOADS, find_workload, workload_options
from headrace.bench.workloads.agentic_branching import score_of
from headrace.bench.workloads.mooncake import group_turns, read_trace

NAMES = [name for name in WORKLOADS.names() if name != "file"]


def sessions_of(
    name: str, seed: int = 0, salt: str = "", fitting: Fitting | None = None, **options: str
) -> tuple[TrafficContext, Iterator[Session]]:
    kind = find_workload(name)
    context = TrafficContext(PromptWriter(common_words()), seed, salt, fitting or Fitting(None))
    return context, kind.sessions(workload_options(kind, options), context)


def play(session: Session) -> list[list[Call]]:
    """All calls of a session by stage, each answered with as many words as were asked for."""
    script, stages = session.script(), []
    stage = next(script)
    while True:
        stages.append(list(stage.calls))
        try:
            stage = script.send([" ".join(["word"] * call.output_tokens) for call in stage.calls])
        except StopIteration:
            return stages


def text_of(call: Call) -> str:
    return (
        call.prompt
        if isinstance(call.prompt, str)
        else "\n".join(m.content for m in call.prompt if isinstance(m, Message))
    )


def calls(name: str, count: int, **how: object) -> list[Call]:
    _, stream = sessions_of(name, **how)  # type: ignore[arg-type]
    return [call for session in islice(stream, count) for stage in play(session) for call in stage]


@pytest.mark.parametrize("name", NAMES)
def test_equal_seeds_give_equal_traffic(name: str) -> None:
    assert calls(name, 6, seed=3) == calls(name, 6, seed=3)
    first, second = sessions_of(name, seed=3)[1], sessions_of(name, seed=3)[1]
    assert [s.arrival_s for s in islice(first, 6)] == [s.arrival_s for s in islice(second, 6)]


@pytest.mark.parametrize("name", NAMES)
def test_a_salt_changes_words_and_nothing_else(name: str) -> None:
    plain, salted = calls(name, 5, seed=1), calls(name, 5, seed=1, salt="x")
    assert [(c.prompt_tokens, c.output_tokens) for c in plain] == [(c.prompt_tokens, c.output_tokens) for c in salted]
    assert all(text_of(a) != text_of(b) for a, b in zip(plain, salted, strict=True))


@pytest.mark.parametrize("name", ["random", "shared-prefix", "chat-sessions", "agentic-branching", "rag"])
def test_another_seed_gives_other_lengths(name: str) -> None:
    how = {"isl": "16:64"} if name == "shared-prefix" else {}
    lengths = [[(c.prompt_tokens, c.output_tokens) for c in calls(name, 8, seed=seed, **how)] for seed in (0, 1)]
    assert lengths[0] != lengths[1]


@pytest.mark.parametrize("name", NAMES)
def test_sessions_know_how_many_calls_they_have(name: str) -> None:
    _, stream = sessions_of(name)
    for number, session in enumerate(islice(stream, 5)):
        assert session.index == number
        assert sum(len(stage) for stage in play(session)) == session.num_calls


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("agentic-branching", "chat-sessions")])
def test_prompts_have_exactly_the_declared_words(name: str) -> None:
    for call in calls(name, 12):
        assert len(text_of(call).split()) == call.prompt_tokens


@pytest.mark.parametrize("name", ["chat-sessions", "agentic-branching"])
def test_declared_tokens_of_chats_are_those_of_their_words(name: str) -> None:
    for call in calls(name, 4):
        assert len(text_of(call).split()) == call.prompt_tokens


@pytest.mark.parametrize("name", ["random", "azure-conv", "azure-code"])
def test_no_prompt_begins_like_another(name: str) -> None:
    prompts = [text_of(call).split() for call in calls(name, 300)]
    heads = {tuple(words[:3]) for words in prompts}
    assert len(heads) == 300


def shared_head(a: str, b: str) -> int:
    count = 0
    for x, y in zip(a.split(), b.split(), strict=False):
        if x != y:
            break
        count += 1
    return count


@pytest.mark.parametrize("name", ["shared-prefix", "chat-sessions", "agentic-branching", "rag", "mooncake"])
def test_declared_sharing_is_really_there(name: str) -> None:
    how = {"fitting": Fitting(None, factor=0.05)} if name == "mooncake" else {}
    seen: list[str] = []
    shared_any = False
    for call in calls(name, 6 if name == "agentic-branching" else 30, **how):
        best = max((shared_head(text_of(call), earlier) for earlier in seen), default=0)
        assert best >= call.shared_tokens - 1
        shared_any |= call.shared_tokens > 0
        seen.append(text_of(call) + " word" * call.output_tokens)  # a server keeps the answer as well
    assert shared_any


def test_azure_lengths_and_arrivals_are_the_trace() -> None:
    _, stream = sessions_of("azure-conv")
    first = list(islice(stream, 3))
    assert [s.arrival_s for s in first] == [0.0, 4.314579, 4.541993] or first[1].arrival_s == 4.314579
    call = play(first[0])[0][0]
    assert (call.prompt_tokens, call.output_tokens) == (374, 44)
    _, stream = sessions_of("azure-conv")
    lap = list(islice(stream, 2001))
    assert lap[2000].arrival_s is not None
    assert lap[2000].arrival_s > (lap[1999].arrival_s or 0)
    assert text_of(play(lap[2000])[0][0]) != text_of(play(lap[0])[0][0])


def test_mooncake_rebuilds_blocks_from_hashes() -> None:
    rows = read_trace()
    a, b = rows[0], rows[1]
    assert a.blocks[0] == b.blocks[0]
    got = calls("mooncake", 2)
    assert shared_head(text_of(got[0]), text_of(got[1])) == 512
    assert (got[0].prompt_tokens, got[0].output_tokens) == (a.prompt, a.output)


def test_mooncake_turns_follow_their_conversation() -> None:
    rows = [(row, row.prompt, row.output) for row in read_trace()]
    sessions = group_turns(rows)
    assert sum(map(len, sessions)) == len(rows)
    longer = [turns for turns in sessions if len(turns) > 1]
    assert longer
    for turns in longer:
        for (earlier, *_), (later, *_) in pairwise(turns):
            assert later.arrival_s >= earlier.arrival_s
            assert later.blocks[:2] == earlier.blocks[:2]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["skip", "clip", "scale"])
def test_nothing_longer_than_the_context_is_sent(name: str, policy: str) -> None:
    fitting = Fitting(1500, policy, reserve=8)  # type: ignore[arg-type]
    found = calls(name, 40, fitting=fitting)
    assert all(call.prompt_tokens + call.output_tokens <= 1500 for call in found)
    if name.startswith("azure"):
        assert found
        assert (fitting.skipped > 0) == (policy == "skip")
        assert (fitting.clipped > 0) == (policy == "clip")


@pytest.mark.parametrize("name", NAMES)
def test_a_context_too_short_for_anything_ends_the_workload(name: str) -> None:
    assert calls(name, 1, fitting=Fitting(12, "skip", reserve=8)) == []


def test_scaling_keeps_the_shape() -> None:
    whole, half = calls("azure-conv", 20), calls("azure-conv", 20, fitting=Fitting(None, factor=0.5))
    assert [c.prompt_tokens for c in half] == [max(1, c.prompt_tokens // 2) for c in whole]


def test_agents_see_the_proposals_they_review() -> None:
    _, stream = sessions_of("agentic-branching", branches="3", rounds="2")
    stages = play(next(stream))
    assert [len(stage) for stage in stages] == [3, 3, 3, 3]
    for proposal, review in zip(stages[0], stages[1], strict=True):
        assert review.prompt[: len(proposal.prompt)] == proposal.prompt
        assert review.prompt[-2] == Message("assistant", " ".join(["word"] * proposal.output_tokens))


@pytest.mark.parametrize(
    ("text", "score"), [("Score: 7", 7), ("score 3 ... Score: 10", 10), ("Score: 0", 0), ("fine", 0), ("Score: 99", 0)]
)
def test_scores_are_read(text: str, score: int) -> None:
    assert score_of(text) == score


def test_canned_history_does_not_depend_on_the_server() -> None:
    def prompts(reply: str) -> list[object]:
        _, stream = sessions_of("chat-sessions", history="canned", turns="3")
        script = next(stream).script()
        found, stage = [], next(script)
        while True:
            found.append(stage.calls[0].prompt)
            try:
                stage = script.send([reply])
            except StopIteration:
                return found

    assert prompts("a") == prompts("b c")


def test_file_of_prompts_and_chats(tmp_path: Path) -> None:
    lines = [
        {"prompt": "tell me more", "output_tokens": 5, "arrived_at": 1.5},
        {"messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "why"}], "max_tokens": 3},
        {
            "conversations": [
                {"from": "human", "value": "a b"},
                {"from": "gpt", "value": "c d e"},
                {"from": "human", "value": "f"},
                {"from": "gpt", "value": "g"},
            ]
        },
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    _, stream = sessions_of("file", path=str(path))
    prompt, chat, share = stream
    assert prompt.arrival_s == 0.0
    assert play(prompt)[0][0].output_tokens == 5
    assert [m.role for m in play(chat)[0][0].prompt] == ["system", "user"]  # type: ignore[union-attr]
    turns = play(share)
    assert [len(stage[0].prompt) for stage in turns] == [1, 3]
    assert turns[1][0].prompt[1] == Message("assistant", "c d e")
    array = tmp_path / "sharegpt.json"
    array.write_text(json.dumps([lines[2]]))
    assert len(list(sessions_of("file", path=str(array))[1])) == 1


def test_a_file_is_read_as_people_write_it(tmp_path: Path) -> None:
    """A byte order mark, CRLF, a line separator inside a text, parts of a message; times of a clock, in any order."""
    path = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": "second\u2028line", "arrived_at": 1_700_000_002.5},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
         "arrived_at": 1_700_000_000},
    ]  # fmt: skip
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps(x, ensure_ascii=False) for x in lines).encode())
    first, second = sessions_of("file", path=str(path))[1]
    assert (first.arrival_s, second.arrival_s) == (0.0, 2.5)
    assert play(first)[0][0].prompt[0] == Message("user", "a\nb")
    assert play(second)[0][0].prompt[0] == Message("user", "second\u2028line")
    kind = WORKLOADS.get("file")
    assert (kind.gives_arrivals("trace"), kind.gives_arrivals(None), kind.gives_arrivals("poisson")) == (
        True,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1"),
        ('{"x": 1}', "entry 1"),
        ("[1]", "entry 1"),
        ("", "no request"),
        (None, "cannot read"),
        ('{"prompt": "a"}\n{"prompt": "a", "arrived_at": "x"}', "entry 2: arrived_at"),
        ('{"prompt": "a", "arrived_at": NaN}', "arrived_at"),
        ('{"prompt": "a", "output_tokens": 0}', "at least one output token"),
        ('{"prompt": "a", "max_tokens": -1}', "at least one output token"),
        ('{"prompt": "a", "max_tokens": Infinity}', "infinity"),
        ('{"prompt": 5}', "5 is not text"),
        ('{"messages": []}', "a message"),
        ('{"messages": [{"role": "user", "content": null}]}', "None is not text"),
        ('{"conversations": [{"from": "human", "value": 3}]}', "3 is not text"),
        ('{"conversations": ["hi"]}', "entry 1"),
    ],
)
def test_bad_files_say_where(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidInput, match=says) as raised:
        list(sessions_of("file", path=str(path))[1])
    assert raised.value.field == "--file"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("random", {"colour": "red"}),
        ("random", {"isl": "x"}),
        ("random", {"isl": "9:3"}),
        ("random", {"isl": "0"}),
        ("rag", {"documents": "-1"}),
        ("rag", {"documents": "many"}),
        ("rag", {"retrieved": "99"}),
        ("shared-prefix", {"groups": "0"}),
        ("agentic-branching", {"branches": "0"}),
        ("chat-sessions", {"history": "none"}),
        ("file", {}),
        ("nope", {}),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, str]) -> None:
    with pytest.raises(InvalidInput) as raised:
        next(sessions_of(name, **options)[1])
    assert raised.value.field is not None
    assert raised.value.field.startswith("--")


def test_ranges() -> None:
    assert IntRange.parse("7", "f") == IntRange(7, 7)
    assert str(IntRange.parse("3:9", "f")) == "3:9"


def test_words_are_distinct_and_unique_heads_never_repeat() -> None:
    words = common_words()
    assert len(set(words)) == len(words) == 256
    writer = PromptWriter(words)
    assert len({writer.unique(tag, "s") for tag in range(20_000)}) == 20_000


def test_a_known_tokenizer_makes_lengths_exact() -> None:
    def count(text: str) -> int:
        return sum(2 if len(word) > 6 else 1 for word in text.split())

    from random import Random

    writer = PromptWriter(common_words(), count=count)
    for tokens in (1, 2, 17, 200):
        assert count(writer.text(Random(tokens), tokens)) in (tokens, tokens + (tokens == 1))


@pytest.mark.model
def test_words_are_single_tokens_of_a_real_tokenizer() -> None:
    pytest.importorskip("tokenizers")
    from headrace.bench.tokens import token_counter

    count = token_counter("smollm2-135m")
    assert count(" ".join(common_words())) == 256
    for call in calls("random", 5):
        assert count(text_of(call)) == call.prompt_tokens
