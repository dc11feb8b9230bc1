"""Finds how many workers an SLO needs by replaying the trace with different numbers.

More workers are assumed to be no worse. The search doubles until the SLO is met, then bisects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pdserve.cli.outputs import columns
from pdserve.cli.simulate.report import cluster_text, slo_text
from pdserve.sim.replay.run import replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.ids import Seconds
    from pdserve.sim.replay.config import ReplayConfig
    from pdserve.sim.replay.record import ReplayRecord
    from pdserve.sim.workloads.trace_request import TraceRequest

__all__ = ["SizeTrial", "config_of_size", "search_size", "smallest_size", "table"]


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """One replay."""

    config: ReplayConfig
    numbers: dict[str, Any]
    """Summary of the replay."""


def smallest_size(meets: Callable[[int], bool], most: int) -> int | None:
    """The smallest number from 1 to `most` that `meets` accepts, or None. `meets` must accept every
    larger number too."""
    low, high = 0, 1
    while not meets(min(high, most)):
        if high >= most:
            return None
        low, high = high, 2 * high
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def config_of_size(config: ReplayConfig, size: int) -> ReplayConfig:
    """`size` workers, or `size` times the given prefill and decode workers."""
    if config.prefill:
        return replace(config, prefill=config.prefill * size, decode=config.decode * size)
    return replace(config, workers=size)


def search_size(
    config: ReplayConfig,
    requests: Callable[[], Iterator[TraceRequest]],
    share: float,
    most: int,
    watch: Callable[[], Callable[[ReplayRecord, Seconds], None]],
) -> tuple[SizeTrial | None, list[SizeTrial]]:
    """The smallest size at which `share` of the requests meet the SLO, and all sizes tried.

    Args: `watch` is called before each replay; its result is called at each request's end.
    """
    tried: dict[int, SizeTrial] = {}

    def meets(size: int) -> bool:
        sized = config_of_size(config, size)
        tried[size] = SizeTrial(sized, replay(sized, requests(), watch()).summary)
        return bool(tried[size].numbers["good"] >= share)

    per_size = config.prefill + config.decode or 1
    found = smallest_size(meets, max(1, most // per_size))
    return tried[found] if found else None, [tried[size] for size in sorted(tried)]


def table(
    tried: list[SizeTrial], found: SizeTrial | None, share: float, config: ReplayConfig
) -> str:
    """A table of every size tried, and the result."""
    rows: list[tuple[str, ...]] = [("cluster", "good", "TTFT p50, s", "p99, s", "ITL p99, ms")]
    for one in tried:
        ttft, itl = one.numbers["ttft"], one.numbers["itl"]
        times = (f"{ttft['p50']:.3f}", f"{ttft['p99']:.3f}", f"{itl['p99'] * 1e3:.1f}")
        rows.append((cluster_text(one.config), f"{one.numbers['good']:.1%}", *times))
    wanted = f"{share:.4g} of the requests good ({slo_text(config.slo)})"
    verdict = (
        f"{cluster_text(found.config)}: the fewest with {wanted}"
        if found
        else f"no size that was tried has {wanted}: raise --most-workers or the limits of --slo"
    )
    return "\n".join([*columns(rows), "", verdict])
