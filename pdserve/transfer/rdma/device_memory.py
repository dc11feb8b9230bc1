"""Makes KV pools in GPU memory ready for an RDMA adapter, or says why that is not possible.

An adapter can register such a pool in two ways: by the DMA-BUF that the GPU's driver exports, or by
its address, if the kernel module `nvidia-peermem` is loaded. Either way the GPU must see the data
before the adapter reports the write as complete.

This has never run on a GPU.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.transfer.cuda.driver import CudaError, DmaBufExport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.ids import Bytes
    from pdserve.transfer.base import Region

    class Driver(Protocol):
        """The part of `cuda.nvidia.NvidiaDriver` that is used here."""

        def prepare_for_rdma(self, address: int) -> None: ...
        def export_dmabuf(self, address: int, size: Bytes) -> DmaBufExport: ...


__all__ = ["MODULES", "exported", "has_peermem", "unsupported_reason"]

_log = logging.getLogger(__name__)

MODULES: Final = Path("/sys/module")
_NAMES: Final = ("nvidia_peermem", "nv_peer_mem")
"""The second is what it was called before the driver brought it."""


def _nvidia() -> Driver:
    from pdserve.transfer.cuda.nvidia import NvidiaDriver

    return NvidiaDriver()


def has_peermem(modules: Path = MODULES) -> bool:
    """Whether adapters can register device memory by its address."""
    return any((modules / name).is_dir() for name in _NAMES)


def unsupported_reason(
    regions: Sequence[Region],
    modules: Path = MODULES,
    make_driver: Callable[[], Driver] = _nvidia,
) -> str:
    """Why these pools cannot be registered; empty: they can, or are in host memory. Prepares pools
    in device memory for RDMA."""
    ours = [region for region in regions if region.view is None]
    if not ours:
        return ""
    try:
        driver = make_driver()
        for region in ours:
            driver.prepare_for_rdma(region.address)
    except ImportError as error:
        return f"cuda-python cannot be imported ({error}): pip install 'pdserve[cuda]'"
    except (CudaError, RuntimeError) as error:  # the second: how the bindings miss a library
        return f"the pool is in device memory: {error}"
    return "" if has_peermem(modules) else _lacks_dmabuf(ours, driver)


def _lacks_dmabuf(regions: Sequence[Region], driver: Driver) -> str:
    """Why DMA-BUF, the only way that is left, cannot be used; empty: it can."""
    try:
        for region in regions:
            os.close(driver.export_dmabuf(region.address, region.size).fd)
    except CudaError as error:
        return (
            f"the pool is in device memory: {error}; and the kernel module nvidia-peermem is not "
            "loaded (modprobe nvidia-peermem)"
        )
    return ""


@contextmanager
def exported(
    regions: Sequence[Region], make_driver: Callable[[], Driver] = _nvidia
) -> Iterator[list[DmaBufExport | None]]:
    """The DMA-BUF of each pool; None for one in host memory, or whose driver exports none. The
    descriptors are closed at the end of the block."""
    driver = cache(make_driver)
    with ExitStack() as stack:
        buffers: list[DmaBufExport | None] = []
        for region in regions:
            buffer = _dmabuf_of(region, driver) if region.view is None else None
            if buffer is not None:
                stack.callback(os.close, buffer.fd)
            buffers.append(buffer)
        yield buffers


def _dmabuf_of(region: Region, driver: Callable[[], Driver]) -> DmaBufExport | None:
    """None where the driver, or the library that calls it, is missing too: the adapter then says
    whether it takes the address."""
    try:
        return driver().export_dmabuf(region.address, region.size)
    except (CudaError, ImportError, RuntimeError) as error:
        _log.info("device memory is registered by its address (nvidia-peermem): %s", error)
        return None
