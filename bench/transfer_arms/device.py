"""pdserve's `cuda_ipc` between two processes on one GPU, with blocks of an 8B model in bfloat16.

Otherwise as in `ours.py`.
"""

from __future__ import annotations

import os
import sys
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

sys.path.insert(0, os.getcwd())

from bench.transfer_arms.ours import TOKENS, End, Ours, as_verify, main
from pdserve.messages.transfer import RankKvLayout
from pdserve.transfer.base import Region
from pdserve.transfer.cuda.nvidia import NvidiaDriver
from pdserve.transfer.same_host.cuda_ipc import CudaIpcTransport

if TYPE_CHECKING:
    from pdserve.ids import NodeLife
    from pdserve.transfer.cuda.driver import CudaDriver

BLOCK = 4 << 20
BLOCKS = 512
"""Of 32 tokens; 2 GiB at each end."""
LAYOUT = RankKvLayout(content="bench", layers=32, heads=8, tokens=TOKENS, dim=128, itemsize=2)


class DeviceEnd(End):
    """One process: its pool on the GPU, and a transport for each mode."""

    layout = LAYOUT

    def __init__(self, key: NodeLife, value: int, ask: Any) -> None:
        self.driver = self.make_driver()
        self.address = self.driver.allocate(BLOCK * BLOCKS)
        piece = Random(value).randbytes(BLOCK)
        for block in range(BLOCKS):
            self.mark(block, piece)
        regions = [Region(LAYOUT, BLOCKS, address=self.address)]
        self.transports = {
            f"cuda_ipc/{mode}": CudaIpcTransport(
                *key, regions, ask(f"cuda_ipc/{mode}"), verify=as_verify(mode), driver=self.driver
            )
            for mode in ("off", "sample")
        }

    def make_driver(self) -> CudaDriver:
        """The driver of this process's first GPU."""
        driver = NvidiaDriver()
        driver.on(0)
        return driver

    def head(self, block: int) -> bytes:
        return self.driver.read(self.address + block * BLOCK, 64)

    def mark(self, block: int, value: bytes) -> None:
        self.driver.write(self.address + block * BLOCK, value)


class OnDevice(Ours):
    about = "pdserve's cuda_ipc, from `deliver` to `done`"
    modes: ClassVar[tuple[str, ...]] = ("cuda_ipc/off", "cuda_ipc/sample")
    block: ClassVar[int] = BLOCK
    blocks: ClassVar[int] = BLOCKS
    make_end: ClassVar[type[End]] = DeviceEnd


if __name__ == "__main__":
    main(OnDevice())
