"""Makes the rows of KV tiers for `pdserve status`, `top` and `tier status`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.cli.console.layout import Table
from pdserve.launch.config.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Seconds
    from pdserve.messages.status import ClusterStatus, MemberStatus, TierReport

__all__ = ["duration", "tier_table"]


def tier_table(status: ClusterStatus, before: ClusterStatus | None = None) -> Table:
    """The tiers of all workers. Args: `before` is an earlier status of the same node, for
    rates."""
    heads = (
        *("KV OF", "TIER", "SIZE", "USED", "KEEPS"),
        *(("HITS/S",) if before else ()),
        *("HIT TOKENS", "STORED", "EVICTED", "UNSAVED", "FAILED", "NOTE"),
    )
    rows = [
        _row(status, before, member, tier)
        for member in status.members
        for tier in _tiers_of(member)
    ]
    return Table(heads, rows, ("UNSAVED", "STORED", "EVICTED"), "NOTE")


def _tiers_of(member: MemberStatus) -> tuple[TierReport, ...]:
    return () if member.report is None else member.report.tiers


def _row(
    status: ClusterStatus, before: ClusterStatus | None, member: MemberStatus, tier: TierReport
) -> tuple[str, ...]:
    return (
        *(member.node, tier.name),
        approximate_size(tier.capacity) if tier.capacity else "-",
        f"{tier.valid / tier.capacity:.0%}" if tier.capacity else "-",
        duration(tier.retention),
        *((_rate(status, before, member, tier),) if before else ()),
        *map(str, (tier.hit_tokens, tier.stored, tier.evicted, tier.unsaved, tier.failed)),
        tier.trouble,
    )


def _rate(
    status: ClusterStatus, before: ClusterStatus, member: MemberStatus, tier: TierReport
) -> str:
    """Tokens per second that came from this tier since `before`, in the same life of the node."""
    elapsed = status.now - before.now
    for then in _earlier(before, member):
        if then.name == tier.name and elapsed > 0:
            return f"{max(0, tier.hit_tokens - then.hit_tokens) / elapsed:.0f}"
    return "-"


def _earlier(before: ClusterStatus, member: MemberStatus) -> Iterator[TierReport]:
    for old in before.members:
        if (old.node, old.epoch) == (member.node, member.epoch):
            yield from _tiers_of(old)


def duration(seconds: Seconds) -> str:
    """How long blocks stay, in one unit; `-`: nothing was evicted yet."""
    if seconds <= 0:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
