"""Sums amounts by time, in buckets of equal length. Pure.

A `Tally` is a flat table of amounts by key. `BucketRing` keeps one tally for each bucket of the
last while, and one of everything. Whole numbers stay whole when they are spread over buckets, so
sums are exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.ids import Seconds

__all__ = ["BucketRing", "Key", "Tally", "add_all"]

Key = tuple[str, ...]
"""What is counted: a counter's name, then its labels."""
Tally = dict[Key, float]
"""Amounts by key."""


def add_all(tally: Tally, others: Iterable[tuple[Key, float]], factor: float = 1) -> None:
    """Adds amounts, each times `factor`."""
    for key, amount in others:
        tally[key] = tally.get(key, 0) + amount * factor


class BucketRing:
    """The tallies of the last `buckets` buckets of `width` seconds, on one clock. Bucket number n
    begins at n * width."""

    def __init__(self, width: Seconds, buckets: int) -> None:
        self.width = width
        self.total: Tally = {}
        """Everything that was ever added."""
        self._most = buckets
        self._tallies: dict[int, Tally] = {}

    def number(self, at: Seconds) -> int:
        """The bucket that contains a time."""
        return int(at // self.width)

    def tally(self, number: int) -> Mapping[Key, float]:
        """The amounts of one bucket; empty if nothing was added, or it is too old."""
        return self._tallies.get(number, {})

    def add(self, at: Seconds, amounts: Mapping[Key, float]) -> None:
        """Adds amounts at one time."""
        add_all(self.total, amounts.items())
        add_all(self._bucket(self.number(at)), amounts.items())

    def spread(self, start: Seconds, end: Seconds, amounts: Mapping[Key, float]) -> None:
        """Adds amounts evenly over the seconds from `start` to `end`."""
        first, last = self.number(min(start, end)), self.number(end)
        if first == last:
            self.add(end, amounts)
            return
        add_all(self.total, amounts.items())
        done, span = dict.fromkeys(amounts, 0.0), end - start
        for number in range(max(first, last - self._most), last + 1):
            share = min(1.0, ((number + 1) * self.width - start) / span)
            bucket = self._bucket(number)
            for key, amount in amounts.items():
                until = round(amount * share) if isinstance(amount, int) else amount * share
                part = until - done[key]
                if part:
                    bucket[key] = bucket.get(key, 0) + part
                done[key] = until

    def drop_before(self, at: Seconds) -> None:
        """Forgets buckets that ended more than the ring's length before a time."""
        oldest = self.number(at) - self._most
        for number in [number for number in self._tallies if number < oldest]:
            del self._tallies[number]

    def _bucket(self, number: int) -> Tally:
        return self._tallies.setdefault(number, {})
