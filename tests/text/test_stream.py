import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import TEXTS, ids_of, pieces

from headrace.text.stream import OutputText, prompt_text
from headrace.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model


def run(tokenizer, parts, stops=(), **options):
    """All deltas, the last of them from `finish`, and the OutputText."""
    output = OutputText(tokenizer, stops, **options)
    deltas, position = [], 0
    for part in parts:
        deltas.append(output.push(part, [position + i for i in range(len(part))]))
        position += len(part)
    return [*deltas, output.finish()], output


def stops_in(text, data):
    """Stop strings that occur in the text, nearly do, or do not."""
    cut = st.tuples(st.integers(0, len(text)), st.integers(1, 5)).map(lambda c: text[c[0] : c[0] + c[1]])
    some = st.one_of(cut, cut.map(lambda c: c + "~"), st.text(min_size=1, max_size=3)).filter(bool)
    return data.draw(st.lists(some, max_size=3))


def reference(tokenizer, ids, stops, include, minimum):
    """Slow: after each token decode everything, look at every end for a stop."""
    done = ""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count]).rstrip("�") if count < len(ids) else tokenizer.decode(ids)
        if not tokenizer.decode(ids).startswith(text) or not text.startswith(done):
            text = done
        for end in range(len(done) + 1, len(text) + 1):
            found = [stop for stop in stops if text[:end].endswith(stop)]
            if found and count >= minimum:
                stop = max(found, key=len)
                return text[: end if include else end - len(stop)], stop, count
        done = text
    return tokenizer.decode(ids), None, len(ids)


def test_random_streams(tokenizer):
    @settings(max_examples=250, deadline=None)
    @given(ids_of(tokenizer), st.lists(st.integers(0, 12), max_size=4), st.booleans(), st.integers(0, 4), st.data())
    def check(ids, cuts, include, minimum, data):
        whole = tokenizer.decode(ids)
        stops = stops_in(whole, data)
        options = {"include_stop": include, "min_tokens": minimum, "continuation": False}
        once, output = run(tokenizer, [ids], stops, **options)
        deltas, split = run(tokenizer, pieces(ids, cuts), stops, **options)
        singly, single = run(tokenizer, [[id_] for id_ in ids], stops, **options)

        for one, other in ((deltas, split), (singly, single)):
            assert "".join(d.text for d in one) == "".join(d.text for d in once)
            assert sum((d.tokens for d in one), ()) == sum((d.tokens for d in once), ())
            assert (other.stopped, other.kept_tokens) == (output.stopped, output.kept_tokens)
        for delta in [*once, *deltas, *singly]:
            assert delta.text == "".join(token.text for token in delta.tokens)

        shown, tokens = "".join(d.text for d in singly), sum((d.tokens for d in singly), ())
        assert [token.logprob for token in tokens] == list(range(len(tokens)))
        assert [token.token_id for token in tokens] == ids[: len(tokens)]
        offset = 0
        for token in tokens:
            assert token.offset == offset
            offset += len(token.text)
        assert whole.startswith(shown)
        if output.stopped is None:
            assert (shown, len(tokens), output.kept_tokens) == (whole, len(ids), len(ids))
        else:
            assert len(tokens) <= output.kept_tokens
            assert not tokens or tokens[-1].text
            assert whole[len(shown) :].startswith(output.stopped) or include
        if "�" not in whole:
            assert (shown, output.stopped, output.kept_tokens) == reference(tokenizer, ids, stops, include, minimum)

    check()


def test_texts_alone_are_those_of_the_tokens(tokenizer):
    taken = 0

    @settings(max_examples=150, deadline=None)
    @given(ids_of(tokenizer), st.lists(st.booleans(), min_size=1), st.booleans(), st.booleans(), st.data())
    def check(ids, asks, continuation, with_stops, data):
        nonlocal taken
        stops = stops_in(tokenizer.decode(ids), data) if with_stops else []
        singly, single = run(tokenizer, [[id_] for id_ in ids], stops, continuation=continuation)
        output = OutputText(tokenizer, stops, continuation=continuation)
        for i, id_ in enumerate(ids):
            text = output.push_text(id_) if asks[i % len(asks)] else None
            if text is None:
                delta = output.push([id_], [i])
                assert delta == singly[i]
            else:
                taken += 1
                assert text == singly[i].text
        assert output.finish() == singly[-1]
        assert (output.stopped, output.kept_tokens) == (single.stopped, single.kept_tokens)

    check()
    assert taken


@pytest.mark.parametrize("stops", [["aab", "ab"], ["ab", "aab"]])
def test_overlapping_stops_earliest_wins_and_nothing_leaks(stops):
    ours = Tokenizer.of_bytes()
    deltas, output = run(ours, [[b] for b in b"xaab"], stops)
    assert "".join(d.text for d in deltas) == "x"
    assert (output.stopped, output.kept_tokens) == ("aab", 4)


def test_a_stop_over_many_tokens_is_never_begun(smollm):
    ids = smollm.encode("One two three four five six")
    stop = "two three four"
    deltas, output = run(smollm, [[id_] for id_ in ids], [stop])
    assert "".join(d.text for d in deltas) == "One "
    assert output.stopped == stop
    assert output.kept_tokens < len(ids)


def test_a_stop_in_the_middle_of_a_token_cuts_it_there(smollm):
    ids = smollm.encode("Hello wonderful people")
    (delta, *_), output = run(smollm, [ids], ["nderf"])
    assert delta.text == "Hello wo"
    assert (delta.tokens[-1].text, delta.tokens[-1].raw) == (" wo", b" wo")
    assert output.kept_tokens == 2
    (delta, *_), _ = run(smollm, [ids], ["nderf"], include_stop=True)
    assert delta.text == "Hello wonderf"


def test_a_stop_that_only_begins_is_shown_at_the_end(smollm):
    deltas, output = run(smollm, [smollm.encode("abc EN")], ["END"])
    assert "".join(d.text for d in deltas) == "abc EN"
    assert "EN" not in deltas[0].text
    assert output.stopped is None


def test_tokens_after_the_stop_change_nothing(smollm):
    ids = smollm.encode("stop here, then more and more text")
    short, long = OutputText(smollm, ["here"]), OutputText(smollm, ["here"])
    assert short.push(ids[:4]) == long.push(ids)
    assert (short.kept_tokens, long.kept_tokens) == (2, 2)
    assert long.push(ids).tokens == ()
    assert long.finish().tokens == long.finish().tokens == ()


def test_the_token_that_ends_a_sequence_has_no_text(smollm):
    comma = smollm.encode(",")
    for last, options in (([2], {}), ([2], {"skip_special": False}), (comma, {})):
        output = OutputText(smollm, **options)
        first = output.push([*smollm.encode("Hi"), *last], ended_by_token=True)
        rest = output.finish()
        assert (first.text + rest.text, first.token_ids + rest.token_ids) == ("Hi", (*smollm.encode("Hi"), *last))
        assert rest.tokens[-1].raw == b""
        assert output.kept_tokens == 2


def test_a_character_over_tokens_is_one_delta(smollm):
    ids = smollm.encode("😀")
    assert len(ids) > 1
    deltas, _ = run(smollm, [[id_] for id_ in ids])
    shown = [d for d in deltas if d.tokens]
    assert [(d.text, len(d.tokens)) for d in shown] == [("😀", len(ids))]
    assert b"".join(t.raw for t in shown[0].tokens) == "😀".encode()


def test_an_unfinished_character_belongs_to_its_own_token(smollm):
    partial = smollm.encode("😀")[0]
    output = OutputText(smollm)
    assert output.push([*smollm.encode("a"), partial, 2], ended_by_token=True).text == "a"
    rest = output.finish()
    assert [(t.token_id, t.text, t.offset) for t in rest.tokens] == [(partial, "�", 1), (2, "", 2)]


def test_prompt_text_for_echo(tokenizer):
    @settings(max_examples=100, deadline=None)
    @given(TEXTS)
    def check(text):
        ids = tokenizer.encode(text)
        echo = prompt_text(tokenizer, ids, list(range(1, len(ids))))
        assert echo.text == tokenizer.decode(ids)
        assert echo.token_ids == tuple(ids)
        assert echo.text == "".join(t.text for t in echo.tokens)
        assert [t.logprob for t in echo.tokens] == [None, *range(1, len(ids))][: len(ids)]
        assert [t.offset for t in echo.tokens] == [
            len("".join(t.text for t in echo.tokens[:i])) for i in range(len(ids))
        ]

    check()
