"""Checks the `Host`, `Origin` and `Sec-Fetch-Site` headers of a request against allowed names.

Any web page can send requests to a server on its reader's machine. With a name that resolves to
127.0.0.1 (DNS rebinding) the page can also read the answers. API keys prevent both; without keys,
these browser headers say where the page comes from. Other programs send no `Origin`. Pure.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["HostRule", "OriginRule", "host_name", "is_loopback"]

_LOOPBACK: Final = "localhost"
_HOSTS_REMEDY: Final = "call it by its address, or start the server with --allowed-hosts={}"
_ORIGIN_REMEDY: Final = (
    "start the server with --cors-origins={} if pages of it may call, or with --api-keys-file"
)


class HostRule:
    """Names that a request's `Host` header may have."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: allowed beside addresses and loopback names; `*.name` is everything below it,
        `*` everything."""
        self._names = frozenset(name.lower().rstrip(".") for name in names if name)
        self._below = tuple(name[1:] for name in self._names if name.startswith("*."))
        self._all = "*" in self._names

    def refusal(self, host: str | None) -> str | None:
        """Cause and remedy if a request with this `Host` is refused, else None. A request without
        `Host` does not come from a browser."""
        if not host or self._all:
            return None
        name = host_name(host)
        if name in self._names or _is_local(name) or name.endswith(self._below or ("\0",)):
            return None
        shown = _shown(name)
        return f"this server does not answer to the name {shown!r}; {_HOSTS_REMEDY.format(shown)}"


class OriginRule:
    """Origins whose pages may send requests."""

    def __init__(self, origins: Iterable[str]) -> None:
        """`origins`: allowed beside this server's own pages; `*` is all."""
        self._origins = frozenset(origins)
        self._all = "*" in self._origins

    def refusal(self, headers: Mapping[str, str]) -> str | None:
        """Cause and remedy if a request with these headers is refused, else None."""
        if self._all:
            return None
        origin = headers.get("Origin")
        if origin is None:
            if headers.get("Sec-Fetch-Site") != "cross-site":
                return None
            return f"pages of other sites may not call; {_ORIGIN_REMEDY.format('ORIGIN')}"
        if origin in self._origins or _same(origin, headers.get("Host")):
            return None
        shown = _shown(origin)
        return f"pages of {shown!r} may not call; {_ORIGIN_REMEDY.format(shown)}"


def host_name(host: str) -> str:
    """The name in a `Host` header, without its port, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name = host if host.count(":") > 1 else host.partition(":")[0]
    return name.lower().rstrip(".")


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a socket that listens on `host`."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host_name(host) == _LOOPBACK


def _is_local(name: str) -> bool:
    """True for an address, under which no other site can be reached, and for a name that browsers
    never ask DNS for (RFC 6761, 6.3)."""
    if name == _LOOPBACK or name.endswith("." + _LOOPBACK):
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _same(origin: str, host: str | None) -> bool:
    return host is not None and origin.partition("://")[2].lower() == host.lower()


def _shown(text: str) -> str:
    return text if len(text) <= 100 else text[:99] + "…"
