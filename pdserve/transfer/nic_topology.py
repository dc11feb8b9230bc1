"""Reads which networks this machine's RDMA adapters are on, from sysfs.

Opens no device. Reports two fabrics only where they are certainly separate: two RoCE adapters may
or may not reach each other through routers, InfiniBand adapters need the same subnet, and the two
kinds never connect.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import Final

__all__ = ["fabrics", "interface_of"]

_ACTIVE: Final = "4:"
_SUBNET: Final = 20
"""Characters of a GID: its first 64 bits are the subnet's prefix."""
_SIOCGIFADDR: Final = 0x8915
_IPV6: Final = Path("/proc/net/if_inet6")


def fabrics(adapters: Path) -> tuple[str, ...]:
    """The fabrics that the active ports of these adapters are on, without duplicates; empty:
    unknown."""
    found: set[str] = set()
    for port in sorted(adapters.glob("*/ports/*")):
        try:
            if not (port / "state").read_text("ascii").startswith(_ACTIVE):
                continue
            layer = (port / "link_layer").read_text("ascii").strip()
            gid = (port / "gids/0").read_text("ascii").strip()
        except OSError:
            continue
        found.add(f"InfiniBand subnet {gid[: _SUBNET - 1]}" if layer == "InfiniBand" else "RoCE")
    return tuple(sorted(found))


def interface_of(host: str) -> str:
    """The network interface that has an address, given as number or name; empty: none here."""
    try:
        _, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        wanted = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except (OSError, ValueError):
        return ""
    if wanted.version == 6:
        return _with_ipv6(wanted.packed.hex())
    for _, name in socket.if_nameindex():
        if _ipv4_of(name) == wanted.packed:
            return name
    return ""


def _ipv4_of(interface: str) -> bytes:
    """Its first address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return b""
    return answer[20:24]


def _with_ipv6(address: str) -> str:
    try:
        lines = _IPV6.read_text("ascii").splitlines()
    except OSError:
        return ""
    found = [line.split() for line in lines if line.startswith(address)]
    return found[0][-1] if found else ""
