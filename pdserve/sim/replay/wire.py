"""The network that carries KV between the workers of a replay: not its bytes, but their time.

Blocks of engines without content are a few bytes per token, which stand for the KV of that token:
a write of them takes as long as the KV would. Each worker sends and receives at the full rate at
once, one write after the other in the order in which they begin: transfers that share a worker
share its rate, those that do not are as fast as if they were alone. What lies between the workers
is never the bottleneck.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.transfer.fake import FakeFabric
from pdserve.transfer.plan import block_bytes

if TYPE_CHECKING:
    from random import Random

    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.engine import EngineCapabilities
    from pdserve.transfer.base import PeerKey
    from pdserve.transfer.fake import FakeQueuePair

__all__ = ["Wire"]


class Wire(FakeFabric):
    """See above."""

    def __init__(self, random: Random, *, bandwidth: float, latency: Seconds) -> None:
        """`bandwidth` in bytes per second; `latency` of each part, besides."""
        super().__init__(random)
        self.token_bytes: Bytes = 0
        """KV of a token."""
        self._bandwidth = bandwidth
        self._latency = latency
        self._sends: dict[PeerKey, Seconds] = {}
        self._receives: dict[PeerKey, Seconds] = {}
        """Until when each is busy."""

    def carries(self, capabilities: EngineCapabilities) -> None:
        """Of these engines; before anything moves."""
        self.token_bytes = capabilities.block_bytes // capabilities.block_size

    def takes(self, pair: FakeQueuePair, size: Bytes) -> Seconds:
        """See `FakeFabric`; a notification, which has no bytes, takes the latency."""
        target = self.pairs.get(pair.peer)
        if not size or target is None:
            return self._latency
        here, there = pair.owner, target.owner
        layout = pair.transport.regions[0].layout
        real = size * self.token_bytes * layout.tokens / block_bytes(layout)
        now = asyncio.get_running_loop().time()
        begin = max(now, self._sends.get(here, 0.0), self._receives.get(there, 0.0))
        end = begin + real / self._bandwidth
        self._sends[here] = self._receives[there] = end
        return end - now
