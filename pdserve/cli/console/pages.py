"""Reads the `/metrics` pages of one server for its overview. Pure.

It knows pdserve's metric names (docs/metrics.md), not how a page is fetched.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.parser import text_string_to_metric_families

from pdserve.cli.console.overview import Overview, Traffic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from pdserve.ids import Seconds

__all__ = ["MetricsPage", "overview_of_pages"]

Key = tuple[str, str, str]
"""A metric, its model, and the value of the label that matters: `outcome`, `le`, or an objective
with its result."""

_OURS: Final = frozenset({"overloaded", "unavailable", "deadline", "error"})
_TTFT: Final = "pdserve_time_to_first_token_seconds"
_ITL: Final = "pdserve_inter_token_latency_seconds"


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """One scrape."""

    at: Seconds
    """Time by a monotonic clock, in seconds."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Sums over all labels, by sample name."""
    parts: Mapping[Key, float] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str, at: Seconds) -> MetricsPage:
        """Errors: `ValueError` for what is no page of metrics."""
        values: defaultdict[str, float] = defaultdict(float)
        parts: defaultdict[Key, float] = defaultdict(float)
        for family in _families(text):
            for sample in family.samples:
                labels = sample.labels
                if not math.isfinite(sample.value):
                    continue  # an average of nothing
                if "le" in labels:
                    float(labels["le"])
                else:
                    values[sample.name] += sample.value
                parts[sample.name, labels.get("model", ""), _part(labels)] += sample.value
        return cls(at, values, parts)


def _families(text: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(text))
    except IndexError:
        # The parser's answer to some pages that end early.
        raise ValueError("this is no page of metrics") from None


def _part(labels: Mapping[str, str]) -> str:
    if "objective" in labels:
        return f"{labels['objective']} {labels.get('result', '')}"
    return labels.get("le") or labels.get("outcome") or ""


def overview_of_pages(
    pages: Sequence[MetricsPage], health: Mapping[str, Any], url: str
) -> Overview:
    """The overview between the first and the last of `pages`; of one page, since the start, and
    without rates if a server does not say when that was."""
    first, last = pages[0], pages[-1]
    seconds = last.at - first.at if len(pages) > 1 else float(health.get("uptime_seconds") or 0)
    # A counter that fell was restarted from zero.
    grown = {
        key: value - first.parts.get(key, 0.0)
        if len(pages) > 1 and value >= first.parts.get(key, 0.0)
        else value
        for key, value in last.parts.items()
    }
    found = Overview(_title(health, url), seconds=seconds)
    for model in sorted({key[1] for key in grown}):
        traffic = _traffic(grown, model, seconds) if seconds > 0 else Traffic()
        _add(found.all, traffic)
        if model:
            found.models[model] = traffic
    value = last.values
    found.running = int(value.get("pdserve_num_requests_running", 0))
    found.waiting = int(value.get("pdserve_num_requests_waiting", 0))
    found.held = int(value.get("pdserve_router_held", 0))
    found.active = int(health.get("active_requests") or 0)
    found.blocks = int(value.get("pdserve_kv_blocks", 0))
    found.blocks_used = int(value.get("pdserve_kv_blocks_used", 0))
    degraded = health.get("degraded") or {}
    found.degraded = [("degraded", f"{name}: {why}") for name, why in degraded.items()]
    return found


def _title(health: Mapping[str, Any], url: str) -> str:
    reason = health.get("reason")
    return f"{url} is {health.get('status', 'silent')}" + (f" ({reason})" if reason else "")


def _traffic(grown: Mapping[Key, float], model: str, seconds: Seconds) -> Traffic:
    traffic = Traffic()
    for (name, of, part), value in grown.items():
        if of != model:
            continue
        if name == "pdserve_requests_total":
            traffic.requests += value / seconds
            traffic.errors += value / seconds if part in _OURS else 0.0
        elif name == "pdserve_request_prompt_tokens_sum":
            traffic.prompt_tokens = int(value)
            traffic.input = value / seconds
        elif name == "pdserve_request_uncached_tokens_sum":
            traffic.uncached_tokens = int(value)
        elif name in (f"{_TTFT}_count", f"{_ITL}_count"):
            traffic.output += value / seconds
        elif name == "pdserve_slo_total":
            _judged(traffic, part, int(value))
    traffic.ttft = _buckets(grown, f"{_TTFT}_bucket", model)
    traffic.itl = _buckets(grown, f"{_ITL}_bucket", model)
    return traffic


def _judged(traffic: Traffic, part: str, count: int) -> None:
    objective, _, result = part.partition(" ")
    good, bad = traffic.slo.get(objective, (0, 0))
    traffic.slo[objective] = (good + count * (result == "good"), bad + count * (result == "bad"))


def _buckets(grown: Mapping[Key, float], name: str, model: str) -> Counter[float]:
    """Observations by bucket, from cumulative ones."""
    cumulative = sorted(
        (float(part), value)
        for (of, whose, part), value in grown.items()
        if (of, whose) == (name, model) and part
    )
    found: Counter[float] = Counter()
    before = 0.0
    for bound, value in cumulative:
        found[bound] = max(0, round(value - before))
        before = max(before, value)
    return found


def _add(total: Traffic, one: Traffic) -> None:
    total.requests += one.requests
    total.errors += one.errors
    total.input += one.input
    total.output += one.output
    total.prompt_tokens += one.prompt_tokens
    total.uncached_tokens += one.uncached_tokens
    total.ttft.update(one.ttft)
    total.itl.update(one.itl)
    for objective, (good, bad) in one.slo.items():
        before = total.slo.get(objective, (0, 0))
        total.slo[objective] = (before[0] + good, before[1] + bad)
