"""Checks whether an RDMA adapter can register a KV pool in GPU memory.

It can if the kernel module `nvidia-peermem` is loaded and the GPU sees the data before the adapter
reports the write as complete. `adapter` also takes DMA-BUF descriptors, which need no such module,
but no engine exports them so far.

This has never run on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.transfer.cuda.driver import CudaError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.transfer.base import Region

    class Driver(Protocol):
        """The part of `cuda.nvidia.NvidiaDriver` that is used here."""

        def prepare_for_rdma(self, address: int) -> None: ...


__all__ = ["MODULES", "unsupported_reason"]

MODULES: Final = Path("/sys/module")
_NAMES: Final = ("nvidia_peermem", "nv_peer_mem")
"""The second is what it was called before the driver brought it."""


def _nvidia() -> Driver:
    from pdserve.transfer.cuda.nvidia import NvidiaDriver

    return NvidiaDriver()


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
    if not any((modules / name).is_dir() for name in _NAMES):
        return (
            "the pool is in device memory and the kernel module nvidia-peermem is not loaded "
            "(modprobe nvidia-peermem); DMA-BUF, which needs no module, is not supported yet"
        )
    try:
        driver = make_driver()
        for region in ours:
            driver.prepare_for_rdma(region.address)
    except ImportError as error:
        return f"cuda-python cannot be imported ({error}): pip install 'pdserve[cuda]'"
    except (CudaError, RuntimeError) as error:  # the second: how the bindings miss a library
        return f"the pool is in device memory: {error}"
    return ""
