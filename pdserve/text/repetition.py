"""Detects an output that repeats the same token pattern over and over.

Works on token ids: a pattern of `p` tokens has come `c` times in a row when each of the last
`p * (c - 1)` tokens equals the one `p` before it. A run cannot be complete earlier than that many
tokens after the last mismatch, so each pattern length is checked only when it may be complete, and
every token is compared once per length. Creating a detector is cheap, since a request may have many
choices. One choice owns one detector.
"""

from __future__ import annotations

from typing import Final

__all__ = ["RepetitionDetector"]

_BYTES: Final = 4
"""Bytes per token id."""


class RepetitionDetector:
    """Detects repetition in one output; gets every token in order."""

    __slots__ = (
        "_after",
        "_begin",
        "_broken",
        "_due",
        "_history",
        "_least",
        "_looked",
        "_most",
        "_seen",
        "_times",
    )

    def __init__(
        self, max_pattern_size: int, min_count: int, min_pattern_size: int = 1, after: int = 0
    ) -> None:
        """`after`: number of first tokens in which no repetition is reported."""
        self._after = after
        self._least = min_pattern_size
        self._most = max_pattern_size
        self._times = min_count - 1
        self._seen = 0
        self._history = bytearray()
        self._begin = 0
        """Position of the first token in the history."""
        self._broken = list(range(-1, max_pattern_size))
        """Pattern size -> position of the last token that differs from the one `size` before it."""
        self._looked = self._broken.copy()
        """Pattern size -> position up to which tokens were compared."""
        self._due: dict[int, list[int]] = {}
        """Position -> sizes to be checked there again."""

    def feed(self, token: int) -> bool:
        """Add a token; return True if the output ends in `min_count` repeats of a pattern."""
        place = self._seen
        self._seen += 1
        self._history += token.to_bytes(_BYTES, "little")
        found = False
        for size in (*self._first_due(place), *self._due.pop(place, ())):
            found = self._look(size, place) or found
        if place - self._begin > 4 * self._most:
            self._forget(place - 2 * self._most)
        return found

    def _first_due(self, place: int) -> list[int]:
        """Sizes to be checked at `place` for the first time, as `_plan` would set it."""
        whole, rest = divmod(place + 1, self._times + 1)
        forgotten = place + 1 - self._most
        first = []
        if not rest and whole * self._times <= self._most and self._may_be(whole):
            first.append(whole)
        if forgotten * self._times > self._most and self._may_be(forgotten):
            first.append(forgotten)
        return first

    def _may_be(self, size: int) -> bool:
        return self._least <= size <= self._most

    def _look(self, size: int, place: int) -> bool:
        """Return whether a pattern of this size is complete at `place`; plans the next check."""
        begin = self._looked[size] + 1
        difference = self._number(begin, place) ^ self._number(begin - size, place - size)
        if difference:
            self._broken[size] = begin + (difference.bit_length() - 1) // (8 * _BYTES)
        self._looked[size] = place
        found = place - self._broken[size] >= size * self._times and self._seen >= self._after
        self._plan(size)
        return found

    def _plan(self, size: int) -> None:
        """Plan the next check of a size: when its run may be complete, or earlier if its tokens
        would be dropped before."""
        looked = self._looked[size]
        whole = self._broken[size] + size * self._times
        if whole <= looked:
            whole = max(looked + 1, self._after - 1)
        self._due.setdefault(min(whole, looked + self._most), []).append(size)

    def _number(self, begin: int, end: int) -> int:
        """The tokens from `begin` to `end` as one number, the last one in the highest bits."""
        first = (begin - self._begin) * _BYTES
        last = (end + 1 - self._begin) * _BYTES
        return int.from_bytes(self._history[first:last], "little")

    def _forget(self, begin: int) -> None:
        """Drop the tokens before `begin`, which no size needs any more."""
        del self._history[: (begin - self._begin) * _BYTES]
        self._begin = begin
