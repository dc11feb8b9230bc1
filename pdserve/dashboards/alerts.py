"""Recorded expressions and alerts. Each alert's runbook is its section of `docs/observability.md`.

An error budget is the share of judged requests that may miss an objective. Its *burn rate* is how
many times faster than allowed it is used. The alerts on it look at two windows: the long one says
that much was lost, the short one that it still goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.dashboards.planner_alerts import planner_alerts
from pdserve.dashboards.table import Alert, Recording

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["OWN_ALERTS", "Promise", "alerts", "recordings"]

BURN_WINDOWS: Final = ("5m", "30m", "1h", "2h", "6h", "1d")
_SHORT_WINDOWS: Final = ("5m", "30m", "2h")
_MOST_BAD: Final = 0.9
"""A burn alert fires from this share of bad requests on, however large the budget is."""
_ENOUGH: Final = 20
"""Judged requests in the short window, below which a burn alert is silent: of three requests at
night two may be bad."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a deployment promises."""

    objective: float = 0.99
    """Share of judged requests that keep their objectives."""
    first_token: Seconds = 2.0
    """Seconds; from this much work in the prefill queue on, `PdservePrefillBacklog` fires."""

    @property
    def budget(self) -> float:
        """Share of requests that may be bad."""
        return round(1 - self.objective, 9)


def recordings(promise: Promise) -> tuple[Recording, ...]:
    """What alerts and boards read, so that long windows are computed once."""
    return (
        Recording("pdserve:error_budget", f"vector({promise.budget:g})"),
        *(
            Recording(
                f"pdserve:judged_requests:{window}",
                f"sum by (cluster, model) {_judged('increase', window)}",
            )
            for window in _SHORT_WINDOWS
        ),
        *(Recording(f"pdserve:bad_ratio:{window}", _bad_ratio(window)) for window in BURN_WINDOWS),
        Recording(
            "pdserve:prefix_hit_ratio:1h",
            "sum by (cluster, model) (rate(pdserve_cached_prompt_tokens_total[1h]))\n"
            "/ sum by (cluster, model) (rate(pdserve_prompt_tokens_total[1h]))",
        ),
    )


def alerts(promise: Promise) -> tuple[Alert, ...]:
    """All alerts, the ones that page first."""
    return (
        *_burn_alerts(promise),
        *_worker_alerts(promise),
        *_tier_alerts(),
        *planner_alerts(),
        *_cluster_alerts(),
        *_own_alerts(),
    )


def _judged(function: str, window: str) -> str:
    series = 'pdserve_slo_total{objective="both", result=~"good|bad"}'
    return f"({function}({series}[{window}]))"


def _bad_ratio(window: str) -> str:
    """0 where no request has been bad yet: the series of bad ones begins with the first."""
    judged = f"sum by (cluster, model) {_judged('rate', window)}"
    bad = f'rate(pdserve_slo_total{{objective="both", result="bad"}}[{window}])'
    return f"(sum by (cluster, model) ({bad}) or 0 * {judged})\n/ {judged}"


def _burn_alerts(promise: Promise) -> tuple[Alert, ...]:
    kinds = (
        ("PdserveSloBurnFast", 14.4, "1h", "5m", "2m", "page"),
        ("PdserveSloBurn", 6, "6h", "30m", "15m", "page"),
        ("PdserveSloBurnSlow", 3, "1d", "2h", "1h", "ticket"),
    )
    return tuple(_burn_alert(promise, *kind) for kind in kinds)


def _burn_alert(
    promise: Promise, name: str, factor: float, long: str, short: str, hold: str, severity: str
) -> Alert:
    threshold = f"{min(factor * promise.budget, _MOST_BAD):g}"
    return Alert(
        name=name,
        expr=f"pdserve:bad_ratio:{long} > {threshold}\n"
        f"and pdserve:bad_ratio:{short} > {threshold}\n"
        f"and pdserve:judged_requests:{short} >= {_ENOUGH}",
        hold=hold,
        severity="page" if severity == "page" else "ticket",
        summary="{{ $labels.model }}: {{ $value | humanizePercentage }} of requests miss their "
        f"objectives ({long})",
        description=f"More than {100 * float(threshold):g} % of the requests of the last {long} "
        f"and of the last {short} missed an objective; {100 * promise.budget:g} % may.",
        operands=(
            f"pdserve:bad_ratio:{long}",
            f"pdserve:bad_ratio:{short}",
            f"pdserve:judged_requests:{short}",
        ),
    )


def _worker_alerts(promise: Promise) -> tuple[Alert, ...]:
    return (
        Alert(
            name="PdserveNoWorker",
            expr="max by (cluster, model) (max_over_time(pdserve_engine_ready[6h])) == 1\n"
            "unless on (cluster, model) (max by (cluster, model) (pdserve_engine_ready) == 1)",
            hold="1m",
            severity="page",
            summary="{{ $labels.model }}: no worker is ready",
            description="A worker served this model within the last six hours, and none does now.",
            operands=(
                "max by (cluster, model) (max_over_time(pdserve_engine_ready[6h])) == 1",
                "max by (cluster, model) (pdserve_engine_ready) == 1",
            ),
        ),
        Alert(
            name="PdserveWorkerNotReady",
            expr="pdserve_engine_ready == 0",
            hold="15m",
            severity="ticket",
            summary="{{ $labels.instance }} ({{ $labels.model }}, {{ $labels.mode }}) is not ready",
            description="Its engine loads or restarts for a quarter of an hour.",
            operands=("pdserve_engine_ready",),
        ),
        Alert(
            name="PdserveEngineRestarts",
            expr="increase(pdserve_engine_restarts_total[10m]) > 3",
            severity="page",
            summary="{{ $labels.instance }}: the engine keeps dying",
            description="It died and was started again more than three times in ten minutes.",
            operands=("increase(pdserve_engine_restarts_total[10m])",),
        ),
        Alert(
            name="PdserveProcessRestarts",
            expr='changes(process_start_time_seconds{job=~"pdserve.*"}[15m]) > 2',
            severity="page",
            summary="{{ $labels.instance }}: the process keeps dying",
            description="It was started again more than twice in a quarter of an hour.",
            operands=('changes(process_start_time_seconds{job=~"pdserve.*"}[15m])',),
        ),
        Alert(
            name="PdserveEngineStalled",
            expr="max_over_time(pdserve_engine_stalled_seconds[1m]) > 5\n"
            "or increase(pdserve_engine_stalls_total[10m]) > 0",
            hold="1m",
            severity="page",
            summary="{{ $labels.instance }}: the engine stalls",
            description="It has work and makes no progress. After --stall-timeout (10 s) it is "
            "restarted and its requests move.",
            operands=(
                "max_over_time(pdserve_engine_stalled_seconds[1m])",
                "increase(pdserve_engine_stalls_total[10m])",
            ),
        ),
        Alert(
            name="PdserveHeldWhileIdle",
            expr="sum by (cluster, model) (min_over_time(pdserve_num_requests_held[1m])) > 0\n"
            "and on (cluster, model) min by (cluster, model) ((pdserve_num_requests_running"
            '{mode!="prefill"}\n'
            '  + pdserve_num_requests_waiting{mode!="prefill"}) and pdserve_engine_ready == 1)'
            " == 0",
            hold="2m",
            severity="ticket",
            summary="{{ $labels.model }}: requests wait for a worker while one is idle",
            description="{{ $value }} requests have no worker, and a worker of the model that is "
            "ready has no request.",
            operands=(
                "sum by (cluster, model) (min_over_time(pdserve_num_requests_held[1m]))",
                '(pdserve_num_requests_running{mode!="prefill"} '
                '+ pdserve_num_requests_waiting{mode!="prefill"}) and pdserve_engine_ready == 1',
            ),
        ),
        Alert(
            name="PdservePrefillBacklog",
            expr="sum by (cluster, model) (pdserve_prefill_queue_tokens)\n"
            '/ sum by (cluster, model) (rate(pdserve_computed_tokens_total{mode="prefill"}[2m]))\n'
            f"> {promise.first_token:g}",
            hold="2m",
            severity="page",
            summary="{{ $labels.model }}: {{ $value | humanizeDuration }} of prompts wait for "
            "prefill workers",
            description="A new prompt waits longer than its time to first token allows.",
            operands=(
                "sum by (cluster, model) (pdserve_prefill_queue_tokens)",
                'sum by (cluster, model) (rate(pdserve_computed_tokens_total{mode="prefill"}[2m]))',
            ),
        ),
        Alert(
            name="PdserveKvPressure",
            expr="pdserve_kv_cache_usage_ratio > 0.95\nand rate(pdserve_preemptions_total[5m]) > "
            "0.1",
            hold="5m",
            severity="ticket",
            summary="{{ $labels.instance }}: the KV cache is too small for the load",
            description="Sequences give up their blocks to others and are computed again.",
            operands=("pdserve_kv_cache_usage_ratio", "rate(pdserve_preemptions_total[5m])"),
        ),
        Alert(
            name="PdserveHitRateFell",
            expr="pdserve:prefix_hit_ratio:1h < 0.5 * (pdserve:prefix_hit_ratio:1h offset 1d)\n"
            "and on (cluster, model) "
            "sum by (cluster, model) (rate(pdserve_requests_total[1h])) > 1",
            hold="30m",
            severity="ticket",
            summary="{{ $labels.model }}: the prefix cache finds {{ $value | humanizePercentage "
            "}}, less than half of yesterday",
            description="Prompts are computed that were cached at the same time yesterday.",
            operands=(
                "pdserve:prefix_hit_ratio:1h",
                "sum by (cluster, model) (rate(pdserve_requests_total[1h]))",
            ),
        ),
    )


def _tier_alerts() -> tuple[Alert, ...]:
    return (
        Alert(
            name="PdserveKvTierTrouble",
            expr="pdserve_kv_tier_trouble == 1",
            hold="5m",
            severity="ticket",
            summary="{{ $labels.instance }}: the KV tier {{ $labels.tier }} is in trouble",
            description="It works in part or not at all; what it has is computed again. /health "
            "and `pdserve status` say why.",
            operands=("pdserve_kv_tier_trouble",),
        ),
        Alert(
            name="PdserveKvTierFailures",
            expr="increase(pdserve_kv_tier_read_failures_total[15m]) > 3",
            severity="ticket",
            summary="{{ $labels.instance }}: KV on {{ $labels.tier }} cannot be read",
            description="Blocks could not be read or did not match their checksum. They were "
            "computed again; the memory or the disk may be failing.",
            operands=("increase(pdserve_kv_tier_read_failures_total[15m])",),
        ),
        Alert(
            name="PdserveKvTierTooSmall",
            expr="pdserve_kv_tier_retention_seconds < 60\n"
            "and pdserve_kv_tier_retention_seconds > 0",
            hold="30m",
            severity="ticket",
            summary="{{ $labels.instance }}: {{ $labels.tier }} keeps KV for "
            "{{ $value | humanizeDuration }} only",
            description="A conversation's next turn mostly comes later, so the tier copies much "
            "and saves little.",
            operands=("pdserve_kv_tier_retention_seconds",),
        ),
    )


def _degraded(name: str, matcher: str, hold: str, summary: str, description: str) -> Alert:
    return Alert(
        name=name,
        expr=f"pdserve_degraded{{{matcher}}} == 1",
        hold=hold,
        severity="ticket",
        summary=summary,
        description=description,
        operands=("pdserve_degraded",),
    )


OWN_ALERTS: Final = (
    *("prediction_poor", "kv_transfer", "model_conflict"),
    *("hash_secrets_differ", "hash_secret_missing", "kv_tier_trouble"),
    *("planner_blind", "planner_unreachable"),
)
"""Reasons of degradation that have an alert of their own."""
_OF_PAIR: Final = "((prefill|decode)_)?"
"""How the reasons of one of two workers in a process begin."""


def _cluster_alerts() -> tuple[Alert, ...]:
    return (
        Alert(
            name="PdserveSplitView",
            expr="max by (cluster) (sum by (cluster, instance, role) (pdserve_node_members))\n"
            "- min by (cluster) (sum by (cluster, instance, role) (pdserve_node_members)) > 0",
            hold="2m",
            severity="page",
            summary="nodes of {{ $labels.cluster }} see different members",
            description="A node knows {{ $value }} members less than another one: the network "
            "between them is divided, or a node runs with another key.",
            operands=("sum by (cluster, instance, role) (pdserve_node_members)",),
        ),
        _degraded(
            "PdservePredictionPoor",
            'reason="prediction_poor"',
            "5m",
            "{{ $labels.instance }}: predicted times are off",
            "The router counts tokens or requests instead of predicting, and holds no requests.",
        ),
        _degraded(
            "PdserveTransferDegraded",
            'reason="kv_transfer"',
            "5m",
            "{{ $labels.instance }}: KV travels by a slower path",
            "A faster transport between two workers fails, or none reaches a peer.",
        ),
        _degraded(
            "PdserveModelConflict",
            'reason="model_conflict"',
            "5m",
            "workers serve different things under one name",
            "{{ $labels.instance }} leaves those workers out.",
        ),
        _degraded(
            "PdserveHashSecrets",
            'reason=~"hash_secrets_differ|hash_secret_missing"',
            "5m",
            "{{ $labels.instance }}: cached prefixes of other nodes are not found",
            "Nodes name blocks with different secrets.",
        ),
        _degraded(
            "PdserveDegraded",
            f'reason!~"{_OF_PAIR}({"|".join(OWN_ALERTS)})"',
            "30m",
            "{{ $labels.instance }} is degraded: {{ $labels.reason }}",
            "Its /health and `pdserve status` say why, and what to do.",
        ),
        Alert(
            name="PdserveTopicDivergence",
            expr='increase(pdserve_node_topic_events_total{event="divergences"}[15m]) > 0',
            severity="ticket",
            summary="{{ $labels.instance }}: a copy of another node's state was wrong",
            description="It was replaced by a snapshot; that it was wrong is a defect of pdserve.",
            operands=('increase(pdserve_node_topic_events_total{event="divergences"}[15m])',),
        ),
    )


def _own_alerts() -> tuple[Alert, ...]:
    return (
        Alert(
            name="PdserveLoopLag",
            expr="histogram_quantile(0.99, sum by (cluster, instance, le) "
            "(rate(pdserve_event_loop_lag_seconds_bucket[5m]))) > 0.1",
            hold="5m",
            severity="ticket",
            summary="{{ $labels.instance }}: the event loop is {{ $value | humanizeDuration }} "
            "late",
            description="One time in a hundred. Tokens of all its streams are that late, too.",
            operands=(
                "histogram_quantile(0.99, sum by (cluster, instance, le) "
                "(rate(pdserve_event_loop_lag_seconds_bucket[5m])))",
            ),
        ),
        Alert(
            name="PdserveSpansDropped",
            expr="sum by (cluster, instance) "
            '(rate(pdserve_trace_spans_dropped_total{reason!="shutdown"}[10m]))\n'
            "> 0.01 * sum by (cluster, instance) (rate(pdserve_trace_spans_exported_total[10m]))",
            hold="10m",
            severity="ticket",
            summary="{{ $labels.instance }}: traces do not reach the collector",
            description="More than one span in a hundred is dropped.",
            operands=(
                "sum by (cluster, instance) "
                '(rate(pdserve_trace_spans_dropped_total{reason!="shutdown"}[10m]))',
                "sum by (cluster, instance) (rate(pdserve_trace_spans_exported_total[10m]))",
            ),
        ),
        Alert(
            name="PdserveScrapeDown",
            expr='up{job=~"pdserve.*"} == 0',
            hold="10m",
            severity="ticket",
            summary="{{ $labels.instance }} is not scraped",
            description="Prometheus cannot read its /metrics: no other alert sees that process.",
            operands=('up{job=~"pdserve.*"}',),
        ),
    )
