"""Every back end of the transfer port keeps its promises."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.testing.device_memory import DeviceMemory
from pdserve.testing.fake_cuda import FakeCuda
from pdserve.testing.transfer_conformance import TransferConformance
from pdserve.transfer import cuda_ipc
from pdserve.transfer.cuda.nvidia import NvidiaDriver
from pdserve.transfer.cuda_ipc import CudaIpcTransport
from pdserve.transfer.fake import FakeFabric, FakeTransport
from pdserve.transfer.shm import ShmTransport
from pdserve.transfer.tcp import TcpTransport
from tests.net.certificates import tls_of

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


class TestTcpUnderTls(TransferConformance):
    def make(self, key: PeerKey, regions: Sequence[Region], ask: Ask) -> Transport:
        tls = tls_of(str(key.node))
        return TcpTransport(key.node, key.epoch, regions, ask, host="127.0.0.1", tls=tls)


class TestCudaIpcFake(TransferConformance):
    """Two processes, as their drivers see it, on a device that copies as late as it may."""

    @pytest.fixture(autouse=True)
    def devices(self):
        self.drivers: dict[object, FakeCuda] = {}
        yield
        for driver in self.drivers.values():
            assert not driver.broken
            assert driver.mapped == 0, "memory that was opened or allocated is left"

    def driver(self, key: PeerKey) -> FakeCuda:
        name = key.node
        return self.drivers.setdefault(name, FakeCuda(Random(str(name)), str(name).encode()))

    def new_memory(self, key: PeerKey, blocks: int, size: int) -> DeviceMemory:
        return DeviceMemory(self.driver(key), blocks, size)

    def make(self, key: PeerKey, regions: Sequence[Region], ask: Ask) -> Transport:
        driver = self.driver(key)
        return CudaIpcTransport(key.node, key.epoch, regions, ask, verify="all", driver=driver)


@pytest.mark.gpu
@pytest.mark.skipif(cuda_ipc.available() is not None, reason=str(cuda_ipc.available()))
class TestCudaIpc(TransferConformance):
    """On a GPU; both nodes are in this process, which opens its own memory directly."""

    @pytest.fixture(autouse=True)
    def device(self):
        self.driver = NvidiaDriver()

    def new_memory(self, key: PeerKey, blocks: int, size: int) -> DeviceMemory:
        return DeviceMemory(self.driver, blocks, size)

    def make(self, key: PeerKey, regions: Sequence[Region], ask: Ask) -> Transport:
        driver = self.driver
        return CudaIpcTransport(key.node, key.epoch, regions, ask, verify="all", driver=driver)
