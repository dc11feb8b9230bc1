"""What becomes of shared device memory: by CUDA IPC after its owner was killed, as a DMA-BUF."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from bench.gpu.probes.base import Row, guarded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.gpu.probes.base import Probe
    from pdserve.transfer.cuda.driver import CudaIpcExport
    from pdserve.transfer.cuda.nvidia import NvidiaDriver

ROOT = Path(__file__).parents[3]
SIZE = 1 << 28
PATTERN = bytes(range(256)) * 16
WAIT = 30.0
"""Seconds in which the owner has to answer."""
OWNER = "from bench.gpu.probes import sharing; sharing.own()"


def ask_dma_buf(probe: Probe) -> Iterator[Row]:
    """The attributes that name support, and an export of the whole of an allocation."""
    probe.require_cuda()
    driver = _driver()
    handle = driver.asked("cuDeviceGet", 0)
    for name in (
        "DMA_BUF_SUPPORTED",
        "GPU_DIRECT_RDMA_SUPPORTED",
        "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS",
        "GPU_DIRECT_RDMA_WRITES_ORDERING",
    ):
        attribute = getattr(driver.cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        value = driver.asked("cuDeviceGetAttribute", attribute, handle)
        yield Row(name, float(value))
    yield from guarded("exporting a DMA-BUF", lambda: _export(driver))


def _export(driver: NvidiaDriver) -> Iterator[Row]:
    address = driver.allocate(SIZE)
    kind = driver.cuda.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    try:
        file = int(driver.asked("cuMemGetHandleForAddressRange", address, SIZE, kind, 0))
        size = os.lseek(file, 0, os.SEEK_END)
        os.close(file)
    finally:
        driver.free(address)
    yield Row("exporting a DMA-BUF", size / 2**20, "MiB", "size of the descriptor")


def ask_ipc(probe: Probe) -> Iterator[Row]:
    """Memory of a process that others have open, before and after the process is killed.

    It comes last: a fault would leave this process's context unusable.
    """
    probe.require_cuda()
    driver = _driver()
    beside = driver.allocate(1 << 21)
    paths = os.pathsep.join((str(ROOT), str(ROOT / "engines")))
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
        text=True,
    )
    try:
        exported = _exported(owner)
        address = driver.open(exported, beside)
        yield _look(driver, address, "while the owner lives")
        free = torch.cuda.mem_get_info()[0]
        owner.kill()
        owner.wait(WAIT)
        time.sleep(1.0)  # what is asked is what the driver does by itself in that time
        freed = torch.cuda.mem_get_info()[0] - free
        note = "the owner's context and, if nothing holds them, its 256 MiB"
        yield Row("IPC, memory free again after the death", freed / 2**20, "MiB", note)
        yield _look(driver, address, "a second after the owner was killed")
        driver.close(exported, address, beside)
        yield Row(
            "IPC, memory free again after closing",
            (torch.cuda.mem_get_info()[0] - free) / 2**20,
            "MiB",
            "both together",
        )
    finally:
        owner.kill()
        owner.wait(WAIT)


def _look(driver: NvidiaDriver, address: int, when: str) -> Row:
    found = driver.read(address, len(PATTERN))
    return Row(f"IPC, bytes intact {when}", float(found == PATTERN), "of 1")


def _exported(owner: subprocess.Popen[str]) -> CudaIpcExport:
    from pdserve.transfer.cuda.driver import CudaIpcExport

    assert owner.stdout is not None
    return msgspec.msgpack.decode(bytes.fromhex(owner.stdout.readline()), type=CudaIpcExport)


def own() -> None:
    """The owner's side: allocates, fills, tells how to open it, and waits to be killed."""
    driver = _driver()
    address = driver.allocate(SIZE)
    driver.write(address, PATTERN)
    print(msgspec.msgpack.encode(driver.export(address, SIZE)).hex(), flush=True)
    # Without its parent the owner ends by itself, too.
    sys.stdin.read()


def _driver() -> NvidiaDriver:
    from pdserve.transfer.cuda.nvidia import NvidiaDriver

    driver = NvidiaDriver()
    driver.on(0)
    return driver
