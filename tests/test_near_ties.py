"""What may count as a near-tie, and what never does."""

import pytest

import near_ties


@pytest.fixture(autouse=True)
def unlisted(monkeypatch):
    monkeypatch.setattr(near_ties, "LISTED", [])


def test_a_near_tie_is_listed_with_both_logits():
    near_ties.assert_tie("here", 3, 5, {3: 7.0005, 5: 7.0, 9: 1.0}, {5: 6.9001, 3: 6.9})
    assert near_ties.LISTED == [{"where": "here", "tokens": [3, 5], "logits": [[7.0005, 7.0], [6.9, 6.9001]]}]
    assert near_ties.summary() == ["here: 3 against 5, 7.000500 and 7.000000; 6.900000 and 6.900100"]


@pytest.mark.parametrize(
    "rows", [[{3: 7.0, 5: 6.998}], [{3: 7.0, 5: 7.0}, {3: 7.0, 5: 6.9}], [{3: 7.0, 9: 6.9999, 5: 6.9998}]]
)
def test_a_clear_winner_and_a_third_token_are_none(rows):
    with pytest.raises(AssertionError, match="here"):
        near_ties.assert_tie("here", 3, 5, *rows)
    assert near_ties.LISTED == []
