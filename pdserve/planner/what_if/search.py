"""Searches candidate pools for the cheapest that keeps the objectives.

It knows no load and no workers: `evaluate` answers for a pool, `make` builds one. Both searches
return every outcome that they looked at, so that a plan can say what it was weighed against.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.planner.what_if.records import MODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pdserve.planner.what_if.records import CandidatePool, Outcome, PoolMode

__all__ = ["Fit", "Mix", "cheapest_mix", "mixes_around", "smallest_fit"]

_REACH: Final = 2
"""How far each count of a mix may be from the present one."""
_MOST: Final = 40
"""Pools that one search evaluates at most."""


class Mix(NamedTuple):
    """Number of workers of each mode."""

    aggregated: int = 0
    prefill: int = 0
    decode: int = 0
    both: int = 0

    @property
    def serves(self) -> bool:
        """True if the mix can answer requests at all. Prefill workers need others that decode."""
        return self.aggregated + self.decode + self.both > 0

    @property
    def wasteful(self) -> bool:
        """True if prefill workers have none to work for."""
        return self.prefill > 0 and self.decode + self.both == 0

    def moves(self, other: Mix) -> int:
        """Workers that change, start or stop from one mix to the other."""
        more = sum(max(0, b - a) for a, b in zip(self, other, strict=True))
        fewer = sum(max(0, a - b) for a, b in zip(self, other, strict=True))
        return max(more, fewer)


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of a search."""

    chosen: Outcome | None
    """The outcome of the cheapest pool that fits; None: none of those that were tried does."""
    tried: tuple[Outcome, ...]
    """All outcomes, in the order of the search."""

    @property
    def best(self) -> Outcome | None:
        """The chosen outcome, or else the one with the fewest misses; None: nothing was tried."""
        return self.chosen or min(self.tried, key=lambda outcome: outcome.miss, default=None)


def smallest_fit(
    evaluate: Callable[[CandidatePool], Outcome],
    make: Callable[[int], CandidatePool],
    most: int,
    miss: float,
) -> Fit:
    """Find the smallest number of 1 to `most` for which the pool `make(number)` misses with at most
    `miss` of the requests. More workers are assumed to help: it doubles, then halves the interval,
    and evaluates about 2 log2(answer) pools."""
    tried: dict[int, Outcome] = {}

    def fits(number: int) -> bool:
        tried[number] = evaluate(make(number))
        return tried[number].miss <= miss

    low, high = 0, 1
    while high < most and not fits(high):
        low, high = high, min(2 * high, most)
    if high not in tried and not fits(high):
        return Fit(None, tuple(tried.values()))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return Fit(tried[high], tuple(tried.values()))


def mixes_around(
    present: Mix,
    modes: Iterable[PoolMode] = MODES,
    least: int = 1,
    most: int = 1 << 30,
    reach: int = _REACH,
) -> Iterator[Mix]:
    """All mixes of `least` to `most` workers whose counts differ from the present ones by at most
    `reach`. Counts of modes that are not allowed stay as they are."""
    allowed = set(modes)
    ranges = [
        range(max(0, count - reach), count + reach + 1) if mode in allowed else (count,)
        for mode, count in zip(MODES, present, strict=True)
    ]
    for counts in product(*ranges):
        mix = Mix(*counts)
        if least <= sum(mix) <= most and mix.serves and not mix.wasteful:
            yield mix


def cheapest_mix(
    evaluate: Callable[[CandidatePool], Outcome],
    pools: Mapping[Mix, CandidatePool],
    present: Mix,
    miss: float,
    hopeless: Callable[[CandidatePool], bool] = lambda pool: False,
    most: int = _MOST,
) -> Fit:
    """Find the cheapest of `pools` that misses with at most `miss` of the requests; of equally
    dear ones the one with the fewest moves from `present`. Pools that are `hopeless` are not
    evaluated. The search ends after `most` outcomes."""
    order = sorted(pools, key=lambda mix: (pools[mix].cost, present.moves(mix), mix))
    tried: list[Outcome] = []
    for mix in order:
        if len(tried) >= most:
            break
        if hopeless(pools[mix]):
            continue
        outcome = evaluate(pools[mix])
        tried.append(outcome)
        if outcome.miss <= miss:
            return Fit(outcome, tuple(tried))
    return Fit(None, tuple(tried))
