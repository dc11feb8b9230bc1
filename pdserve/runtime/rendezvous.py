"""Assigns keys to nodes by rendezvous hashing, the same on every node.

Each (key, node) has a score; the key belongs to the node with the highest (Thaler and Ravishankar,
"Using name-based mappings to increase hit rates", IEEE/ACM Transactions on Networking 6, 1998). A
new node takes only keys that now prefer it, and a lost node gives up only its own. Pure.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final

__all__ = ["key_of", "score"]

_MASK: Final = (1 << 64) - 1
_ODD: Final = 0x9E3779B97F4A7C15


def key_of(data: bytes) -> int:
    """Hashes a key to 64 bits."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def score(key: int, node: str) -> int:
    """The score of a node for a key. Multiply and shift: enough to make the scores of one key
    independent, given hashed inputs.
    """
    mixed = ((key ^ _hash(node)) * _ODD) & _MASK
    mixed ^= mixed >> 29
    return (mixed * _ODD) & _MASK


@lru_cache(maxsize=4096)
def _hash(node: str) -> int:
    return key_of(node.encode())
