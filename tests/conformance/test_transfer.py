"""Every back end of the transfer port keeps its promises."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from pdserve.testing.transfer_conformance import TransferConformance
from pdserve.transfer.fake import FakeFabric, FakeTransport
from pdserve.transfer.shm import ShmTransport
from pdserve.transfer.tcp import TcpTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.transfer.base import Ask, PeerKey, Region, Transport


class TestFake(TransferConformance):
    def world(self, *args, **kwargs):
        self.fabric = FakeFabric(Random(1))
        return super().world(*args, **kwargs)

    def make(self, key: PeerKey, regions: Sequence[Region], ask: Ask) -> Transport:
        return FakeTransport(key.node, key.epoch, regions, ask, self.fabric, key=key, stripe=300)


class TestShm(TransferConformance):
    def make(self, key: PeerKey, regions: Sequence[Region], ask: Ask) -> Transport:
        return ShmTransport(key.node, key.epoch, regions, ask, verify="all")


class TestTcp(TransferConformance):
    def make(self, key: PeerKey, regions: Sequence[Region], ask: Ask) -> Transport:
        return TcpTransport(key.node, key.epoch, regions, ask, host="127.0.0.1")
