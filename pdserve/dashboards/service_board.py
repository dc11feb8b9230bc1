"""The board *Service*: what clients get, by model. For the person who is on call."""

from __future__ import annotations

from typing import Final

from pdserve.dashboards.table import Board, Panel, Query, Row

__all__ = ["SERVICE"]


def _quantiles(metric: str, *quantiles: float) -> tuple[Query, ...]:
    return tuple(
        Query(
            f"histogram_quantile({one}, sum by (le) (rate({metric}_bucket{{MODEL}}[RATE])))",
            f"p{one * 100:g}",
        )
        for one in quantiles
    )


def _by_model(metric: str, quantile: float) -> tuple[Query, ...]:
    by = f"sum by (model, le) (rate({metric}_bucket{{MODEL}}[RATE]))"
    return (Query(f"histogram_quantile({quantile}, {by})", "{{model}}"),)


_JUDGED: Final = 'pdserve_slo_total{MODEL, objective="both", result=~"good|bad"}'
_BAD: Final = 'pdserve_slo_total{MODEL, objective="both", result="bad"}'

_OBJECTIVES: Final = Row(
    "Service level objectives",
    (
        Panel(
            "Good requests",
            "Share of judged requests that kept every objective (--slo-ttft, --slo-itl), over the "
            "time shown. Errors of the service count as bad; requests that the client cancelled, "
            "or that were invalid, are not judged.",
            "percentunit",
            (
                Query(
                    f"1 - (sum(increase({_BAD}[$__range])) or vector(0))"
                    f" / sum(increase({_JUDGED}[$__range]))",
                    "good",
                ),
            ),
            kind="stat",
            width=4,
            most=1,
        ),
        Panel(
            "Bad requests by cause",
            "Share of judged requests that missed an objective, by the phase that took most of the "
            "time: held (in the router), queue (in the engine), prefill, handoff, decode, moved "
            "(to another worker), or error.",
            "percentunit",
            (
                Query(
                    f"sum by (cause) (rate({_BAD}[RATE]))"
                    f" / ignoring (cause) group_left () sum(rate({_JUDGED}[RATE]))",
                    "{{cause}}",
                ),
            ),
            stacked=True,
            width=10,
            most=1,
        ),
        Panel(
            "Burn rate",
            "How many times faster than allowed the error budget is used, per model and window; 1 "
            "uses it up exactly. From the recording rules of rules.yml.",
            "none",
            (
                *(
                    Query(
                        f"pdserve:bad_ratio:{window}{{MODEL}} / scalar(pdserve:error_budget)",
                        f"{{{{model}}}} {window}",
                    )
                    for window in ("5m", "1h", "6h")
                ),
            ),
            width=10,
        ),
    ),
)

_TRAFFIC: Final = Row(
    "Traffic",
    (
        Panel(
            "Requests by outcome",
            "Requests that ended, per second. overloaded, unavailable, deadline and error are "
            "ours; invalid and cancelled are the client's.",
            "reqps",
            (
                Query(
                    "sum by (outcome) (rate(pdserve_requests_total{MODEL}[RATE]))",
                    "{{outcome}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Requests by model",
            "Requests that ended, per second.",
            "reqps",
            (Query("sum by (model) (rate(pdserve_requests_total{MODEL}[RATE]))", "{{model}}"),),
            stacked=True,
        ),
        Panel(
            "Finish reasons",
            "Answers by why they ended, per second: many of length are cut off at max_tokens.",
            "ops",
            (Query("sum by (reason) (rate(pdserve_finished_total{MODEL}[RATE]))", "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Tokens",
            "Tokens per second: prompts as admitted by engines, cached ones included, and output. "
            "Prefill workers are left out, since the decode worker counts the same prompt.",
            "ops",
            (
                Query(
                    'sum(rate(pdserve_prompt_tokens_total{MODEL, mode!="prefill"}[RATE]))', "prompt"
                ),
                Query("sum(rate(pdserve_generation_tokens_total{MODEL}[RATE]))", "output"),
            ),
        ),
        Panel(
            "In flight",
            "Requests being answered, and of these the prompts that have no worker yet.",
            "short",
            (
                Query("sum(pdserve_http_requests_in_flight{CLUSTER})", "answered"),
                Query("sum(pdserve_num_requests_held{MODEL})", "held"),
            ),
        ),
        Panel(
            "Workers ready",
            "Engines that can take sequences, by model and mode.",
            "short",
            (Query("sum by (model, mode) (pdserve_engine_ready{MODEL})", "{{model}} {{mode}}"),),
        ),
    ),
)

_LATENCY: Final = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From a request's arrival to its first token; tokenising, waiting and the transfer of "
            "KV included.",
            "s",
            _quantiles("pdserve_time_to_first_token_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Time between tokens",
            "Between two tokens of one choice.",
            "s",
            _quantiles("pdserve_inter_token_latency_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Whole request",
            "From a request's arrival to its last token. Long answers take long: compare with the "
            "lengths below.",
            "s",
            _quantiles("pdserve_e2e_request_latency_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Time to first token, p95 by model",
            "From a request's arrival to its first token.",
            "s",
            _by_model("pdserve_time_to_first_token_seconds", 0.95),
        ),
        Panel(
            "Time between tokens, p95 by model",
            "Between two tokens of one choice.",
            "s",
            _by_model("pdserve_inter_token_latency_seconds", 0.95),
        ),
        Panel(
            "Phases, p95",
            "Queue: from submission to the first step. Prefill: from there to the first token. "
            "Decode: from there to the last token.",
            "s",
            tuple(
                Query(
                    "histogram_quantile(0.95, sum by (le) "
                    f"(rate(pdserve_request_{phase}_seconds_bucket{{MODEL}}[RATE])))",
                    phase,
                )
                for phase in ("queue", "prefill", "decode")
            ),
        ),
    ),
)

_LENGTHS: Final = Row(
    "Lengths",
    (
        Panel(
            "Prompt tokens",
            "Per finished request.",
            "short",
            _quantiles("pdserve_request_prompt_tokens", 0.5, 0.95),
        ),
        Panel(
            "Prompt tokens that were not cached",
            "Per finished request: what had to be computed.",
            "short",
            _quantiles("pdserve_request_uncached_tokens", 0.5, 0.95),
        ),
        Panel(
            "Output tokens",
            "Per finished request.",
            "short",
            _quantiles("pdserve_request_generation_tokens", 0.5, 0.95),
        ),
    ),
)

_TROUBLE: Final = Row(
    "Refusals and moves",
    (
        Panel(
            "HTTP errors",
            "Responses with a status of 400 or more, per second.",
            "reqps",
            (
                Query(
                    "sum by (status) (rate(pdserve_http_responses_total"
                    '{CLUSTER, status=~"4..|5.."}[RATE]))',
                    "{{status}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Requests that another worker continued",
            "By reason and outcome, per second. completed is what the client does not notice.",
            "ops",
            (
                Query(
                    "sum by (reason, outcome) (rate(pdserve_migrations_total{MODEL}[RATE]))",
                    "{{reason}}: {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Pause of a moved stream",
            "From the end of the stream at one worker to the next token from another.",
            "s",
            _quantiles("pdserve_migration_gap_seconds", 0.5, 0.99),
        ),
        Panel(
            "Connections closed, keys refused",
            "Clients that exceeded a limit of connections, and requests refused for their API key, "
            "per second.",
            "ops",
            (
                Query(
                    "sum by (reason) (rate(pdserve_connections_cut_total{CLUSTER}[RATE]))",
                    "closed: {{reason}}",
                    rare=True,
                ),
                Query(
                    "sum by (reason) (rate(pdserve_api_keys_refused_total{CLUSTER}[RATE]))",
                    "key: {{reason}}",
                    rare=True,
                ),
            ),
        ),
        Panel(
            "Poisoned requests, slow text",
            "Requests that are not tried again because workers died of them, and jobs on a "
            "request's text that exceeded their time limit.",
            "short",
            (
                Query("sum(increase(pdserve_poisoned_requests_total{MODEL}[RATE]))", "poisoned"),
                Query(
                    "sum(increase(pdserve_text_jobs_given_up_total{CLUSTER}[RATE]))",
                    "text given up",
                ),
            ),
        ),
        Panel(
            "Fields that were ignored",
            "Fields of requests that pdserve does not know, per second.",
            "ops",
            (
                Query(
                    "sum by (field) (rate(pdserve_unknown_fields_total{CLUSTER}[RATE]))",
                    "{{field}}",
                    rare=True,
                ),
            ),
        ),
    ),
)

SERVICE: Final = Board(
    "pdserve-service",
    "pdserve: Service",
    "What clients get: objectives, traffic, latency, refusals.",
    (_OBJECTIVES, _TRAFFIC, _LATENCY, _LENGTHS, _TROUBLE),
)
