"""KV fetches of a core by its host tier: what peers take from it, and what is pulled into it.

The connector's region has the tier's frames, perhaps behind staging blocks. An engine that
schedules itself owns this beside its tiers, and calls it between steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.engine_core.kv_fetch.fetches import PullsAndServes
from pdserve.engine_core.tiers.fetch_lane import FetchLane
from pdserve.engine_core.tiers.frames.frame_pool import FramePool
from pdserve.engine_core.tiers.frames.frame_pulls import FramePulls
from pdserve.engine_core.tiers.frames.frame_stager import FrameStager
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import (
    AbsorbKv,
    KvPullAnswer,
    ListKvChains,
    PeerGone,
    ServeKvPull,
    SetNodeLife,
    StopKvPull,
)
from pdserve.transfer.copy_plan import block_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine_core.kv_fetch.fetches import PullMoved
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.engine_core.tiers.core_tiers import DeviceTiers
    from pdserve.ids import Seconds
    from pdserve.messages.engine import Command, EngineStats, Event
    from pdserve.messages.tiers import KvFetchMode
    from pdserve.transfer.base import Region

__all__ = ["FrameFetches"]


class FrameFetches:
    """Both directions, for one core whose connector reaches host memory only."""

    def __init__(
        self,
        tiers: DeviceTiers,
        mover: KvConnector,
        region: Region,
        mode: KvFetchMode,
        say: Callable[[Event], None],
        first: int = 0,
    ) -> None:
        """`mover` has been started with `region`, whose block `first` is frame 0 of `tiers`. `say`
        sends an event to the node."""
        lower = tiers.lower
        self._mover = mover
        self._both = PullsAndServes(FramePool(lower.host, first), mover, region, say)
        self._stager = self._both.server.stage = FrameStager(lower, tiers.cleaner)
        self._pulls = FramePulls(
            lower.arrivals,
            self._both.puller,
            FetchLane(block_bytes(region.layout)),
            region.layout.tokens,
            first,
        )
        self.pulls = None if mode == "never" else self._pulls
        """Pulls into the host tier; None: only others fetch."""

    def _note(self, now: Seconds) -> None:
        self._pulls.now = self._stager.now = now

    def take(self, command: Command, now: Seconds) -> bool:
        """Handle a command of the node; False: it is not about fetches or the transports."""
        self._note(now)
        match command:
            case KvPullAnswer() | ServeKvPull() | StopKvPull() | AbsorbKv() | ListKvChains():
                self._both.take(command, now)
            case SetNodeLife():
                self._mover.attach(NodeLife(NodeId(command.node), command.epoch))
            case PeerGone():
                if not command.returns:
                    self._pulls.peer_gone(command.node, command.epoch)
                self._both.peer_gone(command, now)
            case _:
                return False
        return True

    def moved(self, moved: PullMoved, now: Seconds) -> bool:
        """Handle an event of the connector; False: it does not belong to a fetch."""
        if not self._both.owns(moved):
            return False
        self._note(now)
        self._both.moved(moved, now)
        return True

    @property
    def has_work(self) -> bool:
        """Return whether `advance` can do something."""
        return self._both.has_work or self._stager.has_work

    def next_deadline(self) -> Seconds | None:
        """Time at which `advance` must be called at the latest; None: never."""
        return self._both.next_deadline()

    def advance(self, now: Seconds, *, busy: bool) -> None:
        """Do what is due. `busy`: the core has requests of its own to compute."""
        self._note(now)
        self._stager.advance()
        self._both.advance(now, busy=busy)
        self._pulls.lane.age(now)

    def drop(self, now: Seconds) -> None:
        """Nothing that is being pulled is wanted: the tiers are cleared, or renamed."""
        self._note(now)
        self._pulls.drop()

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """The stats with those of fetches."""
        stats = self._both.add_stats(stats)
        return msgspec.structs.replace(stats, lanes=(*stats.lanes, self._pulls.lane.load()))

    def fenced(self, now: Seconds) -> None:
        """The connector is closed: end everything and give all frames back."""
        self._note(now)
        self._both.fenced(now)
