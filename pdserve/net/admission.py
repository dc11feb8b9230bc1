"""Unauthenticated connections: so many, and no more.

At the bound the host with the most unfinished handshakes loses its oldest one. Whoever opens
connections and says nothing only ends its own; a peer that does the handshake, which takes
milliseconds, is never the oldest of the busiest host for long. Bookkeeping only: `endpoint` closes
what this says, and also whatever exceeds the handshake's deadline.
"""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["Pending"]

K = TypeVar("K")


class Pending(Generic[K]):
    """The unfinished handshakes, by the host they come from, oldest first."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._hosts: dict[str, dict[K, None]] = {}
        self._count = 0
        self.evicted = 0
        """How many were ended for others."""

    def __len__(self) -> int:
        return self._count

    def add(self, key: K, host: str) -> K | None:
        """Remember `key`; returns the one to end instead, if the bound is reached."""
        victim = self._evict() if self._count >= self._bound else None
        self._hosts.setdefault(host, {})[key] = None
        self._count += 1
        return victim

    def remove(self, key: K, host: str) -> None:
        """Its handshake is over, one way or the other; nothing happens if it is not here."""
        keys = self._hosts.get(host)
        if keys is None or key not in keys:
            return
        del keys[key]
        self._count -= 1
        if not keys:
            del self._hosts[host]

    def drain(self) -> list[K]:
        """Take out all of them."""
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
