"""Every back end of the transfer port keeps its promises."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.testing.device_memory import DeviceMemory
from pdserve.testing.fake_rdma import FakeFabric, FakeTransport
from pdserve.testing.transfer_conformance import TransferConformance
from pdserve.transfer.cuda import nvidia
from pdserve.transfer.cuda.nvidia import NvidiaDriver
from pdserve.transfer.same_host.cuda_ipc import CudaIpcTransport
from pdserve.transfer.same_host.shm import ShmTransport
from pdserve.transfer.tcp import transport
from pdserve.transfer.tcp.transport import TcpTransport
from tests.net.certificates import tls_of
from tests.support.fake_cuda import FakeCuda

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import NodeLife
    from pdserve.transfer.base import CallPeer, KvTransport, Region


class TestFake(TransferConformance):
    def world(self, *args, **kwargs):
        self.fabric = FakeFabric(Random(1))
        return super().world(*args, **kwargs)

    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        return FakeTransport(key.node, key.epoch, regions, ask, self.fabric, key=key, stripe=300)


class TestShm(TransferConformance):
    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        return ShmTransport(key.node, key.epoch, regions, ask, verify="all")


class TestTcp(TransferConformance):
    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        return TcpTransport(key.node, key.epoch, regions, ask, host="127.0.0.1")


class TestTcpInThreads(TestTcp):
    """As large parts move, whatever their size."""

    @pytest.fixture(autouse=True)
    def nothing_is_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transport, "_INLINE", -1)


class TestTcpUnderTls(TransferConformance):
    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
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

    def driver(self, key: NodeLife) -> FakeCuda:
        name = key.node
        return self.drivers.setdefault(name, FakeCuda(Random(str(name)), str(name).encode()))

    def new_memory(self, key: NodeLife, blocks: int, size: int) -> DeviceMemory:
        return DeviceMemory(self.driver(key), blocks, size)

    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        driver = self.driver(key)
        return CudaIpcTransport(key.node, key.epoch, regions, ask, verify="all", driver=driver)


@pytest.mark.gpu
@pytest.mark.skipif(
    nvidia.unavailable_reason() is not None, reason=str(nvidia.unavailable_reason())
)
class TestCudaIpc(TransferConformance):
    """On a GPU; both nodes are in this process, which opens its own memory directly."""

    @pytest.fixture(autouse=True)
    def device(self):
        self.driver = NvidiaDriver()

    def new_memory(self, key: NodeLife, blocks: int, size: int) -> DeviceMemory:
        return DeviceMemory(self.driver, blocks, size)

    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        driver = self.driver
        return CudaIpcTransport(key.node, key.epoch, regions, ask, verify="all", driver=driver)
