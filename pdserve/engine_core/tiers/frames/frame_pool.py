"""Shows the valid frames of a host tier as a pool that peers can be served from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.kv.tiers.host_index import HostIndex

__all__ = ["FramePool"]


class FramePool:
    """Implements `kv_fetch.ports.ServedPool`. Holding a frame claims it."""

    def __init__(self, host: HostIndex, first: int = 0) -> None:
        """`first`: the region's block that is frame 0."""
        self._host = host
        self._first = first

    @property
    def num_blocks(self) -> int:
        """Frames of the tier."""
        return self._host.capacity

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest leading run of `hashes` that the tier has."""
        found: list[int] = []
        for block_hash in hashes:
            frame = self._host.frame(block_hash)
            if frame is None:
                break
            found.append(self._first + frame)
        return found

    def parent(self, block: int) -> bytes:
        """Empty, which is no block's name: a frame can be held without those before it."""
        return b""

    def acquire(self, blocks: Sequence[int]) -> None:
        """Claim these frames."""
        for block in blocks:
            self._host.claim(block - self._first)

    def release(self, blocks: Sequence[int]) -> None:
        """Give the claims back."""
        for block in blocks:
            self._host.release(block - self._first)
