"""The board *Prefill and decode*: where prompts are computed, and how their KV travels."""

from __future__ import annotations

from typing import Final

from pdserve.dashboards.table import Board, Panel, Query, Row

__all__ = ["DISAGGREGATION"]

_PHASE: Final = "sum by (phase, le) (rate(pdserve_handoff_seconds_bucket{CLUSTER}[RATE]))"

_DECISIONS: Final = Row(
    "Decisions",
    (
        Panel(
            "Where prompts are computed",
            "Prompts per second: local is the decode worker itself, remote a prefill worker.",
            "ops",
            (
                Query(
                    "sum by (where, reason) (rate(pdserve_prefill_decisions_total{CLUSTER}[RATE]))",
                    "{{where}}: {{reason}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Share computed remotely",
            "Of all decisions of decode workers.",
            "percentunit",
            (
                Query(
                    'sum(rate(pdserve_prefill_decisions_total{CLUSTER, where="remote"}[RATE]))'
                    " / sum(rate(pdserve_prefill_decisions_total{CLUSTER}[RATE]))",
                    "remote",
                ),
            ),
            most=1,
        ),
        Panel(
            "Workers by mode",
            "Engines that are ready.",
            "short",
            (Query("sum by (mode) (pdserve_engine_ready{MODEL})", "{{mode}}"),),
        ),
    ),
)

_QUEUE: Final = Row(
    "Prefill queue",
    (
        Panel(
            "Prompts",
            "waiting: not taken yet. claimed: a prefill worker computes them.",
            "short",
            (
                Query("sum by (model) (pdserve_prefill_queue_items{MODEL})", "{{model}} waiting"),
                Query("sum by (model) (pdserve_prefill_queue_claims{MODEL})", "{{model}} claimed"),
            ),
        ),
        Panel(
            "Tokens that wait",
            "Without those that the best prefill worker for each prompt has cached.",
            "short",
            (Query("sum by (model) (pdserve_prefill_queue_tokens{MODEL})", "{{model}}"),),
        ),
        Panel(
            "Time to work off the queue",
            "Tokens that wait, over tokens that prefill workers compute per second.",
            "s",
            (
                Query(
                    "sum by (model) (pdserve_prefill_queue_tokens{MODEL}) / sum by (model) "
                    '(rate(pdserve_computed_tokens_total{MODEL, mode="prefill"}[RATE]))',
                    "{{model}}",
                ),
            ),
        ),
        Panel(
            "Credits",
            "Prompts that prefill workers can take now, and the workers connected to the queue.",
            "short",
            (
                Query("sum by (model) (pdserve_prefill_queue_credits{MODEL})", "{{model}} credits"),
                Query("sum by (model) (pdserve_prefill_queue_workers{MODEL})", "{{model}} workers"),
            ),
        ),
        Panel(
            "Events",
            "What happened to prompts in the queues, per second.",
            "ops",
            (
                Query(
                    "sum by (event) (rate(pdserve_prefill_queue_events_total{CLUSTER}[RATE]))",
                    "{{event}}",
                ),
            ),
        ),
        Panel(
            "On their way",
            "Prompts between two workers, by state, at both ends.",
            "short",
            (Query("sum by (state) (pdserve_handoffs{CLUSTER})", "{{state}}"),),
            stacked=True,
        ),
    ),
)

_HANDOFF: Final = Row(
    "Handoff",
    (
        Panel(
            "Phases, p50",
            "admit: until there is room. queue: until a prefill worker asks. open: until its "
            "blocks are bound. fill: until it hands over. activate: until the first token.",
            "s",
            (Query(f"histogram_quantile(0.5, {_PHASE})", "{{phase}}"),),
        ),
        Panel(
            "Phases, p99",
            "The same, for the slowest of a hundred.",
            "s",
            (Query(f"histogram_quantile(0.99, {_PHASE})", "{{phase}}"),),
        ),
        Panel(
            "Attempts by outcome",
            "At decode workers, per second. All but done and unwanted failed; the prompt is then "
            "tried elsewhere or computed locally.",
            "ops",
            (
                Query(
                    "sum by (outcome) (rate(pdserve_handoff_attempts_total{CLUSTER}[RATE]))",
                    "{{outcome}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Claims by outcome",
            "At prefill workers, and of sequences that moved, per second.",
            "ops",
            (
                Query(
                    "sum by (outcome) (rate(pdserve_handoff_claims_total{CLUSTER}[RATE]))",
                    "{{outcome}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Prefill workers: running and waiting",
            "Prompts in their engines.",
            "short",
            (
                Query('sum(pdserve_num_requests_running{MODEL, mode="prefill"})', "running"),
                Query('sum(pdserve_num_requests_waiting{MODEL, mode="prefill"})', "waiting"),
            ),
        ),
        Panel(
            "KV usage by mode, highest worker",
            "Share of blocks held by sequences.",
            "percentunit",
            (Query("max by (mode) (pdserve_kv_cache_usage_ratio{MODEL})", "{{mode}}"),),
            most=1,
            red=0.95,
        ),
    ),
)

_TRANSFER: Final = Row(
    "KV transfer",
    (
        Panel(
            "Bytes",
            "KV per second, by direction and what carried it.",
            "Bps",
            (
                Query(
                    "sum by (backend, direction) "
                    "(rate(pdserve_transfer_bytes_total{CLUSTER}[RATE]))",
                    "{{backend}} {{direction}}",
                ),
            ),
        ),
        Panel(
            "Speed while sending",
            "Bytes over the time during which KV was being sent.",
            "Bps",
            (
                Query(
                    "sum by (backend) "
                    '(rate(pdserve_transfer_bytes_total{CLUSTER, direction="sent"}[RATE]))'
                    " / sum by (backend) (rate(pdserve_transfer_seconds_total{CLUSTER}[RATE]))",
                    "{{backend}}",
                ),
            ),
        ),
        Panel(
            "Degraded and broken paths",
            "degraded: a slower back end is in use, or none reaches the peer. broken: paths that "
            "could not be set up or ended, per second.",
            "short",
            (
                Query(
                    "sum by (instance) (pdserve_transfer_paths_degraded{CLUSTER})", "{{instance}}"
                ),
                Query(
                    "sum by (backend) (rate(pdserve_transfer_failures_total{CLUSTER}[RATE]))",
                    "{{backend}} broken",
                ),
            ),
        ),
    ),
)

DISAGGREGATION: Final = Board(
    "pdserve-disaggregation",
    "pdserve: Prefill and decode",
    "Where prompts are computed, the prefill queue, and how KV travels.",
    (_DECISIONS, _QUEUE, _HANDOFF, _TRANSFER),
)
