"""Lets a decision wait until several ticks agree, so that one odd measurement changes nothing."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["Votes"]

_OF: Final = 3
_NEEDED: Final = 2


class Votes:
    """Two of the last three ticks."""

    def __init__(self) -> None:
        self._votes: deque[bool] = deque(maxlen=_OF)

    def add(self, vote: bool) -> bool:
        """One more tick; True if enough of the last ones agree, this one included."""
        self._votes.append(vote)
        return vote and sum(self._votes) >= _NEEDED

    def clear(self) -> None:
        """A decision has been made: the next one needs new votes."""
        self._votes.clear()
