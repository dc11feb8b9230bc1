"""Finds the moment at which an output begins to say the same thing over and over.

Plain state over token ids: a pattern of `p` tokens has come `c` times in a row as soon as each of
the last `p * (c - 1)` tokens equals the one `p` before it. So per pattern length one number is
kept, and only for lengths at which the newest token does repeat one; a token costs as many steps as
it has occurred among the last `max_pattern_size` ones. Owned by one choice.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Repetition"]


class Repetition:
    """Told every token of one output, in order."""

    __slots__ = ("_after", "_least", "_most", "_places", "_runs", "_seen", "_times")

    def __init__(
        self, max_pattern_size: int, min_count: int, min_pattern_size: int = 1, after: int = 0
    ) -> None:
        """Args: before `after` tokens nothing is found."""
        self._after = after
        self._most = max_pattern_size
        self._least = min_pattern_size
        self._times = min_count - 1
        self._seen = 0
        self._places: dict[int, deque[int]] = {}
        """Where each token has occurred, as far back as a pattern may reach."""
        self._runs: dict[int, int] = {}
        """By distance, how many tokens in a row equal the one so far before them."""

    def feed(self, token: int) -> bool:
        """Whether the output now ends in a pattern that has come often enough."""
        place, runs = self._seen, self._runs
        self._seen += 1
        places = self._places.setdefault(token, deque())
        while places and place - places[0] > self._most:
            places.popleft()
        self._runs = now = {
            distance: runs.get(distance, 0) + 1
            for distance in (place - earlier for earlier in places)
            if distance >= self._least
        }
        places.append(place)
        if self._seen < self._after:
            return False
        return any(run >= distance * self._times for distance, run in now.items())
