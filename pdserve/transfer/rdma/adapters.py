"""Owns this machine's adapters with one engine's pools registered, for all lives of its node.

Registering locks the pools' pages and takes up to minutes. So it is done once, before the engine is
ready, and not for each life of the node. What the peers of one life can reach ends when its queue
pairs are destroyed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import TransferError
from pdserve.transfer.copy_plan import PlanError
from pdserve.transfer.rdma import device_memory, pyverbs_loader
from pdserve.transfer.rdma.adapter import Adapter, QueuePairOptions, slice_bytes
from pdserve.transfer.rdma.negotiate import DeviceName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.transfer import RegionCard
    from pdserve.transfer.base import Region
    from pdserve.transfer.rdma.pyverbs_loader import PyverbsModules

__all__ = ["Adapters"]

_log = logging.getLogger(__name__)


class Adapters:
    """The adapters of one engine. Calls block: use it from one thread at a time."""

    def __init__(
        self,
        regions: Sequence[Region],
        devices: Sequence[str] = (),
        options: QueuePairOptions | None = None,
    ) -> None:
        """`devices`: `name`, `name:port` or `name:port:gid-index`, in the order in which they pair
        with the peers' adapters; empty: all adapters with an active port."""
        self.options = options or QueuePairOptions()
        self.opened: list[Adapter] = []
        """Empty until `open`, and after `close`."""
        self._regions = regions
        self._devices = tuple(devices)

    def open(self) -> None:
        """Open the adapters and register the pools. Idempotent. Errors: `TransferError`; nothing is
        left open then."""
        if self.opened:
            return
        try:
            self._open(pyverbs_loader.load_pyverbs())
            with device_memory.exported(self._regions) as buffers:
                for adapter in self.opened:
                    adapter.register(self._regions, buffers, self.options.slice)
        except BaseException:
            self.close()
            raise

    def _open(self, verbs: PyverbsModules) -> None:
        """Opens the adapters that were named, or all usable ones: many machines have one without
        a cable."""
        refused: TransferError | None = None
        for name in self._names():
            try:
                self.opened.append(Adapter(verbs, name))
            except TransferError as error:
                if self._devices:
                    raise
                refused = error
                _log.info("%s is not used: %s", name, error.message)
        if refused is not None and not self.opened:
            raise refused

    def _names(self) -> list[DeviceName]:
        names = self._devices or tuple(pyverbs_loader.adapter_names())
        if not names:
            raise TransferError.at("", "this node over rdma", "set-up", "there is no RDMA adapter")
        try:
            return [DeviceName.parse(name) for name in names]
        except PlanError as error:
            raise TransferError.at("", "this node over rdma", "set-up", str(error)) from error

    def cards(self) -> tuple[RegionCard, ...]:
        """The pools as peers reach them through these adapters."""
        return tuple(self._card(place) for place in range(len(self._regions)))

    def _card(self, place: int) -> RegionCard:
        region = self._regions[place]
        keys = tuple(key for adapter in self.opened for key in adapter.remote_keys(place))
        address = self.opened[0].regions[place][0]
        size = slice_bytes(region, self.options.slice)
        return msgspec.structs.replace(region.card(keys), address=address, slice=size)

    def close(self) -> None:
        """Unregister the pools and close the adapters; no queue pair may be left. Idempotent.
        Errors: `TransferError`."""
        while self.opened:
            self.opened.pop().close()
