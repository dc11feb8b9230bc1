"""The board *Routers and nodes*: choices of workers, requests that wait, and the cluster itself."""

from __future__ import annotations

from typing import Final

from pdserve.dashboards.table import Board, Panel, Query, Row

__all__ = ["ROUTERS"]

_NODE: Final = "{{instance}} {{role}}"

_CHOICES: Final = Row(
    "Choices",
    (
        Panel(
            "Decisions by policy",
            "Requests per second for which a router chose a worker, by the policy or its fallback.",
            "reqps",
            (
                Query(
                    "sum by (policy) (rate(pdserve_router_decisions_total{CLUSTER}[RATE]))",
                    "{{policy}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Observed over predicted",
            "Time to first token, observed over predicted: quantiles of a router's last requests. "
            "1 is exact.",
            "none",
            (
                Query(
                    "max by (instance, quantile) (pdserve_router_prediction_ratio{CLUSTER})",
                    "{{instance}} {{quantile}}",
                ),
            ),
        ),
        Panel(
            "Cached tokens, expected and found",
            "Share of prompt tokens that the router expected to be cached, and that the worker "
            "found. A gap is an index that is behind, or blocks that were evicted.",
            "percentunit",
            tuple(
                Query(
                    "sum(rate(pdserve_router_prompt_tokens_total"
                    f'{{CLUSTER, tokens="{tokens}"}}[RATE]))'
                    ' / sum(rate(pdserve_router_prompt_tokens_total{CLUSTER, tokens="all"}[RATE]))',
                    legend,
                )
                for tokens, legend in (("expected", "expected"), ("cached", "found"))
            ),
            most=1,
        ),
        Panel(
            "First token, predicted and observed",
            "Seconds from decision to first token, summed over the requests of a second.",
            "none",
            (
                Query(
                    "sum by (time) (rate(pdserve_router_first_token_seconds_total{CLUSTER}[RATE]))",
                    "{{time}}",
                ),
            ),
        ),
        Panel(
            "Refused, and routed again",
            "Requests per second that routers refused, that workers refused, and that went to "
            "another router because one failed.",
            "reqps",
            (
                Query("sum(rate(pdserve_router_refused_total{CLUSTER}[RATE]))", "refused"),
                Query("sum(rate(pdserve_rerouted_requests_total{CLUSTER}[RATE]))", "routed again"),
                Query(
                    "sum by (reason) (rate(pdserve_router_failures_total{CLUSTER}[RATE]))",
                    "router {{reason}}",
                    rare=True,
                ),
            ),
        ),
        Panel(
            "Bookings",
            "Open bookings, by router.",
            "short",
            (Query("pdserve_router_bookings{CLUSTER}", _NODE),),
        ),
        Panel(
            "Bookings that ended",
            "Per second, by reason.",
            "ops",
            (
                Query(
                    "sum by (reason) (rate(pdserve_router_bookings_ended_total{CLUSTER}[RATE]))",
                    "{{reason}}",
                ),
            ),
        ),
    ),
)

_HELD: Final = Row(
    "Requests that wait in a router",
    (
        Panel(
            "Held",
            "Requests that wait for a worker, by router.",
            "short",
            (Query("pdserve_router_held{CLUSTER}", "{{instance}}"),),
        ),
        Panel(
            "Share of requests that wait",
            "Of all that a router placed.",
            "percentunit",
            (
                Query(
                    "sum(rate(pdserve_router_held_total{CLUSTER}[RATE]))"
                    " / sum(rate(pdserve_router_routed_total{CLUSTER}[RATE]))",
                    "held",
                ),
            ),
        ),
        Panel(
            "Time in the queue",
            "Seconds of waiting per second, which is the mean number of requests that wait; and "
            "requests whose wait ended without a worker.",
            "none",
            (
                Query("sum(rate(pdserve_router_held_seconds_total{CLUSTER}[RATE]))", "waiting"),
                Query(
                    "sum by (reason) (rate(pdserve_router_held_ended_total{CLUSTER}[RATE]))",
                    "{{reason}}",
                ),
            ),
        ),
    ),
)

_INDEX: Final = Row(
    "Prefix index",
    (
        Panel(
            "Blocks",
            "distinct: different blocks. workers: summed over workers. refused: the index is full.",
            "short",
            (
                Query(
                    "sum by (instance, kind) (pdserve_router_index_blocks{CLUSTER})",
                    "{{instance}} {{kind}}",
                ),
            ),
        ),
        Panel(
            "Memory",
            "Of the prefix index, by router.",
            "bytes",
            (Query("pdserve_router_index_bytes{CLUSTER}", "{{instance}}"),),
        ),
        Panel(
            "Guesses",
            "Workers whose cached blocks are estimated, and routers whose bookings arrive late.",
            "short",
            (
                Query("max(pdserve_router_approximate_workers{CLUSTER})", "estimated workers"),
                Query("max(pdserve_router_silent_routers{CLUSTER})", "silent routers"),
            ),
        ),
    ),
)

_NODES: Final = Row(
    "Nodes",
    (
        Panel(
            "Members that each node sees",
            "Other members of the cluster. All nodes should see the same number.",
            "short",
            (Query("sum by (instance, role) (pdserve_node_members{CLUSTER})", _NODE),),
        ),
        Panel(
            "Suspected and unreachable",
            "Members that may be dead, and members to which the link is lost, by the node that "
            "says so.",
            "short",
            (
                Query("pdserve_node_suspects{CLUSTER}", f"{_NODE}: suspected"),
                Query("pdserve_node_unreachable{CLUSTER}", f"{_NODE}: unreachable"),
            ),
        ),
        Panel(
            "Links and lives",
            "Links to other nodes, and epochs that a node began: above 1 it was declared dead and "
            "rejoined.",
            "short",
            (
                Query("pdserve_node_links{CLUSTER}", f"{_NODE} links"),
                Query("pdserve_node_lives_total{CLUSTER}", f"{_NODE} lives"),
            ),
        ),
        Panel(
            "Topics",
            "Events of the logs that nodes read, per second: gaps, replays and snapshots mend "
            "themselves; a divergence is a defect.",
            "ops",
            (
                Query(
                    "sum by (event) (rate(pdserve_node_topic_events_total{CLUSTER}[RATE]))",
                    "{{event}}",
                ),
            ),
        ),
        Panel(
            "Refused by nodes",
            "Connections of other nodes that were refused, by reason, and requests of peers beyond "
            "a limit, per second.",
            "ops",
            (
                Query(
                    "sum by (error) (rate(pdserve_node_handshakes_refused_total{CLUSTER}[RATE]))",
                    "handshake: {{error}}",
                    rare=True,
                ),
                Query(
                    "sum(rate(pdserve_node_requests_refused_total{CLUSTER}[RATE]))",
                    "too many requests",
                ),
            ),
        ),
        Panel(
            "Event loop lag, p99",
            "How late an event loop ran a timer, by process.",
            "s",
            (
                Query(
                    "histogram_quantile(0.99, sum by (instance, le) "
                    "(rate(pdserve_event_loop_lag_seconds_bucket{CLUSTER}[RATE])))",
                    "{{instance}}",
                ),
            ),
            red=0.1,
        ),
        Panel(
            "Versions",
            "Processes by version and role.",
            "short",
            (
                Query(
                    "count by (version, role) (pdserve_build_info{CLUSTER})", "{{version}} {{role}}"
                ),
            ),
        ),
        Panel(
            "Degraded",
            "What runs degraded. docs/operations.md says what each reason means.",
            "short",
            (Query("sum by (reason) (pdserve_degraded{CLUSTER})", "{{reason}}"),),
        ),
    ),
)

_TRACES: Final = Row(
    "Traces",
    (
        Panel(
            "Traces kept",
            "Per second, by reason; one trace may have several. docs/tracing.md has the rules.",
            "ops",
            (
                Query(
                    "sum by (reason) (rate(pdserve_traces_kept_total{CLUSTER}[RATE]))",
                    "{{reason}}",
                ),
            ),
        ),
        Panel(
            "Traces not kept",
            "Traces per second that a limit left out: rate is --trace-rate, parent the limit for "
            "callers who ask.",
            "ops",
            (
                Query(
                    "sum by (limit) (rate(pdserve_traces_limited_total{CLUSTER}[RATE]))",
                    "{{limit}}",
                    rare=True,
                ),
            ),
        ),
        Panel(
            "Spans",
            "Spans per second that a collector took, and that were dropped, by reason; and spans "
            "that wait for their export.",
            "ops",
            (
                Query(
                    "sum(rate(pdserve_trace_spans_exported_total{CLUSTER}[RATE]))",
                    "exported",
                ),
                Query(
                    "sum by (reason) (rate(pdserve_trace_spans_dropped_total{CLUSTER}[RATE]))",
                    "dropped: {{reason}}",
                ),
                Query("sum(pdserve_trace_spans_waiting{CLUSTER})", "waiting"),
            ),
        ),
    ),
)

ROUTERS: Final = Board(
    "pdserve-routers",
    "pdserve: Routers and nodes",
    "Choices of workers, requests that wait, the prefix index, the cluster's nodes, traces.",
    (_CHOICES, _HELD, _INDEX, _NODES, _TRACES),
)
