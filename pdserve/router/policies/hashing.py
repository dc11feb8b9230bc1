"""Rendezvous hashing: a key's order of preference among workers, the same at every router.

Each (key, worker) has a score, the highest is the key's home (Thaler and Ravishankar, "Using
name-based mappings to increase hit rates", IEEE/ACM Transactions on Networking 6, 1998). A worker
that comes takes only keys that now prefer it, one that goes gives up only its own.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.router.policies.base import WorkerView

__all__ = ["home", "key_of"]

_MASK: Final = (1 << 64) - 1
_ODD: Final = 0x9E3779B97F4A7C15


def key_of(data: bytes) -> int:
    """64 bits of whatever a request is to be held together by."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def home(key: int, workers: Sequence[WorkerView]) -> WorkerView:
    """Whom the key prefers. O(workers); at least one."""
    return max(workers, key=lambda worker: _score(key, worker.node))


def _score(key: int, node: str) -> int:
    """Multiply and shift: enough to make scores of one key independent, given hashed inputs."""
    mixed = ((key ^ _hash(node)) * _ODD) & _MASK
    mixed ^= mixed >> 29
    return (mixed * _ODD) & _MASK


@lru_cache(maxsize=4096)
def _hash(node: str) -> int:
    return key_of(node.encode())
