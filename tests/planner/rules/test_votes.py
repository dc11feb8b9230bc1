from __future__ import annotations

import pytest

from pdserve.planner.rules.votes import Votes


@pytest.mark.parametrize(
    ("votes", "agreed"),
    [("1", "0"), ("11", "01"), ("101", "001"), ("1001", "0000"), ("0110", "0010"), ("111", "011")],
)
def test_two_of_three(votes, agreed):
    counting = Votes()
    assert [counting.add(vote == "1") for vote in votes] == [one == "1" for one in agreed]


def test_votes_can_be_cleared():
    votes = Votes()
    votes.add(True)
    votes.clear()
    assert not votes.add(True)
