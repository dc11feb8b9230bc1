"""libc's memcpy in one thread: the limit of whatever copies once.

`piece` copies as many bytes from one run to another; `blocks` copies block by block, as lists of
blocks must be.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

from bench.transfer_arms.base import BLOCK, Arm, Pool, Talk, addresses, run

if TYPE_CHECKING:
    from collections.abc import Sequence


class Memcpy(Arm):
    name = "memcpy"
    about = "libc's memcpy in one thread, of one piece or block by block"
    modes = ("piece", "blocks")

    def connect(self, partner: Talk | None) -> None:
        self.copy = ctypes.CDLL(None).memcpy
        self.copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self.copy.restype = ctypes.c_void_p
        self.ours, self.theirs = Pool(1), Pool(2)
        self.last = (0, 0)

    def move(self, mode: str, here: Sequence[int], there: Sequence[int]) -> float:
        if mode == "piece":
            return self._piece(len(here), here[-1])
        pairs = list(
            zip(
                addresses(self.theirs.address, there),
                addresses(self.ours.address, here),
                strict=True,
            )
        )
        self.last = (there[-1], there[-1])
        started = time.perf_counter()
        for to, from_ in pairs:
            self.copy(to, from_, BLOCK)
        return time.perf_counter() - started

    def _piece(self, count: int, last: int) -> float:
        """Copies one run that ends with the list's last block, or begins at the pool's start."""
        first = max(0, last - count + 1)
        end = first + count - 1
        self.mark(end, bytes(self.ours.head(last)))
        self.last = (end, end)
        to, from_, size = self.theirs.at(first), self.ours.at(first), count * BLOCK
        started = time.perf_counter()
        self.copy(to, from_, size)
        return time.perf_counter() - started

    def mark(self, here: int, value: bytes) -> None:
        self.ours.head(here)[:] = value

    def found(self, there: int, partner: Talk | None) -> bytes:
        return bytes(self.theirs.head(self.last[1]))


if __name__ == "__main__":
    run(Memcpy(), alone=True)
