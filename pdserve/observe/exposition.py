"""Writes scraped metrics in Prometheus's text format or in OpenMetrics. Pure.

Records of whole series rather than of lines: a histogram of twenty buckets is one series, so that
pages of several processes can travel and be summed cheaply. Rendering uses no Prometheus client: a
page of 64 models has ten thousand lines.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["OPENMETRICS", "ScrapedFamily", "ScrapedSeries", "content_type", "render"]

OPENMETRICS: Final = "application/openmetrics-text"
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"

_LABEL_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})
_OPEN_HELP_ESCAPES: Final = _LABEL_ESCAPES


class ScrapedSeries(msgspec.Struct, array_like=True, gc=False):
    """One combination of label values."""

    values: tuple[str, ...]
    value: float = 0.0
    """Of a histogram: the sum of its observations."""
    counts: list[float] = []
    """Of a histogram: observations per bucket; one more than bounds."""


class ScrapedFamily(msgspec.Struct, array_like=True):
    """One metric with all its series."""

    name: str
    """As in `docs/metrics.md`; that of a counter ends with `_total`."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    series: list[ScrapedSeries] = []
    bounds: list[float] = []
    """Of a histogram: upper bounds of its buckets, the last one without a bound left out."""
    combine: Literal["sum", "max", "min"] = "sum"
    """How values of processes that share a port become one."""


def content_type(*, openmetrics: bool) -> str:
    """The content type of a page that `render` writes."""
    return f"{OPENMETRICS}; version=1.0.0; charset=utf-8" if openmetrics else _TEXT


def render(families: Iterable[ScrapedFamily], *, openmetrics: bool = False) -> bytes:
    """The page; families without series have their head only."""
    lines: list[str] = []
    for family in families:
        _write_head(lines, family, openmetrics)
        if family.kind == "histogram":
            _write_histograms(lines, family)
            continue
        for one in family.series:
            pairs = _pairs(family.labels, one.values)
            labels = f"{{{pairs}}}" if pairs else ""
            lines.append(f"{family.name}{labels} {_number(one.value)}\n")
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode()


def _write_head(lines: list[str], family: ScrapedFamily, openmetrics: bool) -> None:
    name = family.name
    if openmetrics:
        # OpenMetrics names the family of a counter without its suffix.
        name = name.removesuffix("_total") if family.kind == "counter" else name
        text = family.help.translate(_OPEN_HELP_ESCAPES)
    else:
        text = family.help.translate(_HELP_ESCAPES)
    lines.append(f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n")


def _write_histograms(lines: list[str], family: ScrapedFamily) -> None:
    name = family.name
    ends = [f'le="{_number(bound)}"}} ' for bound in (*family.bounds, math.inf)]
    for one in family.series:
        pairs = _pairs(family.labels, one.values)
        begin = f"{name}_bucket{{{pairs}," if pairs else f"{name}_bucket{{"
        totals = list(accumulate(map(float, one.counts)))
        lines += [f"{begin}{end}{total}\n" for end, total in zip(ends, totals, strict=True)]
        labels = f"{{{pairs}}}" if pairs else ""
        lines.append(
            f"{name}_count{labels} {totals[-1]}\n{name}_sum{labels} {_number(one.value)}\n"
        )


def _pairs(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Labels in the order of their names, as Prometheus' own clients write them."""
    pairs = sorted(zip(names, values, strict=True))
    return ",".join([f'{name}="{value.translate(_LABEL_ESCAPES)}"' for name, value in pairs])


def _number(value: float) -> str:
    """As Go and Prometheus write it."""
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
