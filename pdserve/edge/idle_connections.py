"""Chooses which idle connection the server closes to make room for a new one.

Only connections without an unanswered request are candidates. At the bound, the host with the most
of them loses its oldest one, so a client that opens many idle sockets only closes its own.
Bookkeeping only: the server closes the connection. `net/handshake_limit.py` does this for links.
"""

from __future__ import annotations

import ipaddress
from typing import Generic, TypeVar

__all__ = ["IdleConnections", "host_of"]

K = TypeVar("K")


class IdleConnections(Generic[K]):
    """Connections without work, by host, the longest idle first."""

    def __init__(self) -> None:
        self._hosts: dict[str, dict[K, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._hosts.values()))

    def add(self, key: K, host: str) -> None:
        """Adds a connection that has become idle."""
        self._hosts.setdefault(host, {})[key] = None

    def remove(self, key: K, host: str) -> None:
        """Removes a connection that has work or is gone; no effect if unknown."""
        keys = self._hosts.get(host)
        if keys is None or key not in keys:
            return
        del keys[key]
        if not keys:
            del self._hosts[host]

    def evict(self, newcomer: K) -> K | None:
        """Removes and returns the connection to close for `newcomer`; None if there is no other."""
        if not self._hosts:
            return None
        busiest = max(self._hosts, key=lambda host: len(self._hosts[host]))
        # If the busiest host has only the newcomer, a connection of another host is closed.
        for host in (busiest, *self._hosts):
            for key in self._hosts[host]:
                if key is not newcomer:
                    self.remove(key, host)
                    return key
        return None


def host_of(peer: object) -> str:
    """The host of a socket from `getpeername`: an IPv4 address, or an IPv6 network of 64 bits,
    which usually belongs to one machine. Empty if unknown."""
    if not isinstance(peer, tuple) or not peer:
        return ""
    host = str(peer[0]).partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
