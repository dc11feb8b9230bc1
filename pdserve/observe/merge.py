"""Sums the numbers of several processes that are one server to whoever watches. Pure.

Counters and histograms add up. Gauges do too, but for those where the larger says it all. It works
on Prometheus' own families, whoever made them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.observe.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import Metric

__all__ = ["merge"]

_Key = tuple[str, tuple[tuple[str, str], ...]]

_OLDEST: Final = "process_start_time_seconds"
"""The one number of Prometheus' own that cannot be added: the server is as old as its oldest."""


def merge(pages: Iterable[Iterable[Metric]]) -> list[Metric]:
    """One family for each name, in the order in which they first appear."""
    # Prometheus' families of counters are named without their ending.
    largest = {
        one.name.removesuffix("_total") for one in Metrics.definitions() if one.combine == "max"
    }
    families: dict[str, Metric] = {}
    values: dict[str, dict[_Key, float]] = {}
    for page in pages:
        for family in page:
            families.setdefault(family.name, family)
            combine: Callable[[float, float], float] = float.__add__
            if family.name in largest:
                combine = max
            elif family.name == _OLDEST:
                combine = min
            known = values.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                value = float(sample.value)
                known[key] = combine(known[key], value) if key in known else value
    return [_family(one, values[name]) for name, one in families.items()]


def _family(like: Metric, values: dict[_Key, float]) -> Metric:
    from prometheus_client import Metric

    family = Metric(like.name, like.documentation, like.type)
    for (name, labels), value in values.items():
        family.add_sample(name, dict(labels), value)
    return family
