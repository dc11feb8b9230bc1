"""Summarises records: percentiles, rates, goodput, and whether the generator kept up. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.cli.bench.record import BenchRecord
    from pdserve.ids import Seconds
    from pdserve.sim.capacity.objective import SloLimit

__all__ = [
    "BenchSlo",
    "GeneratorStats",
    "percentiles",
    "result_warnings",
    "slo_results",
    "summarise",
]

_SLIP: Final[Seconds] = 0.02
"""A p99 delay between intended and actual send times above this is reported."""
_BUSY: Final = 0.9
"""A share of a CPU core above this is reported."""
_CACHED: Final = 0.05
"""A share of cached tokens above this is reported if prompts share no prefixes."""


@dataclass(frozen=True, slots=True)
class BenchSlo:
    """Limits that a good request keeps; None: no limit."""

    ttft: SloLimit | None = None
    itl: SloLimit | None = None
    """Limit of the mean gap between a request's tokens."""
    e2e: SloLimit | None = None

    @property
    def limits(self) -> dict[str, SloLimit]:
        """The limits by name."""
        pairs = (("ttft", self.ttft), ("itl", self.itl), ("e2e", self.e2e))
        return {name: limit for name, limit in pairs if limit is not None}

    def kept(self, record: BenchRecord) -> bool:
        """True if the request was answered completely and kept the limits."""
        return all(self.kept_limit(record, name) for name in self.limits) and record.completed

    def kept_limit(self, record: BenchRecord, name: str) -> bool:
        """True if the request was answered completely and kept one limit."""
        value = {"ttft": record.ttft, "itl": record.tpot, "e2e": record.e2e}[name]
        return record.completed and (value is None or value <= self.limits[name].time)


def slo_results(records: Sequence[BenchRecord], slo: BenchSlo, dropped: int) -> dict[str, Any]:
    """The share of requests that kept each limit, and whether that is the share it names."""
    total = max(1, len(records) + dropped)
    found = {}
    for name, limit in slo.limits.items():
        kept = sum(slo.kept_limit(record, name) for record in records) / total
        met = None if limit.share is None else kept >= limit.share
        found[name] = {"limit": limit.time, "kept": kept, "wanted": limit.share, "met": met}
    return found


@dataclass(slots=True)
class GeneratorStats:
    """Statistics of the load generator itself."""

    cpu_share: float = 0.0
    """Share of one CPU core."""
    lags: list[Seconds] = field(default_factory=list)
    """Event loop lags, measured every few milliseconds."""
    dropped: int = 0
    """Number of requests of an open loop that were not sent because too many were running."""
    interrupted: bool = False


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Mean, p50, p90, p95, p99 and max, by nearest rank; empty for no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    count = len(ordered)
    ranks = {
        f"p{share}": ordered[max(0, -(-share * count // 100) - 1)] for share in (50, 90, 95, 99)
    }
    return {"mean": sum(ordered) / count, **ranks, "max": ordered[-1]}


def summarise(
    records: Sequence[BenchRecord], pace: GeneratorStats, slo: BenchSlo | None
) -> dict[str, Any]:
    """All numbers of a run; times in seconds."""
    done = [record for record in records if record.completed]
    begin = min((record.sent for record in records), default=0.0)
    end = max((record.ended or record.sent for record in records), default=0.0)
    seconds = max(end - begin, 1e-9)
    good = sum(slo.kept(record) for record in done) if slo else None
    output = sum(record.output_tokens for record in done)
    return {
        "requests": len(records),
        "completed": len(done),
        "errors": dict(Counter(record.error for record in records if record.error)),
        "error_messages": {r.error: r.message for r in reversed(records) if r.error},
        "retries": sum(record.attempts - 1 for record in records),
        "dropped": pace.dropped,
        "interrupted": pace.interrupted,
        "seconds": seconds,
        "requests_per_second": len(done) / seconds,
        "prompt_tokens": sum(record.prompt_tokens for record in done),
        "cached_tokens": sum(record.cached_tokens for record in done),
        "output_tokens": output,
        "output_tokens_per_second": output / seconds,
        "ttft": percentiles(one for r in done if (one := r.ttft) is not None),
        "itl": percentiles(gap for record in done for gap in record.gaps),
        "tpot": percentiles(one for r in done if (one := r.tpot) is not None),
        "e2e": percentiles(one for r in done if (one := r.e2e) is not None),
        "good": good,
        "good_share": None if good is None else good / max(1, len(records) + pace.dropped),
        "goodput": None if good is None else good / seconds,
        "slo": slo_results(records, slo, pace.dropped) if slo else {},
        "workers": dict(sorted(Counter(r.worker for r in done if r.worker).items())),
        "slip": percentiles(record.sent - record.intended for record in records),
        "lag": percentiles(pace.lags),
        "cpu_share": pace.cpu_share,
        "tokens_from_usage": all(r.counted for r in done if r.first is not None),
    }


def result_warnings(numbers: dict[str, Any]) -> list[str]:
    """Reasons why the results may be less meaningful than they look."""
    said = []
    cached = numbers["cached_tokens"] / max(1, numbers["prompt_tokens"])
    if numbers.get("expect_uncached") and cached > _CACHED:
        said.append(
            f"{cached:.0%} of the prompt tokens came from the server's cache, though these prompts "
            "share nothing: an earlier run had the same --seed, so these times are too good"
        )
    if numbers["dropped"]:
        said.append(
            f"{numbers['dropped']} requests were not sent: --max-in-flight were under way; "
            "the server got less than the rate that was asked for"
        )
    if (slip := numbers["slip"].get("p99", 0.0)) > _SLIP:
        said.append(f"requests were sent late (p99 {slip * 1e3:.0f} ms): load was not as intended")
    if numbers["cpu_share"] > _BUSY:
        said.append(
            f"the generator used {numbers['cpu_share']:.0%} of a core: it may be what limited"
        )
    if (lag := numbers["lag"].get("p99", 0.0)) > _SLIP:
        said.append(f"the generator's event loop was late (p99 {lag * 1e3:.0f} ms): so are times")
    if not numbers["tokens_from_usage"]:
        said.append("the server sends no running usage: gaps count each chunk as one token")
    return said
