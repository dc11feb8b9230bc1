"""Models the time of KV transfers between the workers of a replay.

Blocks of engines without content have a few bytes per token; a write takes as long as the real KV
would. Each worker sends and receives at its full rate at once, one write after the other in order
of their start. Transfers that share a worker share its rate; others do not slow each other. The
network between workers is never the bottleneck.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.testing.fake_rdma import FakeFabric
from pdserve.transfer.copy_plan import block_bytes

if TYPE_CHECKING:
    from random import Random

    from pdserve.ids import Bytes, NodeLife, Seconds
    from pdserve.messages.engine import EngineCapabilities
    from pdserve.testing.fake_rdma import FakeQueuePair

__all__ = ["KvNetwork"]


class KvNetwork(FakeFabric):
    """The network for KV between the workers of a replay; a `FakeFabric`."""

    def __init__(self, random: Random, *, bandwidth: float, latency: Seconds) -> None:
        """`bandwidth` in bytes per second; `latency` in seconds, added to each part."""
        super().__init__(random)
        self.token_bytes: Bytes = 0
        """KV of a token."""
        self._bandwidth = bandwidth
        self._latency = latency
        self._sends: dict[NodeLife, Seconds] = {}
        self._receives: dict[NodeLife, Seconds] = {}
        """The time until which each worker is busy with receiving."""

    def carries(self, capabilities: EngineCapabilities) -> None:
        """Set the size of a token's KV, from the engines' capabilities; before any transfer."""
        self.token_bytes = capabilities.block_bytes // capabilities.block_size

    def takes_probe(self, size: Bytes) -> Seconds:
        """Seconds of a probe between two idle workers; its bytes are those of real KV."""
        return self._latency + size / self._bandwidth

    def takes(self, pair: FakeQueuePair, size: Bytes) -> Seconds:
        """Seconds until a work request of `size` bytes has completed; one without bytes, such as a
        notification, takes the latency."""
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
