"""Counts the traffic of the KV paths to each peer, for stats. Pure: times are arguments.

A path that is set up again uses the same counters, so they only grow while the peer lives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.messages.engine import PathState
from pdserve.transfer.path_probe import PathRate

if TYPE_CHECKING:
    from pdserve.ids import Bytes, NodeLife, Seconds
    from pdserve.transfer.base import KvPath

__all__ = ["PathMeter", "PathStatsTable", "PeerPathStats"]


@dataclass(slots=True, eq=False)
class PeerPathStats:
    """Traffic with one peer over one back end."""

    path: KvPath
    """The present path, or the last one."""
    why: str = ""
    expected: float = 0.0
    degraded: str = ""
    rate: PathRate = field(default_factory=PathRate)
    """What its probes found when this end made it."""
    sent: Bytes = 0
    received: Bytes = 0
    seconds: Seconds = 0.0
    failures: int = 0
    outgoing: int = 0
    since: Seconds = 0.0
    """Time at which the path last became busy."""

    def state(self, now: Seconds) -> PathState:
        """The state of the path at `now`."""
        path = self.path
        return PathState(
            node=path.peer.node,
            epoch=path.peer.epoch,
            backend=path.backend,
            why=self.why,
            expected=self.expected,
            sent_bytes=self.sent,
            received_bytes=self.received,
            sent_seconds=self.seconds + (now - self.since if self.outgoing else 0.0),
            failures=self.failures,
            down="" if path.down is None else path.down.message,
            degraded=self.degraded,
            measured=self.rate.rate,
            unmeasured=self.rate.why_not,
        )


class PathMeter:
    """Adds one path's counters to the stats of its peer."""

    def __init__(self, stats: PeerPathStats, path: KvPath) -> None:
        self.stats = stats
        self.path = path
        self.died = False
        """Whether the path's end has been counted."""
        self._sent: Bytes = 0
        self._received: Bytes = 0

    def began(self, now: Seconds) -> None:
        """Take note that a delivery has begun."""
        stats = self.stats
        if not stats.outgoing:
            stats.since = now
        stats.outgoing += 1

    def ended(self, now: Seconds) -> Bytes:
        """Take note that a delivery has ended; returns its bytes, 0 if nothing arrived."""
        stats = self.stats
        stats.outgoing -= 1
        if not stats.outgoing:
            stats.seconds += now - stats.since
        total = self.path.stats.bytes_delivered
        size, self._sent = total - self._sent, total
        stats.sent += size
        return size

    def arrived(self) -> Bytes:
        """Take note that a part has arrived; returns its bytes, 0 if the back end does not know."""
        total = self.path.stats.bytes_received
        size, self._received = total - self._received, total
        self.stats.received += size
        return size


class PathStatsTable:
    """Traffic with all peers of one node epoch."""

    def __init__(self) -> None:
        self._stats: dict[tuple[NodeLife, str], PeerPathStats] = {}
        self._meters: dict[KvPath, PathMeter] = {}

    def __len__(self) -> int:
        return len(self._stats)

    def meter(self, path: KvPath) -> PathMeter:
        """The meter of a path; adds a new path to the table."""
        meter = self._meters.get(path)
        if meter is None:
            stats = self._stats.get((path.peer, path.backend))
            if stats is None:
                stats = self._stats[path.peer, path.backend] = PeerPathStats(path)
            elif stats.path.down is not None:
                self._meters.pop(stats.path, None)
            stats.path = path
            meter = self._meters[path] = PathMeter(stats, path)
        return meter

    def failed(self, peer: NodeLife, backend: str) -> None:
        """Count a path that could not be set up, or that failed."""
        stats = self._stats.get((peer, backend))
        if stats is not None:
            stats.failures += 1

    def paths(self, peer: NodeLife) -> list[KvPath]:
        """All known paths to a peer."""
        return [path for path in self._meters if path.peer == peer]

    def forget(self, peer: NodeLife) -> None:
        """Drop a peer whose epoch has ended."""
        for key in [key for key in self._stats if key[0] == peer]:
            del self._stats[key]
        for path in self.paths(peer):
            del self._meters[path]

    def states(self, now: Seconds) -> list[PathState]:
        """The states of all paths at `now`."""
        return [stats.state(now) for stats in self._stats.values()]
