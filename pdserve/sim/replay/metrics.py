"""Computes the metrics of a replay from its request records.

Quantiles are nearest-rank. Times are in seconds, shares between 0 and 1. Requests that did not
complete count against goodput and in `outcomes`, nowhere else.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from pdserve.sim.replay.record import OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pdserve.ids import Seconds
    from pdserve.messages.handoff import WorkerMode
    from pdserve.sim.replay.config import ReplaySlo
    from pdserve.sim.replay.record import ReplayRecord

__all__ = [
    "balance",
    "errors_by_bucket",
    "jain",
    "meets_slo",
    "prefills",
    "quantile",
    "spread",
    "summary",
    "tokens_by_source",
    "weighted_spread",
]

BUCKETS: Final = (512, 2048, 8192, 32768)
"""Upper ends of the buckets of uncached prompt tokens by which predictions are judged; the last
bucket has no end."""


def quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest-rank quantile of ascending values; 0 without any."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Mean and quantiles of values."""
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered) if ordered else 0.0
    return {
        "mean": mean,
        **{f"p{percent}": quantile(ordered, percent / 100) for percent in (50, 90, 99)},
    }


def weighted_spread(pairs: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Mean and quantiles of values with counts."""
    ordered = sorted(pairs)
    total = sum(times for _, times in ordered)
    mean = sum(value * times for value, times in ordered) / total if total else 0.0
    found = {"mean": mean}
    passed, rest = 0, [50, 90, 99]
    for value, times in ordered:
        passed += times
        while rest and passed >= rest[0] / 100 * total:
            found[f"p{rest.pop(0)}"] = value
    return found | {f"p{percent}": 0.0 for percent in rest}


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index: 1 if all are equal, 1/n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def meets_slo(record: ReplayRecord, slo: ReplaySlo, cold: Callable[[int], Seconds]) -> bool:
    """True if the request met the objective; `cold`: see `ReplaySlo`."""
    if not record.completed:
        return False
    if record.ttft > slo.ttft + slo.cold * cold(record.prompt_tokens):
        return False
    return not slo.itl or record.itl <= slo.itl


def summary(
    records: Sequence[ReplayRecord],
    slo: ReplaySlo,
    cold: Callable[[int], Seconds],
    workers: Mapping[str, WorkerMode],
) -> dict[str, Any]:
    """All metrics of a replay; `workers` are all workers there were."""
    done = [record for record in records if record.completed]
    outcomes = Counter(record.outcome for record in records)
    begin = min((record.arrival for record in records), default=0.0)
    end = max((record.end for record in records), default=0.0)
    took = max(end - begin, 1e-9)
    served = sum(meets_slo(record, slo, cold) for record in records)
    prompt = sum(record.prompt_tokens for record in done)
    return {
        "requests": len(records),
        "outcomes": {word: outcomes[word] for word in OUTCOMES},
        "seconds": took,
        "ttft": spread(record.ttft for record in done),
        "itl": spread(record.itl for record in done if record.itl >= 0),
        "token_gap": weighted_spread([step for record in done for step in record.steps]),
        "held": spread(record.held for record in done),
        "queue": spread(record.queue_seconds for record in done),
        "hit_rate": sum(record.cached_tokens for record in done) / prompt if prompt else 0.0,
        "prompt_tokens": tokens_by_source(done),
        "good": served / len(records) if records else 0.0,
        "goodput": served / took,
        "throughput": {
            "requests": len(done) / took,
            "prompt_tokens": prompt / took,
            "output_tokens": sum(record.output_tokens for record in done) / took,
        },
        "preemptions": sum(record.preemptions for record in records),
        "balance": balance(done, workers),
        "prediction": errors_by_bucket(done),
        "prefills": prefills(done),
    }


def tokens_by_source(done: Iterable[ReplayRecord]) -> dict[str, int]:
    """Prompt tokens by where their KV came from; `computed`: by no cache. They add up to all."""
    found = dict.fromkeys(("computed", "device", "host", "disk", "peer"), 0)
    for record in done:
        found["computed"] += record.prompt_tokens - record.cached_tokens
        found["device"] += record.cached_tokens - sum(record.sources.values())
        for source, tokens in record.sources.items():
            found[source] += tokens
    return found


def balance(done: Iterable[ReplayRecord], workers: Mapping[str, WorkerMode]) -> float:
    """Jain's index of the prompt tokens that workers have computed. Workers are compared within
    their mode; each mode counts by the tokens it has computed."""
    computed: dict[str, float] = dict.fromkeys(workers, 0.0)
    for record in done:
        uncached = record.prompt_tokens - record.cached_tokens
        if record.prefill == "remote":
            computed[record.prefill_worker] += record.received_tokens
            uncached = 0
        computed[record.worker] += uncached
    total = sum(computed.values())
    index = 0.0 if total else 1.0
    for mode in dict.fromkeys(workers.values()):
        own = [tokens for worker, tokens in computed.items() if workers[worker] == mode]
        index += jain(own) * sum(own) / total if total else 0.0
    return index


def prefills(done: Sequence[ReplayRecord]) -> dict[str, Any]:
    """Number of prompts by where they were prefilled, of those whose workers had a choice."""
    chosen = [record for record in done if record.prefill]
    counts = Counter((record.prefill, record.prefill_reason) for record in chosen)
    remote = sum(record.prefill == "remote" for record in chosen)
    return {
        "remote_share": remote / len(chosen) if chosen else 0.0,
        "remote": {reason: n for (where, reason), n in sorted(counts.items()) if where == "remote"},
        "local": {reason: n for (where, reason), n in sorted(counts.items()) if where == "local"},
        "received_tokens": sum(record.received_tokens for record in chosen),
    }


def errors_by_bucket(records: Iterable[ReplayRecord]) -> dict[str, dict[str, float]]:
    """Predicted over actual time from arrival to the first token, by uncached prompt tokens."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record.predicted >= 0 and record.first >= 0:
            bucket = _bucket(record.prompt_tokens - record.cached_tokens)
            found.setdefault(bucket, []).append((record.predicted, record.ttft))
    return {name: _errors(found[name]) for name in map(_name, (*BUCKETS, None)) if name in found}


def _bucket(uncached: int) -> str:
    return _name(next((most for most in BUCKETS if uncached <= most), None))


def _name(most: int | None) -> str:
    return f"over {BUCKETS[-1]}" if most is None else f"to {most}"


def _errors(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    ratios = sorted(predicted / max(actual, 1e-6) for predicted, actual in pairs)
    relative = sorted(abs(predicted - actual) / max(actual, 1e-6) for predicted, actual in pairs)
    return {
        "count": len(pairs),
        "ratio_p10": quantile(ratios, 0.1),
        "ratio_p50": quantile(ratios, 0.5),
        "ratio_p90": quantile(ratios, 0.9),
        "error_p50": quantile(relative, 0.5),
        "error_p90": quantile(relative, 0.9),
    }
