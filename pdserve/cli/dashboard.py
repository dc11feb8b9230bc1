"""Draws the dashboard of one server from its `/metrics` page: rates, latencies, load. Pure.

`pdserve top --url` shows it. It knows pdserve's metric names (docs/metrics.md), not how a page is
fetched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.parser import text_string_to_metric_families

from pdserve.cli.outputs import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.ids import Seconds

__all__ = ["MetricsPage", "dashboard", "quantile"]

_BAR: Final = 20


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """One scrape."""

    at: Seconds
    """Time by a monotonic clock, in seconds."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Sums over all labels, by sample name."""
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    """Cumulative counts by upper bound, by histogram name."""

    @classmethod
    def read(cls, text: str, at: Seconds) -> MetricsPage:
        """Errors: `ValueError` for what is no page of metrics."""
        values: dict[str, float] = {}
        buckets: dict[str, dict[float, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                bound = sample.labels.get("le")
                if bound is not None and sample.name.endswith("_bucket"):
                    counts = buckets.setdefault(family.name, {})
                    counts[float(bound)] = counts.get(float(bound), 0.0) + sample.value
                else:
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return cls(at, values, buckets)


def quantile(counts: Mapping[float, float], share: float) -> float:
    """A quantile of a histogram's cumulative counts, linear within a bucket; NaN without
    observations.

    The last bucket has no upper bound, so its lower one is the answer, as in Prometheus'
    `histogram_quantile`."""
    bounds = sorted(counts)
    total = counts[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return math.nan
    wanted, low, before = share * total, 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= wanted:
            if math.isinf(bound):
                return low
            inside = counts[bound] - before
            return low + (bound - low) * ((wanted - before) / inside if inside else 1.0)
        low, before = bound, counts[bound]
    return low


def dashboard(pages: Sequence[MetricsPage], health: Mapping[str, Any], url: str) -> str:
    """The dashboard: rates between the first and the last of `pages`, gauges of the last."""
    first, last = pages[0], pages[-1]
    span = last.at - first.at
    window = f"over the last {span:.0f} s" if span else "since its start"
    lines = [
        f"{url} is {health.get('status', 'silent')}  {_reason(health)}".rstrip(),
        "",
        f"            {window}",
        f"requests    {_rate(first, last, 'pdserve_requests_total')}",
        f"tokens      {_rate(first, last, 'pdserve_generation_tokens_total')} generated, "
        f"{_rate(first, last, 'pdserve_prompt_tokens_total')} of prompts, "
        f"{_share(first, last)} of these cached",
        f"TTFT        {_quantiles(first, last, 'pdserve_time_to_first_token_seconds')}",
        f"ITL         {_quantiles(first, last, 'pdserve_inter_token_latency_seconds')}",
        f"in queue    {_quantiles(first, last, 'pdserve_request_queue_seconds')}",
        "",
        *_levels(last),
        *_degraded(health),
    ]
    return "\n".join(lines)


def _reason(health: Mapping[str, Any]) -> str:
    reason = health.get("reason")
    return f"({printable(str(reason))})" if reason else ""


def _levels(page: MetricsPage) -> list[str]:
    value = page.values
    used = value.get("pdserve_kv_cache_usage_ratio", 0.0)
    filled = round(_BAR * min(1.0, max(0.0, used)))
    return [
        f"running     {value.get('pdserve_num_requests_running', 0):.0f}   "
        f"waiting in engines {value.get('pdserve_num_requests_waiting', 0):.0f}   "
        f"held by routers {value.get('pdserve_router_held', 0):.0f}",
        f"KV cache    [{'#' * filled}{'.' * (_BAR - filled)}] {used:.0%} of "
        f"{value.get('pdserve_kv_blocks', 0):.0f} blocks, "
        f"{value.get('pdserve_kv_blocks_cached', 0):.0f} cached",
        f"clients     {value.get('pdserve_http_connections', 0):.0f} connections",
    ]


def _degraded(health: Mapping[str, Any]) -> list[str]:
    found = health.get("degraded") or {}
    lines = [f"  {printable(str(name))}: {printable(str(why))}" for name, why in found.items()]
    return ["", "DEGRADED", *lines] if lines else []


def _grown(first: MetricsPage, last: MetricsPage, name: str) -> float:
    """Increase of a counter; a counter that fell was restarted from zero."""
    now, then = last.values.get(name, 0.0), first.values.get(name, 0.0)
    return now - then if now >= then and last is not first else now


def _rate(first: MetricsPage, last: MetricsPage, name: str) -> str:
    span = last.at - first.at
    grown = _grown(first, last, name)
    return f"{grown / span:.1f}/s" if span else f"{grown:.0f}"


def _share(first: MetricsPage, last: MetricsPage) -> str:
    prompt = _grown(first, last, "pdserve_prompt_tokens_total")
    cached = _grown(first, last, "pdserve_cached_prompt_tokens_total")
    return f"{cached / prompt:.0%}" if prompt else "-"


def _quantiles(first: MetricsPage, last: MetricsPage, name: str) -> str:
    now, then = last.buckets.get(name, {}), first.buckets.get(name, {})
    counts = {bound: count - then.get(bound, 0.0) for bound, count in now.items()}
    if last is first or min(counts.values(), default=0.0) < 0:
        counts = dict(now)
    values = (quantile(counts, 0.5), quantile(counts, 0.99))
    return "p50 {}, p99 {}".format(*(_milliseconds(value) for value in values))


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.1f} ms"
