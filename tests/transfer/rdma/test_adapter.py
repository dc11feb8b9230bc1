"""How pools are registered with an adapter; libibverbs is played."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import TransferError
from pdserve.testing.kv_oracle import layouts
from pdserve.transfer.base import Region
from pdserve.transfer.copy_plan import block_bytes
from pdserve.transfer.cuda.driver import DmaBufExport
from pdserve.transfer.rdma import adapter as adapters
from pdserve.transfer.rdma.adapter import Adapter
from pdserve.transfer.rdma.ibverbs_ffi import IbvDevice, MemoryRegion

if TYPE_CHECKING:
    from pdserve.ids import Bytes

(LAYOUT,) = layouts(2, 1)
BLOCK = block_bytes(LAYOUT)
DEVICE = Region(LAYOUT, 4, address=1 << 40)
BUFFER = DmaBufExport(fd=9, offset=4096)

Registered = tuple[int, "Bytes", int | None, "Bytes"]
"""Address, size, descriptor and offset in it."""


class Library:
    """Notes what is registered."""

    def __init__(self) -> None:
        self.registered: list[Registered] = []
        self.refuses_dmabuf = 0
        """An error number; 0: it does not."""

    def register(
        self,
        device: object,
        address: int,
        size: Bytes,
        *,
        dmabuf: int | None = None,
        offset: Bytes = 0,
    ) -> MemoryRegion:
        if dmabuf is not None and self.refuses_dmabuf:
            raise OSError(self.refuses_dmabuf, os.strerror(self.refuses_dmabuf))
        self.registered.append((address, size, dmabuf, offset))
        return MemoryRegion(1, len(self.registered), 100 + len(self.registered))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    played = Library()
    monkeypatch.setattr(adapters, "register", played.register)
    monkeypatch.setattr(adapters, "has_peermem", lambda: False)
    return played


def opened() -> Adapter:
    """An adapter as it is after its port has been read."""
    made: Any = Adapter.__new__(Adapter)
    made.name, made.device = "mlx5_0:1", IbvDevice(1, 2, 3)
    made.regions, made._registered, made._remote_keys = [], [], []
    made.verbs = SimpleNamespace(errors=(OSError,))
    adapter: Adapter = made
    return adapter


def test_device_memory_is_registered_by_its_dmabuf_slice_by_slice(library: Library) -> None:
    adapter = opened()
    adapter.register([DEVICE], [BUFFER], 3 * BLOCK)
    assert library.registered == [
        (1 << 40, 3 * BLOCK, 9, 4096),
        ((1 << 40) + 3 * BLOCK, BLOCK, 9, 4096 + 3 * BLOCK),
    ]
    assert adapter.remote_keys(0) == (101, 102)


def test_without_one_it_is_registered_by_its_address(library: Library) -> None:
    opened().register([DEVICE], [None], 4 * BLOCK)
    assert library.registered == [(1 << 40, 4 * BLOCK, None, 0)]


def test_an_adapter_that_takes_none_gets_the_address_if_a_module_connects_both(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library.refuses_dmabuf = errno.EOPNOTSUPP
    with pytest.raises(TransferError, match=r"not supported \(modprobe nvidia-peermem"):
        opened().register([DEVICE], [BUFFER], 4 * BLOCK)
    assert not library.registered
    monkeypatch.setattr(adapters, "has_peermem", lambda: True)
    opened().register([DEVICE], [BUFFER], 4 * BLOCK)
    assert library.registered == [(1 << 40, 4 * BLOCK, None, 0)]
    assert "mlx5_0:1 takes no DMA-BUF" in caplog.text
