"""Counters, gauges and histograms for hot paths: plain numbers, added to in place.

It knows no metric names and no Prometheus; `pdserve.observe.metrics` owns the names and reads the
instruments at scrape time. Instruments belong to one event loop's thread; a scrape runs on that
thread between two additions, so there is no lock.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

OTHER = "other"
"""The label value for all combinations beyond a family's bound."""


class Counter:
    """A number that only grows. Hot paths use `counter.value += n`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Adds `amount` (>= 0)."""
        self.value += amount


class Gauge:
    """A number that goes up and down; set in place, or read from its owner at scrape time."""

    __slots__ = ("_read", "_value")

    def __init__(self) -> None:
        self._value: float = 0
        self._read: Callable[[], float] | None = None

    @property
    def value(self) -> float:
        return self._value if self._read is None else self._read()

    @value.setter
    def value(self, value: float) -> None:
        self._value = value

    def read_from(self, read: Callable[[], float]) -> None:
        """Reads every scrape's value from `read`, which must be quick and must not raise."""
        self._read = read


class Histogram:
    """Counts per bucket, upper bounds inclusive, with the sum of the observations."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        if list(bounds) != sorted(set(bounds)):
            raise ValueError("bucket bounds must ascend")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum: float = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Records `value`, `times` over: one call for the tokens of one delta."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


T = TypeVar("T", Counter, Gauge, Histogram)


class Family(Generic[T]):
    """Instruments by label values, at most `bound` of them. Beyond the bound all new combinations
    share one instrument whose labels are `other`, so a client that invents label values cannot
    grow the process.
    """

    __slots__ = ("_bound", "_make", "_members", "_width")

    def __init__(self, make: Callable[[], T], width: int, bound: int) -> None:
        self._make: Callable[[], T] = make
        self._width = width
        self._bound = bound
        self._members: dict[tuple[str, ...], T] = {}

    def make_by(self, make: Callable[[], T]) -> None:
        """Makes all instruments anew by `make`, also those that exist."""
        self._make = make
        self._members.clear()

    def labels(self, *values: str) -> T:
        """The instrument of these label values; made at first use."""
        member = self._members.get(values)
        return member if member is not None else self._add(values)

    def _add(self, values: tuple[str, ...]) -> T:
        if len(values) != self._width:
            raise ValueError(f"expected {self._width} label values, got {len(values)}")
        if len(self._members) >= self._bound:
            values = (OTHER,) * self._width
        if values not in self._members:
            self._members[values] = self._make()
        return self._members[values]

    def remove(self, *values: str) -> None:
        """Removes a combination; unknown ones are ignored."""
        self._members.pop(values, None)

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], T]]:
        return iter(tuple(self._members.items()))

    def __len__(self) -> int:
        return len(self._members)
