"""Shows the valid frames of a host tier as a pool that peers can be served from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.kv.tiers.host_index import HostIndex

__all__ = ["FramePool"]


class FramePool:
    """Implements `kv_fetch.ports.ServedPool`. Holding a frame claims it."""

    def __init__(self, host: HostIndex) -> None:
        self._host = host

    @property
    def num_blocks(self) -> int:
        """Frames of the tier."""
        return self._host.capacity

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Frames of the longest leading run of `hashes` that the tier has."""
        found: list[int] = []
        for block_hash in hashes:
            frame = self._host.frame(block_hash)
            if frame is None:
                break
            found.append(frame)
        return found

    def parent(self, block: int) -> bytes:
        """Empty, which is no block's name: a frame can be held without those before it."""
        return b""

    def acquire(self, blocks: Sequence[int]) -> None:
        """Claim these frames."""
        for frame in blocks:
            self._host.claim(frame)

    def release(self, blocks: Sequence[int]) -> None:
        """Give the claims back."""
        for frame in blocks:
            self._host.release(frame)
