from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import InvalidInput
from headrace.text.stop import StopMatcher


def first_stop(text, stops):
    """Slow reference: (end, stop) of the match complete first, the longest of those complete together."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="abcx", max_size=30), STOPS, st.lists(st.integers(0, 30), max_size=5), st.booleans())
def test_equals_the_slow_search_however_the_text_is_cut(text, stops, cuts, include):
    matcher = StopMatcher(stops, include_stop=include)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    expected = first_stop(text, stops)
    for a, b in pairwise(edges):
        before = matcher.safe
        matcher.read(text[a:b])
        assert matcher.safe >= before
        if expected is not None:
            end, stop = expected
            assert matcher.safe <= (end if include else end - len(stop))
    if expected is None:
        assert matcher.matched is None
        matcher.finish()
        assert matcher.safe == len(text)
    else:
        end, stop = expected
        assert matcher.matched == stop
        assert matcher.safe == (end if include else end - len(stop))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abx", max_size=20), STOPS)
def test_holds_back_exactly_what_could_begin_a_stop(text, stops):
    matcher = StopMatcher(stops)
    matcher.read(text)
    if matcher.matched is None:
        held = max(
            (n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) for s in stops)), default=0
        )
        assert matcher.safe == len(text) - held


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abx", max_size=16), STOPS, st.integers(0, 16))
def test_stops_complete_too_early_are_passed_over(text, stops, start):
    matcher = StopMatcher(stops)
    matcher.read(text[:start], may_stop=False)
    assert matcher.matched is None
    matcher.read(text[start:])
    ends = [end for end in range(start + 1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert (matcher.matched is not None) == bool(ends)
    if ends:
        assert text[: ends[0]].endswith(matcher.matched)
        assert matcher.safe == ends[0] - len(matcher.matched)


def test_overlapping_stops_show_nothing_of_the_match():
    matcher = StopMatcher(["aab", "ab"])
    matcher.read("xaab and more")
    assert (matcher.matched, matcher.safe) == ("aab", 1)
    matcher.read("ab")
    assert matcher.safe == 1


def test_a_stop_passed_over_holds_nothing_back():
    matcher = StopMatcher(["ab"])
    matcher.read("xab", may_stop=False)
    assert (matcher.safe, matcher.matched) == (3, None)


def test_no_stops_hold_nothing():
    matcher = StopMatcher([])
    matcher.read("anything")
    assert (matcher.safe, matcher.matched) == (8, None)


@pytest.mark.parametrize("stops", [[""], ["a", ""]])
def test_empty_stop_strings_are_refused(stops):
    with pytest.raises(InvalidInput) as error:
        StopMatcher(stops)
    assert error.value.field == "stop"
