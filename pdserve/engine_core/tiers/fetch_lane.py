"""Learns how fast fetches from other workers are: the lane `fetch` of one core.

A fetch takes what it takes from the question to the last checked block, whoever the owner is. One
that is late teaches, too: its bytes took at least so long. Otherwise a network that is slower than
assumed would be tried again and again.

The onboarder tells it of each fetch; the planner and the routers read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.kv.tiers.lanes import Lane

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.lanes import LaneEstimate
    from pdserve.messages.tiers import LaneLoad

__all__ = ["FetchLane"]

_WIDTH: Final = 16
"""Fetches that are under way at the same time share the network; more than that queue."""


class FetchLane:
    """The fetches of one core as a lane."""

    def __init__(self, block_bytes: Bytes) -> None:
        self._block_bytes = block_bytes
        self._lane = Lane("fetch", width=_WIDTH)
        self._begun: dict[int, tuple[int, Seconds]] = {}
        """Blocks and start of each fetch under way."""

    def begin(self, number: int, blocks: int, now: Seconds) -> None:
        """A fetch of so many blocks begins."""
        self._begun[number] = blocks, now
        self._lane.submit(blocks * self._block_bytes, now)

    def end(self, number: int, blocks: int, error: str, now: Seconds) -> None:
        """A fetch has brought so many blocks; `error` as in `kv_fetch.ports.PullEnd`. Ignores
        fetches that have ended."""
        begun = self._begun.pop(number, None)
        if begun is None:
            return
        wanted, since = begun
        size = wanted * self._block_bytes
        if blocks == wanted or error == "deadline":
            self._lane.done(size, now, max(0.0, now - since))
        else:
            self._lane.failed(size, now)

    def age(self, now: Seconds) -> None:
        """As `Lane.age`."""
        self._lane.age(now)

    def estimate(self) -> LaneEstimate:
        """What the next fetch is predicted to take."""
        return self._lane.estimate()

    def load(self) -> LaneLoad:
        """The record for routers."""
        return self._lane.load()
