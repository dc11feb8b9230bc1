"""Merges the metrics of several processes that share a port into one page.

Pure. Counters and histograms add up; gauges too, except those where the larger value counts.
"""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, Final

from pdserve.observe.exposition import ScrapedFamily, ScrapedSeries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["merge", "sum_series"]

_COMBINE: Final[dict[str, Callable[[float, float], float]]] = {"sum": add, "max": max, "min": min}


def merge(pages: Iterable[Iterable[ScrapedFamily]]) -> list[ScrapedFamily]:
    """One family for each name, in the order of first appearance."""
    found: dict[str, list[ScrapedFamily]] = {}
    for page in pages:
        for family in page:
            found.setdefault(family.name, []).append(family)
    return [_merge(families) for families in found.values()]


def _merge(families: list[ScrapedFamily]) -> ScrapedFamily:
    first = families[0]
    if len(families) == 1:
        return first
    bounds = first.bounds
    if any(other.bounds != bounds for other in families):
        bounds, families = _common_bounds(families)
    combine = _COMBINE[first.combine]
    series = sum_series((one for family in families for one in family.series), combine)
    return ScrapedFamily(
        *(first.name, first.kind, first.help, first.labels, series, bounds, first.combine)
    )


def sum_series(
    series: Iterable[ScrapedSeries], combine: Callable[[float, float], float] = add
) -> list[ScrapedSeries]:
    """One series for each combination of label values."""
    found: dict[tuple[str, ...], ScrapedSeries] = {}
    for one in series:
        known = found.get(one.values)
        if known is None:
            # A copy: the argument's records stay as they are.
            found[one.values] = ScrapedSeries(one.values, one.value, one.counts)
            continue
        known.value = combine(known.value, one.value)
        if one.counts:
            known.counts = list(map(add, known.counts, one.counts))
    return list(found.values())


def _common_bounds(families: list[ScrapedFamily]) -> tuple[list[float], list[ScrapedFamily]]:
    """The bounds that all histograms have, and the histograms with these."""
    shared = sorted(set.intersection(*(set(family.bounds) for family in families)))
    made = []
    for family in families:
        series = [
            ScrapedSeries(one.values, one.value, _coarser(family.bounds, one.counts, shared))
            for one in family.series
        ]
        made.append(ScrapedFamily(family.name, family.kind, family.help, family.labels, series))
    return shared, made


def _coarser(
    bounds: Sequence[float], counts: Sequence[float], shared: Sequence[float]
) -> list[float]:
    """Counts of fewer buckets: those that lose their bound go to the next one."""
    kept = set(shared)
    made, open_ = [], 0.0
    for bound, count in zip(bounds, counts, strict=False):
        open_ += count
        if bound in kept:
            made.append(open_)
            open_ = 0.0
    return [*made, open_ + counts[-1]]
