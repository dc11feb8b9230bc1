"""Computes how long a suspicion lasts, and the health score of this process (Lifeguard).

A suspicion is a countdown to a verdict. Each further accuser shortens it logarithmically, the first
of them most. Enough accusers whose connections were refused end it at once.

Signs of a starved process raise the health score: late timers, refuted suspicions of this node, and
missing reports of helpers, because a healthy helper reports even a failure. Successful pings lower
it. This file knows no member table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.gossip.config import GossipConfig
    from pdserve.ids import NodeId, Seconds

__all__ = ["LocalHealth", "Suspicion", "floor", "remaining", "spread"]


def spread(config: GossipConfig, n: int) -> Seconds:
    """Time until a rumour has reached all of `n` members."""
    rounds = 3 + math.log(max(n, 1)) / math.log(1 + config.gossip_fanout)
    return config.gossip_interval * rounds


def floor(config: GossipConfig, n: int) -> Seconds:
    """The shortest suspicion among `n` members: time for the news and its refutation to spread, and
    a second to react."""
    return max(config.suspicion_floor, 2 * spread(config, n) + 1.0)


def remaining(low: Seconds, high: Seconds, heard: int, wanted: int) -> Seconds:
    """Length of a suspicion with `heard` of `wanted` confirmations: `high` without any, `low` with
    all, logarithmic between.
    """
    if wanted <= 0:
        return low
    share = math.log(min(heard, wanted) + 1) / math.log(wanted + 1)
    return max(low, high - (high - low) * share)


@dataclass(slots=True)
class Suspicion:
    """A suspicion of one member in one incarnation."""

    epoch: int
    incarnation: int
    since: Seconds
    not_before: Seconds = 0.0
    """No verdict before this time, even if the countdown is over: this process had stalled."""
    accusers: dict[NodeId, None] = field(default_factory=dict)
    refusers: dict[NodeId, None] = field(default_factory=dict)

    def confirm(self, by: NodeId, refused: bool, config: GossipConfig) -> bool:
        """Adds an accusation; True if it is new and still matters, so that it is worth passing
        on.
        """
        fresh = by not in self.accusers and len(self.accusers) <= config.confirmations
        if fresh:
            self.accusers[by] = None
        if refused and by not in self.refusers and len(self.refusers) < config.refusals:
            self.refusers[by] = None
            fresh = True
        return fresh

    def deadline(self, config: GossipConfig, n: int, health: int) -> Seconds:
        """The time of the verdict among `n` members."""
        low = floor(config, n)
        high = low * config.suspicion_stretch
        wanted = min(config.confirmations, n - 2)
        heard = max(0, len(self.accusers) - 1)
        length = remaining(low, high, heard, wanted) * (1 + health)
        return max(self.since + length, self.not_before)

    def gone(self, config: GossipConfig, n: int) -> bool:
        """True if enough observers were refused: the process is gone."""
        return len(self.refusers) >= max(1, min(config.refusals, n - 1))


class LocalHealth:
    """The score `h` of config.py; 0 is healthy."""

    def __init__(self, limit: int) -> None:
        self._most = limit - 1
        self.score = 0

    def worse(self) -> None:
        self.score = min(self.score + 1, self._most)

    def better(self) -> None:
        self.score = max(self.score - 1, 0)

    def stretch(self, seconds: Seconds) -> Seconds:
        """Stretches a timeout by the score."""
        return seconds * (1 + self.score)
