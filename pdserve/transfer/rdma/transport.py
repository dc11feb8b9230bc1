"""Implements the RDMA backend: pools are registered with adapters, and peers write into them.

    open         off the loop: adapters, pools, keys
    PathHello    one queue pair per adapter, how to reach each, and the keys of all pools
    PathWelcome  the same from the peer, whose queue pairs are already connected
    PathReady    this node's are connected too: both may write

A path has one rail for each adapter of the side that connects. Keys and addresses travel over the
authenticated link, because anyone with a key and a queue pair can write to all of a pool. So only
peers get queue pairs, and only this node decides when one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.errors import TransferError, TransferRefused
from pdserve.transfer.copy_plan import PlanError
from pdserve.transfer.rdma.adapters import Adapters
from pdserve.transfer.rdma.negotiate import RdmaDetails, pair_rails
from pdserve.transfer.rdma.rail import Rail
from pdserve.transfer.rdma.send_queue import RailRegions
from pdserve.transfer.rdma.verbs_path import STRIPE_BYTES, VerbsPath
from pdserve.transfer.rdma.work_requests import region_slices
from pdserve.transfer.transport_base import TransportBase

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from pdserve.ids import Epoch, NodeId, NodeLife, Seconds
    from pdserve.messages.transfer import PathHello, RegionCard
    from pdserve.transfer.base import CallPeer, Region
    from pdserve.transfer.grants import GrantEntry
    from pdserve.transfer.path_base import DeliveryKey
    from pdserve.transfer.rdma.adapter import Adapter, PyverbsQueuePair, QueuePairOptions
    from pdserve.transfer.rdma.negotiate import RailOffer
    from pdserve.transfer.transport_base import HelloExchange

__all__ = ["PATIENCE", "RdmaPath", "RdmaTransport"]

_log = logging.getLogger(__name__)

PATIENCE: Seconds = 30.0
"""How long no work request may complete on any rail before the path fails. Adapters notice a dead
peer by themselves; this is for a peer that reads no notifications."""


class RdmaPath(VerbsPath):
    """A path over queue pairs of real adapters."""

    backend = "rdma"
    transport: RdmaTransport
    rails: Sequence[Rail]

    def _abandon(self, key: DeliveryKey) -> None:
        for rail in self.rails:
            if rail.give_up(key):
                self.completed(key, whole=False)

    def _mark(self) -> object:
        return [rail.progress for rail in self.rails]

    async def _fence(self, granted: GrantEntry, timeout: Seconds) -> None:
        await super()._fence(granted, timeout)
        for rail in self.rails:  # its notifications are here, but perhaps not yet looked at
            rail.poll()


class RdmaTransport(TransportBase):
    """One life of a node on its adapters."""

    name = "rdma"

    def __init__(
        self,
        node: NodeId,
        epoch: Epoch,
        regions: Sequence[Region],
        ask: CallPeer,
        *,
        devices: Sequence[str] = (),
        options: QueuePairOptions | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """`adapters`: open ones with these regions; the caller keeps and closes them. None: the
        transport opens its own, by `devices` and `options` (`Adapters`)."""
        super().__init__(node, epoch, regions, ask)
        self._shared = adapters is not None
        self._adapters = adapters or Adapters(regions, devices, options)
        self.options = self._adapters.options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pdserve-rdma")
        self._opening: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ adapters and pools

    @property
    def adapters(self) -> list[Adapter]:
        """The open adapters; empty before `open`."""
        return self._adapters.opened

    async def open(self) -> None:
        """Open the adapters and register the pools, once. The first path calls it too. Errors:
        `TransferError`. Cancellation: the work goes on."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._set_up())
            self._opening.add_done_callback(self._opened)
        await asyncio.shield(self._opening)

    async def _set_up(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._adapters.open)
        self.cards = self._adapters.cards()
        for adapter in self.adapters:
            loop.add_reader(adapter.device.async_fd, partial(self._on_report, adapter))

    def _opened(self, opening: asyncio.Task[None]) -> None:
        """Handle the result of `open`; after a failure, the next caller tries again."""
        if opening.cancelled() or opening.exception() is not None:
            self._opening = None

    def _on_report(self, adapter: Adapter) -> None:
        """Handle a failure that an adapter reports and that no work request may show."""
        for event in adapter.events():
            _log.error("%s: %s", adapter.name, event.failure)
            for path in list(self._paths.values()):
                if isinstance(path, RdmaPath) and _concerns(path, adapter, event.element):
                    path.fail("adapter", f"{adapter.name}: {event.failure}")

    # ------------------------------------------------------------------ paths

    async def _dial(self, peer: NodeLife, number: int, exchange: HelloExchange) -> RdmaPath:
        await self.open()
        pairs = self._pairs(range(len(self.adapters)))
        with _destroyed_on_error(pairs):
            welcome = await exchange(self._details(pairs))
            details = _read(welcome.details)
            if len(details.offers) != len(pairs):
                raise PlanError(f"this node has {len(pairs)} rails, the peer {len(details.offers)}")
            path = self._path(peer, number, welcome.regions, pairs, details)
        path.remote = welcome.path
        return path

    async def _accept(
        self, peer: NodeLife, number: int, hello: PathHello
    ) -> tuple[RdmaPath, bytes]:
        await self.open()
        details = _read(hello.details)
        pairs = self._pairs(pair_rails(details.offers, [a.link for a in self.adapters]))
        with _destroyed_on_error(pairs):
            path = self._path(peer, number, hello.regions, pairs, details)
        return path, self._details(pairs)

    def _pairs(self, places: Sequence[int]) -> list[PyverbsQueuePair]:
        pairs: list[PyverbsQueuePair] = []
        with _destroyed_on_error(pairs):
            for place in places:
                pairs.append(self.adapters[place].pair(place, self.options))  # noqa: PERF401
        return pairs

    def _details(self, pairs: Sequence[PyverbsQueuePair]) -> bytes:
        offers = tuple(pair.offer for pair in pairs)
        return msgspec.msgpack.encode(RdmaDetails(len(self.adapters), offers))

    def _path(
        self,
        peer: NodeLife,
        number: int,
        theirs: Sequence[RegionCard],
        pairs: Sequence[PyverbsQueuePair],
        details: RdmaDetails,
    ) -> RdmaPath:
        path = RdmaPath(
            peer,
            number,
            ours=self.cards,
            theirs=theirs,
            grants=self.grants,
            forget=self.forget,
            ask=self.ask,
        )
        reach = [
            RailRegions(pair.adapter.regions, remote_regions(theirs, offer, details.devices))
            for pair, offer in zip(pairs, details.offers, strict=True)
        ]
        for pair, offer in zip(pairs, details.offers, strict=True):
            pair.connect(offer)
        rails = [Rail(pair, regions, path) for pair, regions in zip(pairs, reach, strict=True)]
        path.rails, path.peer_rails = rails, len(rails)
        path.stripe = min(STRIPE_BYTES, *(pair.adapter.longest for pair in pairs))
        path.patience, path.transport = PATIENCE, self
        return path

    # ------------------------------------------------------------------ the end

    async def close(self) -> None:
        first = not self.closed
        await super().close()
        if not first:
            return
        with contextlib.suppress(TransferError):
            if self._opening is not None:
                await asyncio.shield(self._opening)
        loop = asyncio.get_running_loop()
        for adapter in self.adapters:
            loop.remove_reader(adapter.device.async_fd)
        if not self._shared:
            await loop.run_in_executor(self._thread, self._adapters.close)
        self._thread.shutdown(wait=False)


def remote_regions(cards: Sequence[RegionCard], offer: RailOffer, devices: int) -> list[array[int]]:
    """The peer's pools as the queue pairs on one of its adapters reach them. Errors: `PlanError` if
    keys are missing."""
    regions = []
    for card in cards:
        each = len(card.keys) // devices
        if not each or len(card.keys) % devices or offer.device >= devices or not card.slice:
            raise PlanError(f"a pool has {len(card.keys)} keys for {devices} adapters")
        keys = card.keys[offer.device * each : (offer.device + 1) * each]
        regions.append(region_slices(card.address, card.slice, keys))
    return regions


def _concerns(path: RdmaPath, adapter: Adapter, element: int) -> bool:
    """True if an adapter's event is about this path."""
    mine = [rail.pair for rail in path.rails if rail.pair.adapter is adapter]
    return any(element in (0, pair.raw.pair, pair.raw.queue) for pair in mine)


def _read(details: bytes) -> RdmaDetails:
    try:
        return msgspec.msgpack.decode(details, type=RdmaDetails)
    except msgspec.MsgspecError as error:
        raise TransferRefused.at("", "the peer over rdma", "connect", str(error)) from error


@contextlib.contextmanager
def _destroyed_on_error(pairs: Sequence[PyverbsQueuePair]) -> Any:
    """Destroys queue pairs if no path comes of them."""
    try:
        yield
    except BaseException:
        for pair in pairs:
            pair.destroy()
        raise
