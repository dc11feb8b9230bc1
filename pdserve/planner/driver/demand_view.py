"""Sums the measured demand up to what decisions look at. Pure."""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.planner.demand_series import believed_speed
from pdserve.planner.outlook import DemandView
from pdserve.planner.steady_load import Stretch, mean_work, running, steady
from pdserve.planner.what_if.newest_mix import newest_arrivals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.ids import Seconds
    from pdserve.planner.demand_series import DemandBucket, DemandHealth, DemandSeries

__all__ = ["demand_view"]

_RECENT: Final[Seconds] = 300.0
_RANGE: Final = 60
"""Buckets of a level at most."""
_EVERY: Final = 3
"""Buckets from one level to the next."""
_FEW: Final = 6
"""Buckets that tell a level of the past."""
_NEWEST: Final[Seconds] = 60.0
"""Time whose buckets decisions see one by one."""
_JUDGED: Final = 50
"""Requests that must be judged before the share of those that missed says anything."""
_DOUBT: Final = 20.0
"""Requests of a new mix after which their own mean work counts as much as the usual one: until then
they may be a burst of one client."""


class _Mix(NamedTuple):
    """What requests are like."""

    work: Seconds
    """Mean work of one; 0: unknown."""
    spread: Seconds
    """`DemandView.request_spread`."""
    since: Seconds = -inf
    """Since when; -inf: as long as was looked."""


def demand_view(
    series: DemandSeries, queued_tokens: int = 0, stable: Seconds = _RECENT
) -> DemandView:
    """The demand for a model. Args: `queued_tokens` are prompt tokens that wait at its workers;
    `stable` is the time over which peaks and misses are looked for."""
    buckets = series.buckets
    width = buckets[-1].seconds if buckets else _RECENT
    recent = buckets[-max(1, ceil(stable / width)) :]
    looked = buckets[-(len(recent) + _RANGE) :]
    stretches = [Stretch(one.seconds, one.arrivals, one.work) for one in looked]
    usual = _usual(buckets[-_RANGE:])
    mix = _newest(series, usual)
    levels = _levels(stretches, len(recent), usual)
    present = _present(stretches, len(_since(buckets, mix)), mix)
    levels[0] = (0.0, mean_work(present, mix.work))
    return DemandView(
        known=bool(buckets) and _complete(series.health),
        faults="; ".join(_faults(series)),
        poor=series.prediction_poor or not series.times.fitted,
        seen=sum(one.seconds for one in recent),
        first_tokens=series.first_tokens,
        work=buckets[-1].work_rate if buckets else 0.0,
        level=levels[0][1],
        rate=_over(present.arrivals, present.seconds),
        recent=_recent(stretches[-max(1, round(_NEWEST / width)) :], series.rest),
        request_work=mix.work,
        request_spread=mix.spread,
        work_300=_rate(recent),
        peak_300=max(level for _, level in levels),
        levels=tuple(levels),
        held=series.held,
        held_work=series.held_work,
        held_wait=series.held_oldest,
        queued_work=queued_tokens * series.times.per_token,
        missed=_missed(recent),
        kept=round(sum(one.kept.get("both", 0) for one in recent)),
        miss_share=_miss_share(buckets[-max(1, round(_NEWEST / width)) :]),
        traffic=series,
    )


def _recent(complete: Sequence[Stretch], rest: DemandBucket | None) -> tuple[Stretch, ...]:
    """The newest complete buckets. What was reported since belongs to the last one: alone it would
    be too short to tell a surge from chance."""
    if rest is None or not complete:
        return tuple(complete)
    since = Stretch(rest.seconds, rest.arrivals, rest.work)
    return (*complete[:-1], complete[-1] + since)


def _complete(health: DemandHealth) -> bool:
    """True if every router's demand is reported or, for silent ones, estimated."""
    return health.age is not None and not health.missing and not health.refused


def _rate(buckets: Sequence[DemandBucket]) -> float:
    """Mean work per second."""
    seconds = sum(one.seconds for one in buckets)
    return sum(one.work for one in buckets) / seconds if seconds else 0.0


def _faults(series: DemandSeries) -> Iterator[str]:
    """What is not known, or not believed."""
    if series.health.words:
        yield series.health.words
    elif not series.buckets:
        yield "no full 5 s have been reported yet"
    for node, told in series.speeds.items():
        if (counts := believed_speed(told)) != told:
            yield f"routers take {node} for {told:g} times as slow as usual, and {counts:g} counts"


def _usual(buckets: Sequence[DemandBucket]) -> _Mix:
    """The requests of these buckets."""
    work = sum(one.work for one in buckets)
    squared = sum(one.work_squared for one in buckets)
    return _Mix(_over(work, sum(one.arrivals for one in buckets)), _over(squared, work))


def _newest(series: DemandSeries, usual: _Mix) -> _Mix:
    """The requests since lengths last shifted; else the usual ones. What requests were like before
    would hide for minutes how much work they are now."""
    newest = newest_arrivals(series)
    if len(newest) == len(series.arrivals):
        return usual
    number = sum(one.weight for one in newest) + _DOUBT
    work = sum(one.weight * one.work for one in newest) + _DOUBT * usual.work
    squared = sum(one.weight * one.work**2 for one in newest)
    squared += _DOUBT * usual.work * usual.spread
    mix = _Mix(_over(work, number), _over(squared, work), newest[0].at)
    return mix if _since(series.buckets, mix) else usual


def _since(buckets: Sequence[DemandBucket], mix: _Mix) -> Sequence[DemandBucket]:
    """The buckets of a level that begin with the mix or later."""
    return [one for one in buckets[-_RANGE:] if one.at >= mix.since]


def _over(sum_: float, number: float) -> float:
    return sum_ / number if number > 0 else 0.0


def _present(stretches: Sequence[Stretch], most: int, mix: _Mix) -> Stretch:
    """The newest stretches in which the load has not changed, at most so many, as one."""
    last = len(stretches)
    return steady(running(stretches), last - most, last, mix.spread)


def _levels(stretches: Sequence[Stretch], recent: int, mix: _Mix) -> list[tuple[Seconds, float]]:
    """The level of the load now, and every 15 s before as far as peaks are looked for, while there
    is enough of the load to tell; each with its age."""
    sums, last = running(stretches), len(stretches)
    past = range(last - _EVERY, max(last - recent, _FEW) - 1, -_EVERY)
    found = []
    for end in (last, *past):
        level = mean_work(steady(sums, max(0, end - _RANGE), end, mix.spread), mix.work)
        found.append(((sums[last] - sums[end]).seconds, level))
    return found


def _miss_share(buckets: Sequence[DemandBucket]) -> float | None:
    """Share of the requests that missed the objective; None: too few were judged to tell."""
    missed = sum(one.missed_for("both") for one in buckets)
    judged = missed + sum(one.kept.get("both", 0) for one in buckets)
    return missed / judged if judged >= _JUDGED else None


def _missed(buckets: Sequence[DemandBucket]) -> dict[str, int]:
    """Requests that missed the objective, by cause."""
    found: dict[str, float] = {}
    for bucket in buckets:
        for cause, number in bucket.missed.get("both", {}).items():
            found[cause] = found.get(cause, 0) + number
    return {cause: round(number) for cause, number in found.items()}
