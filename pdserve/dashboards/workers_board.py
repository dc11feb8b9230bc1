"""The board *Workers*: engines, their KV cache, their steps and their health."""

from __future__ import annotations

from typing import Final

from pdserve.dashboards.table import Board, Panel, Query, Row

__all__ = ["WORKERS"]

_NAMED: Final = "{{instance}} {{mode}}"

_LOAD: Final = Row(
    "Load",
    (
        Panel(
            "Running",
            "Sequences that hold blocks and take part in steps, by worker.",
            "short",
            (Query("pdserve_num_requests_running{WORKER}", _NAMED),),
        ),
        Panel(
            "Waiting",
            "Submissions in an engine's queue that do not run yet. Requests that wait in a router "
            "are on the board of routers.",
            "short",
            (Query("pdserve_num_requests_waiting{WORKER}", _NAMED),),
        ),
        Panel(
            "Tokens",
            "Output tokens per second, by worker.",
            "ops",
            (Query("rate(pdserve_generation_tokens_total{WORKER}[RATE])", _NAMED),),
        ),
    ),
)

_KV: Final = Row(
    "KV cache",
    (
        Panel(
            "Blocks",
            "used: held by sequences. cached: kept as a prefix, and free when needed. quarantined: "
            "a peer might still write to them.",
            "short",
            (
                Query("sum(pdserve_kv_blocks_used{WORKER})", "used"),
                Query("sum(pdserve_kv_blocks_cached{WORKER})", "cached"),
                Query("sum(pdserve_kv_blocks_quarantined{WORKER})", "quarantined"),
                Query(
                    "sum(pdserve_kv_blocks{WORKER} - pdserve_kv_blocks_used{WORKER}"
                    " - pdserve_kv_blocks_cached{WORKER} - pdserve_kv_blocks_quarantined{WORKER})",
                    "free",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Usage",
            "Share of blocks held by sequences. Near 1, sequences preempt each other.",
            "percentunit",
            (Query("pdserve_kv_cache_usage_ratio{WORKER}", _NAMED),),
            most=1,
            red=0.95,
        ),
        Panel(
            "Prefix cache hits",
            "Share of prompt tokens that were in the cache.",
            "percentunit",
            (
                Query(
                    "sum by (instance, mode) "
                    "(rate(pdserve_cached_prompt_tokens_total{WORKER}[RATE])) / sum by (instance, "
                    "mode) (rate(pdserve_prompt_tokens_total{WORKER}[RATE]))",
                    _NAMED,
                ),
            ),
            most=1,
        ),
    ),
)

_TIERS: Final = Row(
    "KV tiers",
    (
        Panel(
            "Cached tokens by source",
            "Prompt tokens that were not computed: on the device already, or fetched from host "
            "memory, from disk, or from another worker (remote).",
            "ops",
            (
                Query(
                    "sum by (tier) (rate(pdserve_kv_tier_hit_tokens_total{WORKER}[RATE]))",
                    "{{tier}}",
                ),
                Query(
                    "sum(rate(pdserve_cached_prompt_tokens_total{WORKER}[RATE])) - "
                    "(sum(rate(pdserve_kv_tier_hit_tokens_total{WORKER}[RATE])) or vector(0))",
                    "device",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Retention",
            "How long a block stayed in a tier before it was evicted. A conversation that pauses "
            "longer is computed again.",
            "s",
            (Query("pdserve_kv_tier_retention_seconds{WORKER}", f"{_NAMED} {{{{tier}}}}"),),
        ),
        Panel(
            "Used",
            "Share of a tier that holds blocks which can be reused.",
            "percentunit",
            (
                Query(
                    "pdserve_kv_tier_valid_bytes{WORKER} / pdserve_kv_tier_capacity_bytes{WORKER}",
                    f"{_NAMED} {{{{tier}}}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "Blocks that leave, and that never came",
            "evicted: for lack of room. refused: not taken in, since room or writes are scarce. "
            "unsaved: evicted above before they could be copied.",
            "ops",
            (
                Query(
                    "sum by (tier) (rate(pdserve_kv_tier_evicted_blocks_total{WORKER}[RATE]))",
                    "{{tier}} evicted",
                ),
                Query(
                    "sum by (tier) (rate(pdserve_kv_tier_refused_blocks_total{WORKER}[RATE]))",
                    "{{tier}} refused",
                ),
                Query(
                    "sum by (tier) (rate(pdserve_kv_tier_unsaved_blocks_total{WORKER}[RATE]))",
                    "{{tier}} unsaved",
                ),
            ),
        ),
        Panel(
            "Bytes",
            "Read from and written to the tiers, per second.",
            "Bps",
            (
                Query(
                    "sum by (tier) (rate(pdserve_kv_tier_read_bytes_total{WORKER}[RATE]))",
                    "{{tier}} read",
                ),
                Query(
                    "sum by (tier) (rate(pdserve_kv_tier_written_bytes_total{WORKER}[RATE]))",
                    "{{tier}} written",
                ),
            ),
        ),
        Panel(
            "Between workers",
            "KV fetched from other workers' pools, and given to others, per second.",
            "Bps",
            (
                Query("sum(rate(pdserve_kv_pulled_bytes_total{WORKER}[RATE]))", "fetched"),
                Query("sum(rate(pdserve_kv_served_bytes_total{WORKER}[RATE]))", "given"),
            ),
        ),
        Panel(
            "Fetches",
            "Fetches from other workers: begun, and by how they ended. What did not come is "
            "computed.",
            "ops",
            (
                Query("sum(rate(pdserve_kv_pulls_total{WORKER}[RATE]))", "begun"),
                Query(
                    "sum by (outcome) (rate(pdserve_kv_pulls_ended_total{PROCESS}[RATE]))",
                    "{{outcome}}",
                    rare=True,
                ),
                Query(
                    "sum by (reason) (rate(pdserve_kv_pulls_refused_total{PROCESS}[RATE]))",
                    "refused to others: {{reason}}",
                    rare=True,
                ),
            ),
        ),
        Panel(
            "Gain of fetches",
            "Seconds per second by which fetched prefixes came sooner than they would have been "
            "computed, by source, less those by which others came later.",
            "s",
            (
                Query(
                    "sum by (source) (rate(pdserve_kv_plan_gained_seconds_total{WORKER}[RATE]))"
                    " - sum by (source) (rate(pdserve_kv_plan_lost_seconds_total{WORKER}[RATE]))",
                    "{{source}}",
                ),
            ),
        ),
        Panel(
            "Time of fetches",
            "Seconds per second that fetches of prefixes took, and that were predicted. Where they "
            "differ for long, prefixes are fetched that are computed sooner, or the reverse.",
            "s",
            (
                Query(
                    "sum by (source) (rate(pdserve_kv_plan_actual_seconds_total{WORKER}[RATE]))",
                    "{{source}}",
                ),
                Query(
                    "sum by (source) (rate(pdserve_kv_plan_predicted_seconds_total{WORKER}[RATE]))",
                    "{{source}} predicted",
                ),
            ),
        ),
        Panel(
            "Known blocks that did not come",
            "Blocks that a tier or another worker had and that were computed, per second, by "
            "reason. computed: that was predicted to be sooner.",
            "ops",
            (
                Query(
                    "sum by (reason) (rate(pdserve_kv_missed_blocks_total{WORKER}[RATE]))",
                    "{{reason}}",
                ),
            ),
        ),
        Panel(
            "Wait for a lane",
            "How long a new copy waits for what is under way on its path.",
            "s",
            (
                Query(
                    "pdserve_kv_lane_backlog_bytes{WORKER}"
                    " / (pdserve_kv_lane_bandwidth_bytes_per_second{WORKER} > 0)",
                    f"{_NAMED} {{{{lane}}}}",
                    rare=True,
                ),
            ),
        ),
        Panel(
            "Failed reads and trouble",
            "Blocks per second that could not be read or did not match their checksum, and tiers "
            "that work in part or not at all.",
            "short",
            (
                Query(
                    "sum by (tier) (rate(pdserve_kv_tier_read_failures_total{WORKER}[RATE]))",
                    "{{tier}} failed",
                ),
                Query(
                    "pdserve_kv_tier_trouble{WORKER}",
                    f"{_NAMED} {{{{tier}}}} in trouble",
                ),
            ),
        ),
    ),
)

_STEPS: Final = Row(
    "Steps",
    (
        Panel(
            "Time per step",
            "Mean time of a step. Engines count steps and their time only, so there is no "
            "quantile; the time between tokens on the board Service has quantiles.",
            "s",
            (
                Query(
                    "rate(pdserve_engine_step_seconds_total{WORKER}[RATE])"
                    " / rate(pdserve_engine_steps_total{WORKER}[RATE])",
                    _NAMED,
                ),
            ),
        ),
        Panel(
            "Time inside steps",
            "Share of time that an engine computes. Steps that overlap count once each.",
            "percentunit",
            (Query("rate(pdserve_engine_step_seconds_total{WORKER}[RATE])", _NAMED),),
        ),
        Panel(
            "Tokens computed, and of use",
            "computed: all that went through the model, on all workers of the model. of use: "
            "prompt tokens that were not cached, and output, counted when a request ends. What is "
            "computed and of no use was computed again, after a preemption or a move.",
            "ops",
            (
                Query("sum(rate(pdserve_computed_tokens_total{MODEL}[RATE]))", "computed"),
                Query(
                    "sum(rate(pdserve_request_uncached_tokens_sum{MODEL}[RATE]))"
                    " + sum(rate(pdserve_generation_tokens_total{MODEL}[RATE]))",
                    "of use",
                ),
            ),
        ),
        Panel(
            "Preemptions",
            "Sequences per second that gave up their blocks to others.",
            "ops",
            (Query("rate(pdserve_preemptions_total{WORKER}[RATE])", _NAMED),),
        ),
        Panel(
            "Images",
            "Images read per second, and of these the ones that took another number of tokens than "
            "expected.",
            "ops",
            (
                Query("sum(rate(pdserve_images_total{WORKER}[RATE]))", "read"),
                Query("sum(rate(pdserve_images_unexpected_total{WORKER}[RATE]))", "unexpected"),
            ),
        ),
        Panel(
            "Cancellations, p99",
            "From a request's cancellation until its blocks are free, by what it was doing.",
            "s",
            (
                Query(
                    "histogram_quantile(0.99, sum by (stage, le) "
                    "(rate(pdserve_cancel_seconds_bucket{PROCESS}[RATE])))",
                    "{{stage}}",
                ),
            ),
        ),
    ),
)

_HEALTH: Final = Row(
    "Health",
    (
        Panel(
            "Ready",
            "1 while an engine can take sequences, 0 while it loads or restarts.",
            "short",
            (Query("pdserve_engine_ready{WORKER}", _NAMED),),
            most=1,
        ),
        Panel(
            "Restarts and stalls",
            "Engines that died and were started again, and of these the ones that stalled.",
            "short",
            (
                Query(
                    "increase(pdserve_engine_restarts_total{WORKER}[RATE])", f"{_NAMED} restarts"
                ),
                Query("increase(pdserve_engine_stalls_total{WORKER}[RATE])", f"{_NAMED} stalls"),
            ),
        ),
        Panel(
            "Without progress",
            "How long an engine has work and makes no progress. At --stall-timeout it is "
            "restarted.",
            "s",
            (Query("pdserve_engine_stalled_seconds{WORKER}", _NAMED),),
            red=5,
        ),
        Panel(
            "KV that could not be loaded, continuations that differ",
            "Prompts whose KV arrived and was computed again, and requests that continued with "
            "other noise or penalties than before, per second.",
            "ops",
            (
                Query("sum(rate(pdserve_kv_load_failures_total{WORKER}[RATE]))", "KV not loaded"),
                Query("sum(rate(pdserve_inexact_continuations_total{WORKER}[RATE]))", "inexact"),
            ),
        ),
        Panel(
            "Memory",
            "Resident memory of the engine's processes, and of the node's. Memory of a GPU is not "
            "in it.",
            "bytes",
            (
                Query("pdserve_engine_process_resident_memory_bytes{WORKER}", f"{_NAMED} engine"),
                Query("process_resident_memory_bytes{PROCESS}", "{{instance}} node"),
            ),
        ),
        Panel(
            "Processor",
            "Cores that the engine's processes use, and the node's.",
            "none",
            (
                Query(
                    "rate(pdserve_engine_process_cpu_seconds_total{WORKER}[RATE])",
                    f"{_NAMED} engine",
                ),
                Query("rate(process_cpu_seconds_total{PROCESS}[RATE])", "{{instance}} node"),
            ),
        ),
        Panel(
            "Event loop lag, p99",
            "How late the node's event loop ran a timer.",
            "s",
            (
                Query(
                    "histogram_quantile(0.99, sum by (instance, le) "
                    "(rate(pdserve_event_loop_lag_seconds_bucket{PROCESS}[RATE])))",
                    "{{instance}}",
                ),
            ),
            red=0.1,
        ),
        Panel(
            "Asked to move",
            "Requests whose frontend was asked to continue them elsewhere, per second, by reason.",
            "ops",
            (
                Query(
                    "sum by (reason) (rate(pdserve_moves_asked_total{CLUSTER}[RATE]))",
                    "{{reason}}",
                ),
            ),
        ),
        Panel(
            "Degraded",
            "What runs degraded. docs/operations.md says what each reason means.",
            "short",
            (
                Query(
                    "sum by (instance, reason) (pdserve_degraded{CLUSTER})",
                    "{{instance}} {{reason}}",
                ),
            ),
        ),
    ),
)

WORKERS: Final = Board(
    "pdserve-workers",
    "pdserve: Workers",
    "Engines: load, KV cache and tiers, steps, health.",
    (_LOAD, _KV, _TIERS, _STEPS, _HEALTH),
)
