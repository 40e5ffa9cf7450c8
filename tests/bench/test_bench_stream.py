"""Reading a stream: any cut of the bytes gives the same events, tokens are never guessed where they are known."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.client import Stream, settle
from headrace.bench.endpoint import Usage
from headrace.bench.records import Outcome, RequestRecord, TokenSource


def chunk(
    text: str = "", *, finish: str | None = None, usage: int | None = None, ids: list[int] | None = None
) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    frame: dict[str, object] = {"id": "x", "choices": [choice]}
    if ids is not None:
        choice["token_ids"] = ids
    if usage is not None:
        frame["usage"] = {"prompt_tokens": 3, "completion_tokens": usage}
    return b"data: " + json.dumps(frame).encode() + b"\n\n"


def total(tokens: int) -> bytes:
    return b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":%d}}\n\n' % tokens


DONE = b"data: [DONE]\n\n"


BOM = b"\xef\xbb\xbf"


@given(st.lists(st.integers(1, 40), max_size=40), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_neither_cuts_of_the_bytes_nor_the_kind_of_line_ending_matter(cuts: list[int], ending: bytes) -> None:
    data = b": comment\r\n\r\n" + chunk("hé") + chunk("llo") + chunk("!", finish="length") + total(3) + DONE
    data = BOM + ending.join(data.split(b"\n"))
    whole, pieces = Stream(), Stream()
    whole.feed(data, 1.0)
    rest = data
    for cut in cuts:
        pieces.feed(rest[:cut], 1.0)
        rest = rest[cut:]
    pieces.feed(rest, 1.0)
    for stream in (whole, pieces):
        stream.finish(1.0)
    for stream in (whole, pieces):
        assert stream.text == "héllo!"
        assert stream.done
        assert stream.finish_reason == "length"
        assert stream.tokens() == ([1.0, 1.0, 1.0], TokenSource.ONE_PER_CHUNK)


@pytest.mark.parametrize(
    ("frames", "tokens", "source"),
    [
        ([chunk("ab", usage=2), chunk("c", usage=3)], [2.0, 1.0], TokenSource.CHUNK_USAGE),
        ([chunk("ab", ids=[1, 2]), chunk("c", ids=[3])], [2.0, 1.0], TokenSource.TOKEN_IDS),
        ([chunk("abab"), chunk("cd"), total(6)], [4.0, 2.0], TokenSource.SPREAD),
        ([chunk("a"), chunk("b", finish="stop"), total(3)], [1.0, 1.0], TokenSource.ONE_PER_CHUNK),
        ([chunk("a"), chunk("b")], [1.0, 1.0], TokenSource.ASSUMED),
        (
            [chunk(""), chunk("a", usage=1), chunk("", usage=2), chunk("b", usage=3)],
            [1.0, 2.0],
            TokenSource.CHUNK_USAGE,
        ),
        ([], [], TokenSource.ASSUMED),
    ],
)
def test_where_tokens_come_from(frames: list[bytes], tokens: list[float], source: TokenSource) -> None:
    stream = Stream()
    for at_s, frame in enumerate(frames):
        stream.feed(frame, float(at_s))
    assert stream.tokens() == (tokens, source)


def judged(stream: Stream, **fields: object) -> RequestRecord:
    record = RequestRecord(
        index=0, intended_s=0.0, sent_s=0.1, headers_s=0.2, end_s=9.0, http_status=200, output_tokens_asked=2
    )
    for name, value in fields.items():
        setattr(record, name, value)
    settle(record, stream, force_length=True)
    return record


def fed(*frames: bytes, at_s: float = 1.0) -> Stream:
    stream = Stream()
    for frame in frames:
        stream.feed(frame, at_s)
    return stream


@pytest.mark.parametrize(
    ("stream", "fields", "outcome"),
    [
        (fed(chunk("a"), chunk("b", finish="length"), total(2), DONE), {}, Outcome.OK),
        (fed(chunk("a"), b'data: {"error":{"message":"boom"}}\n\n'), {}, Outcome.STREAM_ERROR),
        (fed(b"data: not json\n\n"), {}, Outcome.STREAM_ERROR),
        (fed(chunk("a")), {}, Outcome.CUT),
        (fed(DONE), {}, Outcome.EMPTY),
        (fed(chunk("a", finish="stop"), total(1), DONE), {}, Outcome.WRONG_LENGTH),
        (fed(chunk("a"), chunk("b", finish="length"), total(2), DONE, at_s=0.01), {}, Outcome.NEGATIVE_TIME),
        (fed(chunk("a"), chunk("b"), total(2), DONE), {"sent_s": -1.0}, Outcome.NEGATIVE_TIME),
        (fed(), {"http_status": 503}, Outcome.HTTP_ERROR),
        (fed(chunk("a")), {"outcome": Outcome.TIMEOUT}, Outcome.TIMEOUT),
    ],
)
def test_only_complete_answers_are_ok(stream: Stream, fields: dict[str, object], outcome: Outcome) -> None:
    assert judged(stream, **fields).outcome is outcome


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_an_event_whose_json_is_in_several_lines(ending: bytes) -> None:
    frame = json.dumps({"choices": [{"delta": {"content": "ab"}, "finish_reason": "stop"}]}, indent=1)
    lines = [b"event: message", *(b"data: " + line.encode() for line in frame.splitlines()), b"", b"data: [DONE]", b""]
    stream = fed(*(line + ending for line in lines))
    stream.finish(1.0)
    assert (stream.text, stream.done, stream.error) == ("ab", True, "")


def test_a_stream_that_says_nothing_now_and_then_and_ends_without_a_line() -> None:
    stream = fed(b"data:\n\n", b'data: {"id":null,"choices":null,"usage":null}\n\n', b"retry: 3\n", chunk("a"))
    stream.feed(b"data: [DONE]", 2.0)
    assert not stream.done
    stream.finish(2.0)
    assert (stream.text, stream.done, stream.error) == ("a", True, "")
    half = fed(chunk("a"), b'data: {"choices":[{"del')
    half.finish(2.0)
    assert judged(half).outcome is Outcome.CUT


def test_an_event_that_is_named_an_error_is_one() -> None:
    stream = fed(chunk("a"), b'event: error\ndata: {"message":"out of memory"}\n\n', chunk("b"))
    assert judged(stream).outcome is Outcome.STREAM_ERROR
    assert "out of memory" in stream.error
    assert fed(b"event: error\n\n", chunk("a")).error == ""


def test_a_line_without_end_is_not_kept() -> None:
    stream = fed(b"data: " + b"x" * (2**24 + 1))
    assert "more than" in stream.error


def test_cached_tokens_are_read_from_usage() -> None:
    assert (
        msgspec.json.decode(b'{"prompt_tokens_details":{"cached_tokens":5,"audio_tokens":0}}', type=Usage).cached_tokens
        == 5
    )
    assert Usage().cached_tokens is None


@pytest.mark.parametrize(
    "usage",
    [
        '{"prompt_tokens":-5,"completion_tokens":1}',
        '{"prompt_tokens":5,"completion_tokens":1000000000000000000000000000000}',
        '{"prompt_tokens":5,"completion_tokens":4294967295}',
        '{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":"many"}}',
        '{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":-1}}',
    ],
)
def test_a_usage_that_counts_no_tokens_spoils_its_answer_and_no_figure(usage: str) -> None:
    stream = fed(chunk("a"), b'data: {"choices":[],"usage":%s}\n\n' % usage.encode(), b"data: [DONE]\n\n")
    record = judged(stream)
    assert record.outcome is Outcome.STREAM_ERROR
    assert "usage" in record.error
    assert record.prompt_tokens is None


def test_reasoning_and_tools_are_answers_too() -> None:
    stream = Stream()
    stream.feed(b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n', 1.0)
    stream.feed(b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n', 2.0)
    assert [event.at_s for event in stream.events] == [1.0, 2.0]
