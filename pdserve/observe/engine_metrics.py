"""Defines the metrics of a worker's engine, and what a worker reports at a scrape.

Each metric carries the worker's model and mode, since a process may hold several workers: plain
`pdserve` has one for prompts and one that decodes. Counters go on over restarts of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Final, Literal

from pdserve.observe.tier_metrics import merge_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.observe.tier_metrics import LaneSample, MissSample, PlanSample, TierSample

__all__ = [
    "ENGINE_LABELS",
    "ENGINE_METRICS",
    "ENGINE_PROCESS_METRICS",
    "EngineMetric",
    "EngineSample",
    "merge_by_labels",
    "one_by_process",
    "sum_by_labels",
]

ENGINE_LABELS: Final = ("model", "mode")


@dataclass(frozen=True, slots=True)
class EngineSample:
    """What a worker reports about its engine at a scrape."""

    model: str = ""
    """The model's served name; empty until the worker knows it."""
    mode: str = "aggregated"
    """What the worker does: aggregated, prefill or decode."""
    ready: bool = False
    running: int = 0
    waiting: int = 0
    block_tokens: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_quarantined: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    steps_ahead: int = 0
    graph_steps: int = 0
    eager_decodes: int = 0
    restarts: int = 0
    stalls: int = 0
    stalled_for: float = 0.0
    inexact_continuations: int = 0
    failed_loads: int = 0
    images: int = 0
    images_unexpected: int = 0
    pid: int | None = None
    """The engine's process; None: it has none of its own."""
    memory: int = 0
    """Of that process, as in `ProcessUsage`."""
    cpu: float = 0.0
    pulls: int = 0
    pulled_bytes: int = 0
    served_bytes: int = 0
    tiers: Mapping[str, TierSample] = field(default_factory=dict)
    """Tiers below the device, by name."""
    lanes: Mapping[str, LaneSample] = field(default_factory=dict)
    """Paths of KV between them, by name."""
    plans: Mapping[str, PlanSample] = field(default_factory=dict)
    """What plans to fetch prefixes came to, by source."""
    misses: Mapping[str, MissSample] = field(default_factory=dict)
    """Blocks that were known and not fetched, by reason."""

    @property
    def kv_usage(self) -> float:
        """Share of blocks held by sequences, 0 to 1; cached blocks count as free."""
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0


def merge_by_labels(samples: Iterable[EngineSample]) -> list[EngineSample]:
    """Sums the samples of workers with the same labels; such a sum is ready when all are."""
    merged: dict[tuple[str, str], EngineSample] = {}
    for sample in samples:
        key = (sample.model, sample.mode)
        merged[key] = _sum(merged[key], sample) if key in merged else sample
    return list(merged.values())


_OTHERS: Final = (*ENGINE_LABELS, "ready", "pid", "memory", "cpu")
_NAMED: Final = ("tiers", "lanes", "plans", "misses")
_NUMBERS: Final = tuple(
    one.name for one in fields(EngineSample) if one.name not in _OTHERS + _NAMED
)


def _sum(one: EngineSample, other: EngineSample) -> EngineSample:
    sums = {name: getattr(one, name) + getattr(other, name) for name in _NUMBERS}
    sums["stalled_for"] = max(one.stalled_for, other.stalled_for)
    sums["block_tokens"] = max(one.block_tokens, other.block_tokens)
    for name in _NAMED:
        sums[name] = merge_named(getattr(one, name), getattr(other, name))
    return replace(one, ready=one.ready and other.ready, **sums)


def one_by_process(samples: Iterable[EngineSample]) -> list[EngineSample]:
    """One sample for each engine process, for its memory and CPU time. Its mode names all that it
    does, as in `decode+prefill`."""
    found: dict[int, EngineSample] = {}
    for sample in samples:
        if sample.pid is None:
            continue
        known = found.get(sample.pid)
        if known is None:
            found[sample.pid] = sample
        elif sample.mode not in known.mode.split("+"):
            mode = "+".join(sorted([*known.mode.split("+"), sample.mode]))
            found[sample.pid] = replace(known, mode=mode)
    return list(found.values())


def sum_by_labels(
    samples: Iterable[EngineSample], read: Callable[[EngineSample], float]
) -> dict[tuple[str, str], float]:
    """Sums of a number by model and mode."""
    sums: dict[tuple[str, str], float] = {}
    for sample in samples:
        key = (sample.model, sample.mode)
        sums[key] = sums.get(key, 0.0) + read(sample)
    return sums


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """Definition of one metric: `read` takes its value from a sample, `combine` says how processes
    that share a port are merged."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[EngineSample], float]
    combine: Literal["sum", "max"] = "sum"


ENGINE_METRICS = (
    EngineMetric(
        "engine_ready",
        "gauge",
        "1 while the engine can take sequences, 0 while it loads or restarts.",
        lambda s: float(s.ready),
    ),
    EngineMetric(
        "num_requests_running",
        "gauge",
        "Sequences that hold blocks and take part in steps.",
        lambda s: s.running,
    ),
    EngineMetric(
        "num_requests_waiting",
        "gauge",
        "Submissions in the engine's queue that do not run yet.",
        lambda s: s.waiting,
    ),
    EngineMetric(
        "kv_cache_usage_ratio",
        "gauge",
        "Share of KV blocks held by sequences, 0 to 1; reusable cached blocks count as free.",
        lambda s: s.kv_usage,
    ),
    EngineMetric(
        "kv_block_tokens", "gauge", "Tokens in a KV block.", lambda s: s.block_tokens, "max"
    ),
    EngineMetric("kv_blocks", "gauge", "KV blocks of the pool.", lambda s: s.blocks_total),
    EngineMetric(
        "kv_blocks_used", "gauge", "KV blocks held by sequences.", lambda s: s.blocks_used
    ),
    EngineMetric(
        "kv_blocks_cached",
        "gauge",
        "Unreferenced KV blocks kept for reuse as a prefix.",
        lambda s: s.blocks_cached,
    ),
    EngineMetric(
        "kv_blocks_quarantined",
        "gauge",
        "KV blocks that a peer might still write to.",
        lambda s: s.blocks_quarantined,
    ),
    EngineMetric(
        "prompt_tokens_total",
        "counter",
        "Prompt tokens of admitted sequences.",
        lambda s: s.prompt_tokens,
    ),
    EngineMetric(
        "cached_prompt_tokens_total",
        "counter",
        "Prompt tokens taken from the prefix cache instead of computed.",
        lambda s: s.cached_tokens,
    ),
    EngineMetric("generation_tokens_total", "counter", "Output tokens.", lambda s: s.output_tokens),
    EngineMetric(
        "computed_tokens_total",
        "counter",
        "Tokens that went through the model, recomputation included.",
        lambda s: s.computed_tokens,
    ),
    EngineMetric(
        "preemptions_total",
        "counter",
        "Sequences that gave up their blocks to others and were computed again.",
        lambda s: s.preemptions,
    ),
    EngineMetric(
        "inexact_continuations_total",
        "counter",
        "Requests that were continued after a migration with other noise or penalties than before.",
        lambda s: s.inexact_continuations,
    ),
    EngineMetric(
        "kv_load_failures_total",
        "counter",
        "Prompts whose KV came from another worker and could not be loaded: computed again.",
        lambda s: s.failed_loads,
    ),
    EngineMetric(
        "kv_pulls_total",
        "counter",
        "Fetches of KV from other workers that were begun.",
        lambda s: s.pulls,
    ),
    EngineMetric(
        "kv_pulled_bytes_total",
        "counter",
        "KV fetched from other workers.",
        lambda s: s.pulled_bytes,
    ),
    EngineMetric(
        "kv_served_bytes_total",
        "counter",
        "KV that other workers fetched from here.",
        lambda s: s.served_bytes,
    ),
    EngineMetric(
        "images_total",
        "counter",
        "Images that the engine has read.",
        lambda s: s.images,
    ),
    EngineMetric(
        "images_unexpected_total",
        "counter",
        "Images that took another number of tokens than the frontend expected.",
        lambda s: s.images_unexpected,
    ),
    EngineMetric(
        "engine_restarts_total",
        "counter",
        "Times the engine died and was started again.",
        lambda s: s.restarts,
    ),
    EngineMetric(
        "engine_stalls_total",
        "counter",
        "Times the engine was restarted because it stalled: it had work and made no progress.",
        lambda s: s.stalls,
    ),
    EngineMetric(
        "engine_stalled_seconds",
        "gauge",
        "How long the engine has made no progress although it has work.",
        lambda s: s.stalled_for,
        "max",
    ),
    EngineMetric("engine_steps_total", "counter", "Steps of the engine.", lambda s: s.steps),
    EngineMetric(
        "engine_step_seconds_total",
        "counter",
        "Time spent inside steps.",
        lambda s: s.step_seconds,
    ),
    EngineMetric(
        "engine_steps_ahead_total",
        "counter",
        "Steps that were begun before the one before them had ended.",
        lambda s: s.steps_ahead,
    ),
    EngineMetric(
        "engine_graph_steps_total",
        "counter",
        "Steps that a CUDA graph has computed.",
        lambda s: s.graph_steps,
    ),
    EngineMetric(
        "engine_eager_decodes_total",
        "counter",
        "Steps that only decode and that no CUDA graph could compute, although there are some.",
        lambda s: s.eager_decodes,
    ),
)
"""All metrics of engines, in the order of `docs/metrics.md`."""

ENGINE_PROCESS_METRICS = (
    EngineMetric(
        "engine_process_resident_memory_bytes",
        "gauge",
        "Resident memory of the engine's process and of those that it has started. The mode names "
        "all that it does, as in decode+prefill.",
        lambda s: s.memory,
    ),
    EngineMetric(
        "engine_process_cpu_seconds_total",
        "counter",
        "CPU time of these processes; begins anew when the engine restarts.",
        lambda s: s.cpu,
    ),
)
"""Metrics of engine processes; several engines may share one."""
