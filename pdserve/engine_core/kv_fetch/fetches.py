"""Joins both sides of KV fetches in one core: `PullsAndServes`, and with the absorber `KvFetches`.

    puller     blocks from other workers, for requests that wait and for the absorber
    server     blocks for other workers
    absorber   blocks that no request waits for

They pass commands of the node and events of the connector to the side that they are for. The engine
core owns one of them and calls it between steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.engine_core.kv_fetch.absorber import KvAbsorber
from pdserve.engine_core.kv_fetch.chains import worth_most
from pdserve.engine_core.kv_fetch.ports import is_pull, refusal_of
from pdserve.engine_core.kv_fetch.puller import KvPuller
from pdserve.engine_core.kv_fetch.server import KvServer
from pdserve.engine_core.kv_transfer.connector import PartDelivered
from pdserve.messages.engine import (
    AbsorbKv,
    KvChainsListed,
    KvPullAnswer,
    ListKvChains,
    ServeKvPull,
    StopKvPull,
)
from pdserve.messages.kv_pull import KvChains

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine_core.kv_fetch.ports import FetchCommand, ServedPool
    from pdserve.engine_core.kv_fetch.uses import BlockUses
    from pdserve.engine_core.kv_transfer.connector import (
        AttemptBroken,
        AttemptFenced,
        AttemptGranted,
        KvConnector,
        PartArrived,
    )
    from pdserve.ids import Seconds
    from pdserve.kv.block_pool import BlockPool
    from pdserve.messages.engine import EngineStats, Event, PeerGone
    from pdserve.transfer.base import Region

__all__ = ["KvFetches", "PullMoved", "PullsAndServes"]

if TYPE_CHECKING:
    PullMoved = AttemptGranted | PartArrived | AttemptBroken | AttemptFenced | PartDelivered


class PullsAndServes:
    """Pulls of one core, and those of its peers that it serves."""

    def __init__(
        self,
        pool: ServedPool,
        mover: KvConnector,
        region: Region,
        say: Callable[[Event], None],
    ) -> None:
        """`pool` has the blocks for peers. `say` sends an event to the node."""
        self.puller = KvPuller(mover, region, say)
        self.server = KvServer(pool, mover, region, say)
        self._say = say

    @staticmethod
    def owns(moved: PullMoved) -> bool:
        """Whether an event of the connector belongs to a fetch."""
        handle = moved.handle if isinstance(moved, PartDelivered) else moved.key.handle
        return is_pull(handle)

    def moved(self, moved: PullMoved, now: Seconds) -> None:
        """Handle an event of the connector that belongs to a fetch."""
        if isinstance(moved, PartDelivered):
            self.server.delivered(moved, now)
        else:
            self.puller.moved(moved, now)

    def take(self, command: FetchCommand, now: Seconds) -> None:
        """Handle a command of the node."""
        match command:
            case KvPullAnswer():
                self.puller.take(command, now)
            case ServeKvPull():
                self.server.serve(command, now)
            case StopKvPull():
                self.server.stop(command.number)
            case AbsorbKv() | ListKvChains():
                refusal = refusal_of(command)
                assert refusal is not None
                self._say(refusal)

    def peer_gone(self, command: PeerGone, now: Seconds) -> None:
        """A peer is dead: end what concerns it."""
        self.puller.take(command, now)
        self.server.peer_gone(command)

    @property
    def has_work(self) -> bool:
        """Return whether `advance` can do something."""
        return self.puller.has_work or self.server.has_work

    def next_deadline(self) -> Seconds | None:
        """Time at which `advance` must be called at the latest; None: never."""
        both = (self.puller.next_deadline(), self.server.next_deadline())
        return min((one for one in both if one is not None), default=None)

    def advance(self, now: Seconds, *, busy: bool) -> None:
        """Do what is due. `busy`: the core has requests of its own to compute."""
        self.puller.advance(now)
        self.server.advance(now, busy=busy)

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """The stats with those of fetches."""
        puller, server = self.puller, self.server
        return msgspec.structs.replace(
            stats,
            pulled_blocks=puller.pulled_blocks,
            pulled_bytes=puller.pulled_bytes,
            served_blocks=server.served_blocks,
            served_bytes=server.served_bytes,
            pulls=puller.pulls,
            pulls_failed=puller.ended.total(),
        )

    def fenced(self, now: Seconds) -> None:
        """The connector is closed: end everything and give all blocks back."""
        self.puller.fenced(now)
        self.server.fenced()


class KvFetches(PullsAndServes):
    """KV fetches of one core into and from its device pool, in both directions."""

    def __init__(
        self,
        pool: BlockPool,
        mover: KvConnector,
        region: Region,
        say: Callable[[Event], None],
        uses: BlockUses,
    ) -> None:
        """`say` sends an event to the node. `uses` knows how cached blocks were used."""
        super().__init__(pool, mover, region, say)
        self.absorber = KvAbsorber(pool, self.puller, say, uses)
        self._pool = pool

    @property
    def uses(self) -> BlockUses:
        """Knows how cached blocks were used."""
        return self.absorber.uses

    @uses.setter
    def uses(self, uses: BlockUses) -> None:
        self.absorber.uses = uses

    def take(self, command: FetchCommand, now: Seconds) -> None:
        """Handle a command of the node."""
        match command:
            case AbsorbKv():
                self.absorber.absorb(command, now)
            case ListKvChains():
                listed = KvChains(worth_most(self._pool, command.blocks, self.uses.use))
                self._say(KvChainsListed(command.number, listed))
            case _:
                super().take(command, now)

    def renamed(self, now: Seconds) -> None:
        """The pool's blocks get other hashes from now on."""
        self.absorber.drop(now)
