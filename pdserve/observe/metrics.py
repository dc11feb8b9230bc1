"""Defines every metric of pdserve (name, kind, help, labels, buckets) and answers scrapes.

`Instruments` is the table. A `Metrics` belongs to one process of a deployment (a test process
holds several); roles add to its attributes, and a scrape turns them into Prometheus text. Names
end as in vLLM, so that dashboards need a new prefix only; units are seconds, bytes and ratios.
It does not know where the numbers come from: each definition names the role that owns it.
"""

# ruff: noqa: RUF009 (the calls in `Instruments` make dataclass fields, not values)

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Final, Literal, TypeVar, cast

from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    PdserveError,
    RequestError,
    Unavailable,
)
from pdserve.observe.engine_metrics import (
    ENGINE_LABELS,
    ENGINE_METRICS,
    ENGINE_PROCESS_METRICS,
    merge_by_labels,
    one_by_process,
    sum_by_labels,
)
from pdserve.observe.exposition import ScrapedFamily, ScrapedSeries
from pdserve.observe.instruments import OTHER, Counter, Family, Gauge, Histogram
from pdserve.observe.node_metrics import NODE_METRICS, merge_by_role
from pdserve.observe.scrapes import PLAIN, MetricNames, ScrapedPage, ScrapeForm, page_of
from pdserve.observe.slo import SloTable
from pdserve.observe.tier_metrics import LANE_METRICS, MISS_METRICS, PLAN_METRICS, TIER_METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client import ProcessCollector

    from pdserve.observe.engine_metrics import EngineSample
    from pdserve.observe.node_metrics import NodeSample
    from pdserve.observe.slo import Objectives, SloVerdict
    from pdserve.observe.tier_metrics import NamedMetric, S

Instrument = Counter | Gauge | Histogram | Family[Counter] | Family[Gauge] | Family[Histogram]
_I = TypeVar("_I", bound=Instrument)

Kind = Literal["counter", "gauge", "histogram"]
Combine = Literal["sum", "max"]

_DEFINITION = "definition"
"""Key of a field's metadata."""

MOST_MODELS: Final = 64
"""Values of the label `model` that a process makes; further models share the value `other`."""
_MODEL: Final = ("model",)
_OLDEST: Final = "process_start_time_seconds"
"""Prometheus' own metric that cannot be added: the start time of the oldest process counts."""
_PER_MODEL: Final = 16 * (MOST_MODELS + 2)
"""Most combinations of a model and up to 16 values of a second label."""

LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""Seconds; vLLM's bounds for the time to first token, widened at the end for requests."""
TOKEN_LATENCY_BUCKETS = (
    *(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
"""Seconds between two tokens of one choice, or between two turns of the event loop."""
TOKEN_COUNT_BUCKETS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
    *(10_000, 20_000, 50_000, 100_000),
)

Outcome = Literal[
    "completed", "cancelled", "invalid", "overloaded", "unavailable", "deadline", "error"
]


def outcome_of(error: BaseException | None) -> Outcome:
    """The `outcome` label of a finished request; None is success."""
    kinds: tuple[tuple[type[PdserveError], Outcome], ...] = (
        (RequestError, "invalid"),
        (Overloaded, "overloaded"),
        (Unavailable, "unavailable"),
        (DeadlineExceeded, "deadline"),
        (Cancelled, "cancelled"),
    )
    if error is None:
        return "completed"
    return next((word for kind, word in kinds if isinstance(error, kind)), "error")


@dataclass(frozen=True, slots=True)
class Definition:
    """One line of `docs/metrics.md`."""

    name: str
    kind: Kind
    help: str
    owner: str
    labels: tuple[str, ...] = ()
    combine: Combine = "sum"
    """How values of several processes that share a port become one."""


_ENGINE = tuple(
    (
        Definition(
            f"pdserve_{metric.name}",
            metric.kind,
            metric.help,
            "worker",
            ENGINE_LABELS,
            metric.combine,
        ),
        metric.read,
    )
    for metric in ENGINE_METRICS
)
_ENGINE_PROCESS = tuple(
    (Definition(f"pdserve_{one.name}", one.kind, one.help, "worker", ENGINE_LABELS), one.read)
    for one in ENGINE_PROCESS_METRICS
)


def _named(
    metrics: tuple[NamedMetric[S], ...], label: str
) -> tuple[tuple[Definition, Callable[[S], float]], ...]:
    """Metrics that an engine has for each of several names, such as those of its tiers."""
    labels = (*ENGINE_LABELS, label)
    return tuple(
        (
            Definition(
                f"pdserve_{one.name}", one.kind, one.help, "worker", labels, combine=one.combine
            ),
            one.read,
        )
        for one in metrics
    )


_TIERS = _named(TIER_METRICS, "tier")
_LANES = _named(LANE_METRICS, "lane")
_PLANS = _named(PLAN_METRICS, "source")
_MISSES = _named(MISS_METRICS, "reason")
_NODE = tuple(
    (
        Definition(
            f"pdserve_{metric.name}",
            cast("Kind", metric.kind),
            metric.help,
            "node",
            ("role", metric.label) if metric.label else ("role",),
            metric.combine,
        ),
        metric.field,
    )
    for metric in NODE_METRICS
)


def _declare(definition: Definition, make: Callable[[], _I]) -> _I:
    """A dataclass field whose value `make` gives each instance; its type to a checker."""
    return field(init=False, default_factory=make, metadata={_DEFINITION: definition})


def _counter(name: str, text: str, owner: str) -> Counter:
    return _declare(Definition(f"pdserve_{name}", "counter", text, owner), Counter)


def _gauge(name: str, text: str, owner: str, combine: Combine = "sum") -> Gauge:
    return _declare(Definition(f"pdserve_{name}", "gauge", text, owner, combine=combine), Gauge)


def _histogram(name: str, text: str, owner: str, bounds: Sequence[float]) -> Histogram:
    definition = Definition(f"pdserve_{name}", "histogram", text, owner)
    return _declare(definition, lambda: Histogram(bounds))


def _counters(
    name: str, text: str, owner: str, labels: tuple[str, ...], bound: int = 256
) -> Family[Counter]:
    definition = Definition(f"pdserve_{name}", "counter", text, owner, labels)
    return _declare(definition, lambda: Family(Counter, len(labels), bound))


def _gauges(
    name: str, text: str, owner: str, labels: tuple[str, ...], combine: Combine = "sum"
) -> Family[Gauge]:
    definition = Definition(f"pdserve_{name}", "gauge", text, owner, labels, combine)
    return _declare(definition, lambda: Family(Gauge, len(labels), bound=256))


def _histograms(
    name: str, text: str, owner: str, bounds: Sequence[float], labels: tuple[str, ...]
) -> Family[Histogram]:
    definition = Definition(f"pdserve_{name}", "histogram", text, owner, labels)
    return _declare(definition, lambda: Family(lambda: Histogram(bounds), len(labels), bound=256))


@dataclass(eq=False, repr=False)
class Instruments:
    """The table: each attribute is an instrument that its owner adds to, declared with the metric
    that it is exported as. `Family.labels` takes values in the order of the labels named here."""

    # Metrics of the frontend, per request.
    requests: Family[Counter] = _counters(
        "requests_total",
        "Requests by how they ended: completed, cancelled, invalid, overloaded, "
        "unavailable, deadline, error.",
        "frontend",
        ("model", "outcome"),
        bound=_PER_MODEL,
    )
    time_to_first_token: Family[Histogram] = _histograms(
        "time_to_first_token_seconds",
        "From a request's arrival to its first token, tokenising and queueing included.",
        "frontend",
        LATENCY_BUCKETS,
        _MODEL,
    )
    inter_token_latency: Family[Histogram] = _histograms(
        "inter_token_latency_seconds",
        "Between two tokens of one choice.",
        "frontend",
        TOKEN_LATENCY_BUCKETS,
        _MODEL,
    )
    e2e_request_latency: Family[Histogram] = _histograms(
        "e2e_request_latency_seconds",
        "From a request's arrival to its last token.",
        "frontend",
        LATENCY_BUCKETS,
        _MODEL,
    )
    request_queue: Family[Histogram] = _histograms(
        "request_queue_seconds",
        "From submission to the first step that computed something for it.",
        "frontend",
        LATENCY_BUCKETS,
        _MODEL,
    )
    request_prefill: Family[Histogram] = _histograms(
        "request_prefill_seconds",
        "From that step to the first token.",
        "frontend",
        LATENCY_BUCKETS,
        _MODEL,
    )
    request_decode: Family[Histogram] = _histograms(
        "request_decode_seconds",
        "From the first token to the last token of a finished request.",
        "frontend",
        LATENCY_BUCKETS,
        _MODEL,
    )
    request_time_per_output_token: Family[Histogram] = _histograms(
        "request_time_per_output_token_seconds",
        "Inter-token latency of a finished request: the mean over its slowest choice's tokens.",
        "frontend",
        TOKEN_LATENCY_BUCKETS,
        _MODEL,
    )
    request_prompt_tokens: Family[Histogram] = _histograms(
        "request_prompt_tokens",
        "Prompt tokens per finished request.",
        "frontend",
        TOKEN_COUNT_BUCKETS,
        _MODEL,
    )
    request_generation_tokens: Family[Histogram] = _histograms(
        "request_generation_tokens",
        "Output tokens per finished request.",
        "frontend",
        TOKEN_COUNT_BUCKETS,
        _MODEL,
    )

    request_max_generation_tokens: Family[Histogram] = _histograms(
        "request_max_generation_tokens",
        "Output tokens of a finished request's longest choice.",
        "frontend",
        TOKEN_COUNT_BUCKETS,
        _MODEL,
    )
    request_uncached_tokens: Family[Histogram] = _histograms(
        "request_uncached_tokens",
        "Prompt tokens per finished request that were not in the prefix cache.",
        "frontend",
        TOKEN_COUNT_BUCKETS,
        _MODEL,
    )
    request_cached_tokens: Family[Counter] = _counters(
        "request_cached_tokens_total",
        "Prompt tokens of finished requests that were not computed, by where their KV was: device, "
        "host (memory), disk, peer (another worker).",
        "frontend",
        ("model", "source"),
        bound=_PER_MODEL,
    )
    finished: Family[Counter] = _counters(
        "finished_total",
        "Outputs by how they ended, one for each choice or vector that a worker was asked for: "
        "stop, length, tool_calls, abort (the client went away), error.",
        "frontend",
        ("model", "reason"),
        bound=_PER_MODEL,
    )

    slo: Family[Counter] = _counters(
        "slo_total",
        "Requests by whether they met an objective of --slo-ttft or --slo-itl (ttft, itl, or both "
        "together): good, bad, or none (the client ended it, or it had too few tokens). The cause "
        "is what took most of a bad request's time: frontend, held, queue, prefill, handoff, "
        "decode, moved, or error.",
        "frontend",
        ("model", "objective", "result", "cause"),
        bound=4 * _PER_MODEL,
    )

    migrations: Family[Counter] = _counters(
        "migrations_total",
        "Requests that another worker had to continue, by the reason (worker_lost, engine_died, "
        "engine_stalled, step_failed, not_ready, drain, queue, itl, kv) and the outcome: "
        "completed (the next worker gave a token), stayed (no worker had room), no_worker, "
        "poison, failed, cancelled.",
        "frontend",
        ("model", "reason", "outcome"),
        bound=4 * _PER_MODEL,
    )
    migration_gap: Family[Histogram] = _histograms(
        "migration_gap_seconds",
        "From the end of a stream at one worker, as the frontend learnt of it, to its next "
        "token from another.",
        "frontend",
        LATENCY_BUCKETS,
        _MODEL,
    )
    poisoned_requests: Family[Counter] = _counters(
        "poisoned_requests_total",
        "Requests that are not retried, because several workers in a row died while running them.",
        "frontend",
        _MODEL,
    )

    trace_spans_exported: Counter = _counter(
        "trace_spans_exported_total",
        "Spans that a collector has taken.",
        "frontend",
    )
    trace_spans_dropped: Family[Counter] = _counters(
        "trace_spans_dropped_total",
        "Spans that were not exported, by the reason: queue_full, undelivered (the collector gave "
        "no answer, or asked for another time, for 30 s), refused (it answered with an error), "
        "rejected (it took others of the same request), invalid (a defect), shutdown.",
        "frontend",
        ("reason",),
    )
    trace_spans_waiting: Gauge = _gauge(
        "trace_spans_waiting",
        "Spans that wait for their export, those under way included; at most 4,608.",
        "frontend",
    )
    traces_kept: Family[Counter] = _counters(
        "traces_kept_total",
        "Traces of requests that were kept, by the reason; one may count for several: parent (the "
        "caller's sampled bit), head (by lot), watch, error, slo_ttft, slo_itl, moved, preempted, "
        "retried, prefill_failed.",
        "frontend",
        ("reason",),
    )
    traces_limited: Family[Counter] = _counters(
        "traces_limited_total",
        "Traces of requests that were not kept for a limit: rate (of all traces), parent (of those "
        "that callers ask for).",
        "frontend",
        ("limit",),
    )

    traces_lost: Counter = _counter(
        "traces_lost_total",
        "Traces of requests that were lost by a defect, which the log describes; the requests "
        "themselves were not affected.",
        "frontend",
    )

    router_failures: Family[Counter] = _counters(
        "router_failures_total",
        "Routing requests that went from one router to another, by the reason: unreachable (its "
        "link ended, it did not answer, it drains), failed (it failed inside).",
        "frontend",
        ("reason",),
    )

    num_requests_held: Family[Gauge] = _gauges(
        "num_requests_held",
        "Prompts for which this frontend seeks a worker, those that a router holds included.",
        "frontend",
        _MODEL,
    )

    # Metrics of the frontend, per connection and field.
    http_requests_in_flight: Gauge = _gauge(
        "http_requests_in_flight", "Requests with a body being answered.", "frontend"
    )
    api_keys_refused: Family[Counter] = _counters(
        "api_keys_refused_total",
        "Requests refused for their API key, by the reason: missing, malformed, unknown.",
        "frontend",
        ("reason",),
    )
    text_jobs_given_up: Counter = _counter(
        "text_jobs_given_up_total",
        "Jobs on a request's text (tokens, templates, grammars) that exceeded their time limit.",
        "frontend",
    )
    text_threads_stuck: Gauge = _gauge(
        "text_threads_stuck",
        "Threads of such jobs that still run; new threads have replaced them.",
        "frontend",
    )
    http_responses: Family[Counter] = _counters(
        "http_responses_total",
        "HTTP responses by route and status.",
        "frontend",
        ("route", "status"),
    )
    http_connections: Gauge = _gauge("http_connections", "Open client connections.", "frontend")
    connections_cut: Family[Counter] = _counters(
        "connections_cut_total",
        "Client connections closed because the client exceeded a limit, by reason.",
        "frontend",
        ("reason",),
    )
    unknown_fields: Family[Counter] = _counters(
        "unknown_fields_total",
        "Unknown request fields, which were ignored; the number of names is bounded, further ones"
        " count as `other`.",
        "frontend",
        ("field",),
        bound=64,
    )
    tools_left_out: Family[Counter] = _counters(
        "tools_left_out_total",
        "Tools left out of requests because a server would have to run them, by type; "
        "custom.format: the grammar of a custom tool, which only the model sees.",
        "frontend",
        ("type",),
    )

    request_images: Family[Counter] = _counters(
        "request_images_total",
        "Images that came with requests, by where they were: data (in the request) or url.",
        "frontend",
        ("source",),
    )
    images_refused: Family[Counter] = _counters(
        "images_refused_total",
        "Requests refused for an image, by reason: url (its form, scheme or host), address (not "
        "public), fetch (it could not be had), slow, size, type, pixels, count, memory (too many "
        "are held), busy (too many are fetched).",
        "frontend",
        ("reason",),
    )
    image_fetches: Family[Gauge] = _gauges(
        "image_fetches",
        "Images that are fetched from their URLs, by state: running, or waiting for a turn.",
        "frontend",
        ("state",),
    )
    image_prompts_unnamed: Counter = _counter(
        "image_prompts_unnamed_total",
        "Prompts with an image of a size that had not been seen: routers could look for cached "
        "blocks only up to that image.",
        "frontend",
    )

    # Metrics of workers and routers about requests that should move to another worker.
    moves_asked: Family[Counter] = _counters(
        "moves_asked_total",
        "Requests that their frontend was asked to migrate, by reason: drain, kv (the worker runs"
        " out of blocks), itl (its streams are too slow), queue (another worker would start it "
        "sooner).",
        "node",
        ("reason",),
    )

    # Metrics of workers about changes of their mode.
    mode_switches: Family[Counter] = _counters(
        "mode_switches_total",
        "Orders to change the worker's mode, by outcome: done, refused, cancelled, draining, last "
        "(no other worker would do its job), timed_out (something was left), failed (the new mode "
        "did not work).",
        "worker",
        ("outcome",),
    )
    mode_switch_seconds: Family[Histogram] = _histograms(
        "mode_switch_seconds",
        "Seconds from the order to change a worker's mode until it served in the new one.",
        "worker",
        LATENCY_BUCKETS,
        (),
    )

    # Metrics of planners. Workers are those of the planner's pools.
    planner_workers: Family[Gauge] = _gauges(
        "planner_workers",
        "Workers by what a planner sees them do, instances that are not workers yet included: "
        "ready, loading, leaving, proving, draining, pending, booting.",
        "planner",
        ("model", "mode", "state"),
    )
    planner_target_workers: Family[Gauge] = _gauges(
        "planner_target_workers",
        "Workers that the planner wants.",
        "planner",
        ("model", "mode"),
    )
    planner_work: Family[Gauge] = _gauges(
        "planner_work",
        "Work per second, in prefill seconds of a worker of speed 1: observed, and its forecast at "
        "the time when a worker that is started now would serve (p50, p90, p95).",
        "planner",
        ("model", "value"),
    )
    planner_miss_share: Family[Gauge] = _gauges(
        "planner_miss_share",
        "Predicted share of requests that miss the objective: before the plan, after it, and those "
        "that no worker could help (unreachable).",
        "planner",
        ("model", "when"),
    )
    planner_blind: Family[Gauge] = _gauges(
        "planner_blind",
        "1 while the planner does not know the demand for the model.",
        "planner",
        ("model",),
    )
    planner_changes: Family[Gauge] = _gauges(
        "planner_changes",
        "Changes that are under way, by action and state.",
        "planner",
        ("action", "state"),
    )
    planner_change_seconds: Family[Histogram] = _histograms(
        "planner_change_seconds",
        "Seconds from the decision for a change until it was over, done or not.",
        "planner",
        LATENCY_BUCKETS,
        ("action",),
    )
    planner_orders: Family[Counter] = _counters(
        "planner_orders_total",
        "Orders to workers and actuators, by outcome: done, or refused as transient, denied, "
        "exhausted, vetoed or stale.",
        "planner",
        ("action", "outcome"),
    )
    planner_worker_seconds: Family[Counter] = _counters(
        "planner_worker_seconds_total",
        "Time of workers by state; pending instances are free in most environments.",
        "planner",
        ("model", "state"),
    )
    planner_cost: Family[Counter] = _counters(
        "planner_cost_total",
        "What workers have cost, in the unit of the prices of their kinds; starts that wait count.",
        "planner",
        ("model",),
    )
    planner_tick_seconds: Family[Histogram] = _histograms(
        "planner_tick_seconds",
        "Seconds of one decision, its what-ifs included.",
        "planner",
        LATENCY_BUCKETS,
        (),
    )
    planner_owner: Family[Gauge] = _gauges(
        "planner_owner",
        "1 for each model of the planner's file that it decides for, 0 for those that another "
        "planner decides for.",
        "planner",
        ("model",),
    )
    planner_binding: Family[Gauge] = _gauges(
        "planner_binding",
        "1 for what keeps the plan from being cheaper or better, such as ttft, itl, floor, max, "
        "budget, slots, kind, panic, cooldown, changing, paused; `pdserve planner` says it in "
        "words.",
        "planner",
        ("model", "binding"),
    )
    planner_least_workers: Family[Gauge] = _gauges(
        "planner_least_workers",
        "Fewest workers that must serve now, by min and floors; with --planner=act only.",
        "planner",
        ("model",),
        "max",
    )
    planner_oldest_change_seconds: Family[Gauge] = _gauges(
        "planner_oldest_change_seconds",
        "For how long the oldest change of an action (start, stop, mode, undo_drain) has been "
        "under way; 0: none is.",
        "planner",
        ("model", "action"),
        "max",
    )
    planner_changes_ended: Family[Counter] = _counters(
        "planner_changes_ended_total",
        "Changes that are over, by action (start, stop, mode, undo_drain) and result: done, failed "
        "(a start that became no worker), given_up (refused, timed out, or no longer wanted).",
        "planner",
        ("model", "action", "result"),
        bound=_PER_MODEL,
    )

    # Metrics of agents about the workers of their hosts.
    agent_slots: Family[Gauge] = _gauges(
        "agent_slots",
        "Slots for workers.",
        "agent",
        ("group",),
    )
    agent_free_slots: Family[Gauge] = _gauges(
        "agent_free_slots",
        "Slots that no worker has.",
        "agent",
        ("group",),
    )
    agent_workers: Family[Gauge] = _gauges(
        "agent_workers",
        "Workers that have not ended, by state: booting, running, ending.",
        "agent",
        ("kind", "state"),
    )
    agent_starts: Family[Counter] = _counters(
        "agent_starts_total",
        "Orders to start a worker, by outcome: started, failed (its process or its record could "
        "not be made), refused (no slot is free, or the agent has no such kind or mode).",
        "agent",
        ("kind", "outcome"),
    )
    agent_exits: Family[Counter] = _counters(
        "agent_exits_total",
        "Workers that have ended, by how: ended (as ordered, or with status 0), failed (by itself),"
        " killed (after its grace), lost (the machine or the agent had ended).",
        "agent",
        ("kind", "how"),
    )
    agent_adopted: Family[Counter] = _counters(
        "agent_adopted_total",
        "Workers of an earlier agent that were found running.",
        "agent",
        ("kind",),
    )

    # Metrics of workers about prompts that are prefilled elsewhere or for others.
    prefill_decisions: Family[Counter] = _counters(
        "prefill_decisions_total",
        "Prompts by where they were prefilled, here (local) or on another worker (remote), "
        "and by the reason.",
        "worker",
        ("where", "reason"),
    )
    handoff_attempts: Family[Counter] = _counters(
        "handoff_attempts_total",
        "Attempts to prefill a prompt on another worker: done, unwanted (the request ended), or "
        "failed: lost (KV did not arrive completely), failed (the prefill worker reported an "
        "error), lapsed (it did not renew its lease), died, superseded, fenced, or hindered (no "
        "free blocks here).",
        "worker",
        ("outcome",),
    )
    kv_pulls_ended: Family[Counter] = _counters(
        "kv_pulls_ended_total",
        "Fetches of KV from other workers by how they ended: ok, or why some blocks did not come "
        "(absent, busy, deadline, corrupt, gone and others). Those were computed.",
        "worker",
        ("outcome",),
    )
    kv_pulls_refused: Family[Counter] = _counters(
        "kv_pulls_refused_total",
        "Other workers' questions for KV that were answered without any, by reason.",
        "worker",
        ("reason",),
    )
    handoff_claims: Family[Counter] = _counters(
        "handoff_claims_total",
        "Prompts that a prefill worker took from the queue, and sequences that moved to another "
        "worker: done, refused (by the other worker), failed, cancelled.",
        "worker",
        ("outcome",),
    )
    handoff_seconds: Family[Histogram] = _histograms(
        "handoff_seconds",
        "Duration of a handoff's phases: admit (until there is room), queue (until a prefill "
        "worker asks), open (until its blocks are bound), fill (until it hands over), activate "
        "(until the first token).",
        "worker",
        LATENCY_BUCKETS,
        ("phase",),
    )
    handoffs: Family[Gauge] = _gauges(
        "handoffs",
        "Prompts on their way between two workers, by state.",
        "worker",
        ("state",),
    )

    cancel_seconds: Family[Histogram] = _histograms(
        "cancel_seconds",
        "From the moment a worker gets a request's cancellation until its blocks are free, "
        "by what it was doing: queued, remote_queued and remote_filling (its prompt was to "
        "come, or was coming, from another worker), prefilling, decoding, preempted, sending "
        "(its prompt was computed for another).",
        "worker",
        TOKEN_LATENCY_BUCKETS,
        ("stage",),
    )

    # Metrics of workers about KV transfers.
    transfer_bytes: Family[Counter] = _counters(
        "transfer_bytes_total",
        "KV sent to and received from other workers, by what carried it.",
        "worker",
        ("direction", "backend"),
    )
    transfer_seconds: Family[Counter] = _counters(
        "transfer_seconds_total",
        "Time during which KV was being sent, summed over peers.",
        "worker",
        ("backend",),
    )
    transfer_failures: Family[Counter] = _counters(
        "transfer_failures_total",
        "Paths to other workers that could not be set up or have broken.",
        "worker",
        ("backend",),
    )
    transfer_paths_degraded: Gauge = _gauge(
        "transfer_paths_degraded",
        "Paths that use a slower back end because a faster one fails, and peers that no back end "
        "reaches.",
        "worker",
    )

    # Metrics of the process.
    event_loop_lag: Histogram = _histogram(
        "event_loop_lag_seconds",
        "How late the event loop ran a timer; one sample per tick.",
        "process",
        TOKEN_LATENCY_BUCKETS,
    )
    event_loop_lag_max: Gauge = _gauge(
        "event_loop_lag_max_seconds",
        "The largest lag of the last one to two minutes.",
        "process",
        "max",
    )
    event_loop_tasks: Gauge = _gauge(
        "event_loop_tasks",
        "Tasks of the event loop; falls to its idle value once requests have ended.",
        "process",
    )
    degraded: Family[Gauge] = _gauges(
        "degraded",
        "1 for each reason why this process is degraded.",
        "process",
        ("reason",),
        combine="max",
    )
    build_info: Family[Gauge] = _gauges(
        "build_info",
        "Always 1; the labels say what runs.",
        "process",
        ("version", "role"),
        combine="max",
    )


_INSTRUMENTS: dict[str, Definition] = {
    each.name: each.metadata[_DEFINITION] for each in fields(Instruments)
}
"""Definitions by the attribute that holds the instrument."""


class ModelMetrics:
    """The instruments of one model's requests, so that a request looks its model up once."""

    def __init__(self, all_models: Instruments, model: str, objectives: Objectives) -> None:
        self.model = model
        """The value of the label."""
        self.objectives = objectives
        self.time_to_first_token = all_models.time_to_first_token.labels(model)
        self.inter_token_latency = all_models.inter_token_latency.labels(model)
        self.e2e_request_latency = all_models.e2e_request_latency.labels(model)
        self.request_queue = all_models.request_queue.labels(model)
        self.request_prefill = all_models.request_prefill.labels(model)
        self.request_decode = all_models.request_decode.labels(model)
        self.request_time_per_output_token = all_models.request_time_per_output_token.labels(model)
        self.request_prompt_tokens = all_models.request_prompt_tokens.labels(model)
        self.request_max_generation_tokens = all_models.request_max_generation_tokens.labels(model)
        self.request_uncached_tokens = all_models.request_uncached_tokens.labels(model)
        self.request_generation_tokens = all_models.request_generation_tokens.labels(model)
        self.migration_gap = all_models.migration_gap.labels(model)
        self.poisoned_requests = all_models.poisoned_requests.labels(model)
        self._requests = all_models.requests
        self.num_requests_held = all_models.num_requests_held.labels(model)
        self._finished = all_models.finished
        self._cached = all_models.request_cached_tokens
        self._slo = all_models.slo
        self._migrations = all_models.migrations

    def ended(self, outcome: Outcome) -> None:
        """Counts a request that has ended."""
        self._requests.labels(self.model, outcome).inc()

    def finished(self, reason: str) -> None:
        """Counts one output that has ended."""
        self._finished.labels(self.model, reason).inc()

    def cached(self, source: str, tokens: int) -> None:
        """Counts prompt tokens that were not computed, by where their KV was."""
        self._cached.labels(self.model, source).inc(tokens)

    def judged(self, verdicts: Iterable[SloVerdict]) -> None:
        """Counts what `slo.judge` says of a request."""
        for verdict in verdicts:
            self._slo.labels(self.model, *verdict).inc()

    def migrated(self, reason: str, outcome: str) -> None:
        """Counts a request that another worker had to continue."""
        self._migrations.labels(self.model, reason, outcome).inc()


class Metrics(Instruments):
    """The instruments of one process, and the answer to a scrape of it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: MetricNames = "pdserve"
        """The names that a scrape gets which asks for none."""
        self._models: dict[str, ModelMetrics] = {}
        self._objectives = SloTable()
        self._engines: list[Callable[[], EngineSample]] = []
        self._nodes: list[Callable[[], NodeSample]] = []

    def set_objectives(self, objectives: SloTable) -> None:
        """Judges requests by these objectives. Before the first request: each is a bucket's bound,
        the same ones for all models, so that buckets can be summed over models."""
        self._objectives = objectives
        self._models.clear()
        first = _widened(LATENCY_BUCKETS, objectives.ttft)
        between = _widened(TOKEN_LATENCY_BUCKETS, objectives.itl)
        self.time_to_first_token.make_by(lambda: Histogram(first))
        for family in (self.inter_token_latency, self.request_time_per_output_token):
            family.make_by(lambda: Histogram(between))

    def of_model(self, name: str) -> ModelMetrics:
        """The instruments of a model that is served here, by its own name; empty: of requests that
        ended before their model was known. Beyond the first `MOST_MODELS` all models share one.

        The caller passes no names that clients invent: they would use up the bound.
        """
        found = self._models.get(name)
        return found if found is not None else self._add_model(name)

    def _add_model(self, name: str) -> ModelMetrics:
        asked = name
        made = len(self._models) - ("" in self._models) - (OTHER in self._models)
        if name and made >= MOST_MODELS:
            name = OTHER
        if name not in self._models:
            self._models[name] = ModelMetrics(self, name, self._objectives.of(asked))
        return self._models[name]

    def attach_engine(self, read: Callable[[], EngineSample]) -> None:
        """Export what `read` reports of one worker's engine; workers with the same labels are
        summed. Quick, no raise."""
        self._engines.append(read)

    def attach_node(self, read: Callable[[], NodeSample]) -> None:
        """Export what `read` reports of one node of this process. Quick, no raise."""
        self._nodes.append(read)

    @property
    def engine_memory(self) -> int:
        """Resident memory of this process's engine processes, in bytes."""
        return sum(one.memory for one in one_by_process(read() for read in self._engines))

    # ------------------------------------------------------------------ scraping

    def families(self) -> list[ScrapedFamily]:
        """Everything that a scrape of this process shows, its memory and CPU time included."""
        made = _process_families()
        made += [_family(one, getattr(self, name)) for name, one in _INSTRUMENTS.items()]
        read = [engine() for engine in self._engines]
        engines, processes = merge_by_labels(read), one_by_process(read)
        for definition, value in _ENGINE if engines else ():
            series = [ScrapedSeries((one.model, one.mode), value(one)) for one in engines]
            made.append(_empty(definition, series))
        made += _tier_families(engines)
        for definition, value in _ENGINE_PROCESS if processes else ():
            sums = sum_by_labels(processes, value)
            made.append(_empty(definition, [ScrapedSeries(*each) for each in sums.items()]))
        samples = merge_by_role(read() for read in self._nodes)
        for definition, attribute in _NODE:
            series = [
                each
                for sample in samples
                for each in _node_series(sample.role, getattr(sample, attribute))
            ]
            if series:
                made.append(_empty(definition, series))
        return made

    async def page(self, form: ScrapeForm = PLAIN) -> ScrapedPage:
        """The page for `/metrics`; `ScrapeHandler` of one process."""
        return page_of(self.families(), form)

    @staticmethod
    def definitions() -> tuple[Definition, ...]:
        """All metrics, for the documentation."""
        sampled = (*_ENGINE, *_TIERS, *_LANES, *_PLANS, *_MISSES, *_ENGINE_PROCESS, *_NODE)
        return (*_INSTRUMENTS.values(), *(each[0] for each in sampled))


def _widened(bounds: Sequence[float], objectives: Mapping[str, float]) -> list[float]:
    return sorted({*bounds, *objectives.values()})


@cache
def _process_collector() -> ProcessCollector:
    from prometheus_client import ProcessCollector

    return ProcessCollector(registry=None)


def _process_families() -> list[ScrapedFamily]:
    """The standard `process_*` metrics: memory, CPU time, open files."""
    return [
        ScrapedFamily(
            sample.name,
            "counter" if family.type == "counter" else "gauge",
            family.documentation,
            series=[ScrapedSeries((), sample.value)],
            combine="min" if sample.name == _OLDEST else "sum",
        )
        for family in _process_collector().collect()
        for sample in family.samples
    ]


def _family(definition: Definition, instrument: Instrument) -> ScrapedFamily:
    """One metric with all its label values."""
    members: Iterable[tuple[tuple[str, ...], Counter | Gauge | Histogram]]
    members = instrument if isinstance(instrument, Family) else [((), instrument)]
    made = _empty(definition, [])
    for values, member in members:
        if isinstance(member, Histogram):
            made.bounds = list(member.bounds)
            made.series.append(ScrapedSeries(values, member.sum, list(member.counts)))
        else:
            made.series.append(ScrapedSeries(values, member.value))
    return made


def _node_series(role: str, value: float | Mapping[str, float] | None) -> Iterator[ScrapedSeries]:
    """One node's value, or its values by label; None has none."""
    if isinstance(value, int | float):
        yield ScrapedSeries((role,), value)
    elif value is not None:
        for label, one in value.items():
            yield ScrapedSeries((role, label), one)


def _tier_families(engines: Sequence[EngineSample]) -> Iterator[ScrapedFamily]:
    """Metrics of tiers, lanes and fetches of those engines that have them."""
    yield from _named_families(_TIERS, engines, lambda one: one.tiers)
    yield from _named_families(_LANES, engines, lambda one: one.lanes)
    yield from _named_families(_PLANS, engines, lambda one: one.plans)
    yield from _named_families(_MISSES, engines, lambda one: one.misses)


def _named_families(
    metrics: Iterable[tuple[Definition, Callable[[S], float]]],
    engines: Iterable[EngineSample],
    samples: Callable[[EngineSample], Mapping[str, S]],
) -> Iterator[ScrapedFamily]:
    found = [
        ((one.model, one.mode, name), sample)
        for one in engines
        for name, sample in samples(one).items()
    ]
    for definition, read in metrics if found else ():
        yield _empty(definition, [ScrapedSeries(labels, read(each)) for labels, each in found])


def _empty(definition: Definition, series: list[ScrapedSeries]) -> ScrapedFamily:
    return ScrapedFamily(
        *(definition.name, definition.kind, definition.help, definition.labels, series),
        combine=definition.combine,
    )
