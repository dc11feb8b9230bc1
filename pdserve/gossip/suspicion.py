"""How long a suspicion lasts, and how far this process may trust its own ears (Lifeguard).

A suspicion is a countdown to a verdict. Each further accuser shortens it, on a logarithm: the
second opinion is worth most. Accusers who were refused a connection need no countdown.

The health score is about ourselves. What makes us doubt it is what a starved process sees: work
begun late, suspicions of ourselves that we had to refute, helpers that stayed silent although a
healthy one reports even a failure. Pings that succeed bring it down. It knows no member's table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.gossip.config import GossipConfig
    from pdserve.ids import NodeId, Seconds

__all__ = ["Health", "Suspicion", "floor", "remaining", "spread"]


def spread(config: GossipConfig, n: int) -> Seconds:
    """Until a rumour has reached all of `n` members."""
    rounds = 3 + math.log(max(n, 1)) / math.log(1 + config.gossip_fanout)
    return config.gossip_interval * rounds


def floor(config: GossipConfig, n: int) -> Seconds:
    """The shortest suspicion among `n` members: there and back, and a second to think."""
    return max(config.suspicion_floor, 2 * spread(config, n) + 1.0)


def remaining(low: Seconds, high: Seconds, heard: int, wanted: int) -> Seconds:
    """Length of a suspicion with `heard` of `wanted` confirmations: `high` without any, `low` with
    all, a logarithm between."""
    if wanted <= 0:
        return low
    share = math.log(min(heard, wanted) + 1) / math.log(wanted + 1)
    return max(low, high - (high - low) * share)


@dataclass(slots=True)
class Suspicion:
    """One member's, in one incarnation."""

    epoch: int
    incarnation: int
    since: Seconds
    not_before: Seconds = 0.0
    """No verdict earlier, whatever the countdown says: we were not listening."""
    accusers: dict[NodeId, None] = field(default_factory=dict)
    refusers: dict[NodeId, None] = field(default_factory=dict)

    def confirm(self, by: NodeId, refused: bool, config: GossipConfig) -> bool:
        """Whether this accusation is worth passing on: new, and not one more than ever matters."""
        fresh = by not in self.accusers and len(self.accusers) <= config.confirmations
        if fresh:
            self.accusers[by] = None
        if refused and by not in self.refusers and len(self.refusers) < config.refusals:
            self.refusers[by] = None
            fresh = True
        return fresh

    def deadline(self, config: GossipConfig, n: int, health: int) -> Seconds:
        """When the verdict is due among `n` members."""
        low = floor(config, n)
        high = low * config.suspicion_stretch
        wanted = min(config.confirmations, n - 2)
        heard = max(0, len(self.accusers) - 1)
        length = remaining(low, high, heard, wanted) * (1 + health)
        return max(self.since + length, self.not_before)

    def gone(self, config: GossipConfig, n: int) -> bool:
        """Enough observers were refused: there is no process."""
        return len(self.refusers) >= max(1, min(config.refusals, n - 1))


class Health:
    """The score `h` of config.py: 0 is well."""

    def __init__(self, limit: int) -> None:
        self._most = limit - 1
        self.score = 0

    def worse(self) -> None:
        self.score = min(self.score + 1, self._most)

    def better(self) -> None:
        self.score = max(self.score - 1, 0)

    def stretch(self, seconds: Seconds) -> Seconds:
        """A time of ours, as long as our state demands."""
        return seconds * (1 + self.score)
