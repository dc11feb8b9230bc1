"""Makes the load of a what-if: recent arrivals, with output lengths, scaled to a forecast.

Arrivals are replayed as often as their weights say, until there are enough of them; the newest
count. Scaling moves them closer together or further apart, so bursts stay bursts. Output lengths
are drawn from finished requests with prompts of about the same length.

What is drawn depends on the seed and the number of the request alone: all candidates of one
question get the same requests (common random numbers), so they differ by their workers only.
"""

from __future__ import annotations

from bisect import bisect_left
from random import Random
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.planner.what_if.records import ReplayedRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.ids import Seconds

__all__ = ["MOST_REQUESTS", "OutputLengths", "RecentRequest", "make_load"]

MOST_REQUESTS: Final = 2000
"""Requests of one load: beyond, a replay takes longer than a tick may."""
_NEIGHBOURS: Final = 40
"""Finished requests of the nearest prompt lengths from which one is drawn."""
_FEWEST: Final = 5
"""Finished requests of a prompt's own length that are enough to draw from."""
_UNKNOWN: Final = 256
"""Output tokens while no request has finished: `router.policies.ttft.Ttft.output_tokens`."""


class RecentRequest(Protocol):
    """One arrival, or one that stands for several; see `recent_arrivals.RecentArrival`."""

    @property
    def at(self) -> Seconds:
        """When it came."""
        ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def choices(self) -> int: ...

    @property
    def weight(self) -> float:
        """Number of arrivals that it stands for."""
        ...


class OutputLengths:
    """Output lengths by prompt length, as finished requests had them."""

    def __init__(
        self, finished: Iterable[tuple[int, int]], older: Iterable[tuple[int, int]] = ()
    ) -> None:
        """Prompt tokens and output tokens of requests. `finished`: the newest ones, which are as
        frequent as they are now; `older`: others, of prompts that are rare now."""
        self._finished = [(prompt, output) for prompt, output in finished if output > 0]
        more = [(prompt, output) for prompt, output in older if output > 0]
        self._known = sorted(self._finished + more)

    def draw(self, prompt_tokens: int, random: Random) -> int:
        """The output length of one of the finished requests whose prompts are nearest in rank; of
        those that are half as long to twice as long, if there are any."""
        known = self._known
        if not known:
            return _UNKNOWN
        first = bisect_left(known, (prompt_tokens, 0))
        last = bisect_left(known, (prompt_tokens + 1, 0))
        if last - first >= _NEIGHBOURS:  # as many are as long: any of them
            return known[first + int(random.random() * (last - first))][1]
        middle = (first + last) // 2
        begin = max(0, min(middle - _NEIGHBOURS // 2, len(known) - _NEIGHBOURS))
        end = min(len(known), begin + _NEIGHBOURS)
        low = max(begin, bisect_left(known, (prompt_tokens // 2, 0)))
        high = min(end, bisect_left(known, (2 * prompt_tokens + 1, 0)))
        if high - low >= _FEWEST:
            begin, end = low, high
        return known[begin + int(random.random() * (end - begin))][1]

    def rest(self, random: Random) -> int:
        """What a stream that is under way still brings: long ones are met more often."""
        known = self._finished
        if not known:
            return max(1, int(random.random() * _UNKNOWN))
        output = max(random.choice(known)[1], random.choice(known)[1])
        return max(1, int(random.random() * output))


def make_load(
    recent: Sequence[RecentRequest],
    lengths: OutputLengths,
    factor: float,
    seed: int,
    most: int = MOST_REQUESTS,
) -> tuple[ReplayedRequest, ...]:
    """The newest of `recent`, at most `most`, at `factor` times their rate; the first one comes
    at 0. `recent` is in order of time.

    Errors: `ValueError` for a factor that is not more than 0.
    """
    if not 0 < factor < float("inf"):
        raise ValueError(f"a load cannot be scaled by {factor}: it must be more than 0")
    random = Random(f"what-if {seed}")
    times = _repeated(recent, random, most)
    if not times:
        return ()
    first = times[0][0]
    return tuple(
        ReplayedRequest(
            (at - first) / factor,
            one.prompt_tokens,
            min(one.cached_tokens, max(0, one.prompt_tokens - 1)),
            lengths.draw(one.prompt_tokens, random),
        )
        for at, one in times
    )


def _repeated(
    recent: Sequence[RecentRequest], random: Random, most: int
) -> list[tuple[Seconds, RecentRequest]]:
    """The newest arrivals in order, each as often as its weight says. What one stands for came
    between the one before and itself."""
    found: list[tuple[Seconds, RecentRequest]] = []
    owed = random.random()
    for index in range(len(recent) - 1, -1, -1):
        one = recent[index]
        before = recent[index - 1].at if index else one.at
        owed += one.weight
        while owed >= 1 and len(found) < most:
            owed -= 1
            back = 0.0 if one.weight <= 1 else random.random() * (one.at - before)
            found.append((one.at - back, one))
        if len(found) >= most:
            break
    found.sort(key=_time)
    return found[-most:]


def _time(item: tuple[Seconds, RecentRequest]) -> Seconds:
    return item[0]
