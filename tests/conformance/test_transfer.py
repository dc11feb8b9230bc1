"""Every back end of the transfer port keeps its promises."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.testing.device_memory import DeviceMemory
from pdserve.testing.fake_rdma import FakeFabric, FakeTransport
from pdserve.testing.transfer_conformance import TransferConformance
from pdserve.transfer.cuda import host_staging, nvidia
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

needs_gpu = pytest.mark.skipif(
    nvidia.unavailable_reason() is not None, reason=str(nvidia.unavailable_reason())
)


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


class OnFakeDevices(TransferConformance):
    """Two processes, as their drivers see it, on devices that copy as late as they may."""

    @pytest.fixture(autouse=True)
    def devices(self):
        self.drivers: dict[str, FakeCuda] = {}
        yield
        for driver in self.drivers.values():
            assert not driver.broken
            assert driver.mapped == 0, "memory that was opened or allocated is left"

    def driver(self, key: NodeLife) -> FakeCuda:
        name = str(key.node)
        if name not in self.drivers:
            self.drivers[name] = FakeCuda(Random(name), name.encode(), hidden=True)
        return self.drivers[name]

    def new_memory(self, key: NodeLife, blocks: int, size: int) -> DeviceMemory:
        return DeviceMemory(self.driver(key), blocks, size)


class TestCudaIpcFake(OnFakeDevices):
    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        driver = self.driver(key)
        return CudaIpcTransport(key.node, key.epoch, regions, ask, verify="all", driver=driver)


class TestTcpStagedFake(OnFakeDevices):
    """With buffers so small that most runs are cut."""

    @pytest.fixture(autouse=True)
    def small_buffers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_staging, "BUFFER", 100)

    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        driver = self.driver(key)
        return TcpTransport(key.node, key.epoch, regions, ask, host="127.0.0.1", driver=driver)


class OnDevice(TransferConformance):
    """On a GPU; both nodes are in this process."""

    @pytest.fixture(autouse=True)
    def device(self):
        self.driver = NvidiaDriver()

    def new_memory(self, key: NodeLife, blocks: int, size: int) -> DeviceMemory:
        return DeviceMemory(self.driver, blocks, size)


@needs_gpu
@pytest.mark.gpu
class TestCudaIpc(OnDevice):
    """A process opens its own memory directly."""

    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        driver = self.driver
        return CudaIpcTransport(key.node, key.epoch, regions, ask, verify="all", driver=driver)


@needs_gpu
@pytest.mark.gpu
class TestTcpStaged(OnDevice):
    def make(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        driver = self.driver
        return TcpTransport(key.node, key.epoch, regions, ask, host="127.0.0.1", driver=driver)
