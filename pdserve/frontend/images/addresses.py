"""Says which IP addresses a frontend may fetch from: public ones, and nothing else.

A request names an address, and the frontend stands inside of the operator's network: without this
check a client could read what only that network can (SSRF). Addresses that carry another one
(IPv4-mapped, 6to4, Teredo, NAT64) are judged by both. Pure.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_public"]

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_REFUSED: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
            *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24"),
            *("192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
            *("224.0.0.0/4", "240.0.0.0/4"),
            *("::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32"),
            *("3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
        ),
    )
)
"""Special-purpose addresses of RFC 6890 and its registries, multicast, and old private forms.
Python's own list differs between its releases, so both are asked."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """True if everybody on the internet can reach this address, as text; False for no address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if found.version == 6 and found.scope_id is not None:
        return False
    return all(map(_is_public, _with_carried(found)))


def _with_carried(address: _Address) -> Iterator[_Address]:
    """The address, and those that it carries. An IPv4-mapped address is only what it carries."""
    if isinstance(address, ipaddress.IPv4Address):
        yield address
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
        return
    if address in _NAT64:
        yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return
    yield address
    if address.sixtofour is not None:
        yield address.sixtofour


def _is_public(address: _Address) -> bool:
    return address.is_global and not any(
        address in network for network in _REFUSED if network.version == address.version
    )
