"""Queues rumours for gossip: bounded, only the newest record of each member, least sent first.

Peers take turns, and a rumour stays queued until each peer has received it, so that no peer is left
out by chance. A lost rumour is harmless, because digests repair it. An outdated one is useless,
because receivers reject it. So a newer record of a member replaces the older one at once, and at
the bound the most often sent rumour is dropped.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from pdserve.gossip.member_table import precedence

if TYPE_CHECKING:
    from pdserve.gossip.config import GossipConfig
    from pdserve.gossip.messages import Rumour
    from pdserve.ids import NodeId

__all__ = ["BroadcastQueue", "transmissions"]


def transmissions(config: GossipConfig, n: int) -> int:
    """Number of times that each of `n` members sends a rumour."""
    return config.retransmit * math.ceil(math.log10(n + 1))


class BroadcastQueue:
    """Rumours by member; those of a suspicion also by accuser."""

    def __init__(self, config: GossipConfig) -> None:
        self._config = config
        self._waiting: dict[NodeId, dict[NodeId, Rumour]] = {}
        self._sent: dict[tuple[NodeId, NodeId], tuple[int, int]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._sent)

    def put(self, rumour: Rumour) -> None:
        """Queues a rumour that the table accepted; it replaces outdated ones."""
        node = rumour.record.node
        waiting = self._waiting.setdefault(node, {})
        for by, other in list(waiting.items()):
            if by == rumour.by or precedence(other.record) < precedence(rumour.record):
                self._drop(node, by)
        self._waiting.setdefault(node, {})[rumour.by] = rumour
        self._serial += 1
        self._sent[node, rumour.by] = (0, self._serial)
        if len(self._sent) > self._config.queue_limit:
            self._drop(*max(self._sent, key=self._sent.__getitem__))

    def take(self, n: int, copies: int, peers: int) -> tuple[Rumour, ...]:
        """The batch to send now to `copies` of the `peers`, which take turns."""
        batch = heapq.nsmallest(self._config.batch, self._sent, key=self._sent.__getitem__)
        limit = max(transmissions(self._config, n), peers)
        rumours = []
        for node, by in batch:
            rumours.append(self._waiting[node][by])
            count, serial = self._sent[node, by]
            if count + copies >= limit:
                self._drop(node, by)
            else:
                self._sent[node, by] = (count + copies, serial)
        return tuple(rumours)

    def _drop(self, node: NodeId, by: NodeId) -> None:
        del self._sent[node, by]
        del self._waiting[node][by]
        if not self._waiting[node]:
            del self._waiting[node]
