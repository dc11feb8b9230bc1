"""Bounds the number of unauthenticated connections.

At the bound the host with the most unfinished handshakes loses its oldest one. A host that opens
connections and sends nothing loses only its own. A peer that does the handshake needs milliseconds
for it, so its connection is seldom the oldest of the busiest host. This file only counts: its owner
closes the connection that `add` returns, and each one that exceeds the handshake's deadline.
"""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["PendingHandshakes"]

K = TypeVar("K")


class PendingHandshakes(Generic[K]):
    """Unfinished handshakes, by host, oldest first."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._hosts: dict[str, dict[K, None]] = {}
        self._count = 0
        self.evicted = 0
        """Number of handshakes ended to make room."""

    def __len__(self) -> int:
        return self._count

    def add(self, key: K, host: str) -> K | None:
        """Adds `key`; returns the handshake to end if the bound is reached."""
        victim = self._evict() if self._count >= self._bound else None
        self._hosts.setdefault(host, {})[key] = None
        self._count += 1
        return victim

    def remove(self, key: K, host: str) -> None:
        """Removes a finished handshake; a missing one is ignored."""
        keys = self._hosts.get(host)
        if keys is None or key not in keys:
            return
        del keys[key]
        self._count -= 1
        if not keys:
            del self._hosts[host]

    def drain(self) -> list[K]:
        """Removes and returns all of them."""
        keys = [key for keys in self._hosts.values() for key in keys]
        self._hosts.clear()
        self._count = 0
        return keys

    def _evict(self) -> K:
        busiest = max(self._hosts, key=lambda host: len(self._hosts[host]))
        victim = next(iter(self._hosts[busiest]))
        self.remove(victim, busiest)
        self.evicted += 1
        return victim
