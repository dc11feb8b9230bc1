"""Merges the metrics of several processes that share a port into one page.

Pure. Counters and histograms add up; gauges too, except those where the larger value counts. It
works on Prometheus metric families of any origin.
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
"""Prometheus' own metric that cannot be added: the start time of the oldest process counts."""


def merge(pages: Iterable[Iterable[Metric]]) -> list[Metric]:
    """One family for each name, in the order of first appearance."""
    # Prometheus names families of counters without `_total`.
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
