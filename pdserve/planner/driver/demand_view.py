"""Sums the measured demand up to what decisions look at. Pure."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final

from pdserve.planner.outlook import DemandView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Seconds
    from pdserve.planner.demand_series import DemandBucket, DemandHealth, DemandSeries

__all__ = ["demand_view"]

_MEAN: Final[Seconds] = 30.0
"""Length of the means in which peaks are measured."""
_RECENT: Final[Seconds] = 300.0


def demand_view(
    series: DemandSeries, queued_tokens: int = 0, stable: Seconds = _RECENT
) -> DemandView:
    """The demand for a model. Args: `queued_tokens` are prompt tokens that wait at its workers;
    `stable` is the time over which peaks and misses are looked for."""
    buckets = series.buckets
    width = buckets[-1].seconds if buckets else _MEAN
    mean = max(1, round(min(_MEAN, stable) / width))
    recent = buckets[-max(1, ceil(stable / width)) :]
    return DemandView(
        known=bool(buckets) and _complete(series.health),
        faults=series.health.words or ("" if buckets else "no full 5 s have been reported yet"),
        poor=series.prediction_poor or not series.times.fitted,
        seen=sum(one.seconds for one in recent),
        first_tokens=series.first_tokens,
        work=buckets[-1].work_rate if buckets else 0.0,
        work_30=_rate(buckets[-mean:]),
        peak_300=_peak(recent, mean),
        peak_600=_peak(buckets[-max(1, round(2 * stable / width)) :], mean),
        held=series.held,
        held_work=series.held_work,
        held_wait=series.held_oldest,
        queued_work=queued_tokens * series.times.per_token,
        missed=_missed(recent),
        kept=round(sum(one.kept.get("both", 0) for one in recent)),
        traffic=series,
    )


def _complete(health: DemandHealth) -> bool:
    """True if every router's demand is reported or, for silent ones, estimated."""
    return health.age is not None and not health.missing and not health.refused


def _rate(buckets: Sequence[DemandBucket]) -> float:
    """Mean work per second."""
    seconds = sum(one.seconds for one in buckets)
    return sum(one.work for one in buckets) / seconds if seconds else 0.0


def _peak(buckets: Sequence[DemandBucket], mean: int) -> float:
    """The highest mean over `mean` buckets in a row; of all, if there are fewer."""
    last = max(1, len(buckets) - mean + 1)
    return max((_rate(buckets[at : at + mean]) for at in range(last)), default=0.0)


def _missed(buckets: Sequence[DemandBucket]) -> dict[str, int]:
    """Requests that missed the objective, by cause."""
    found: dict[str, float] = {}
    for bucket in buckets:
        for cause, number in bucket.missed.get("both", {}).items():
            found[cause] = found.get(cause, 0) + number
    return {cause: round(number) for cause, number in found.items()}
