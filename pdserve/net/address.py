"""Parses and formats `host:port` addresses (IPv6 hosts in brackets), and recognises loopback
hosts.
"""

from __future__ import annotations

import ipaddress

from pdserve.errors import ConfigError

__all__ = ["advertised", "is_loopback", "join", "split", "without_port"]


def split(address: str) -> tuple[str, int]:
    """Splits an address into host and port. Raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    if "://" in address:
        raise ConfigError(f"{address!r} is a URL: write HOST:PORT alone")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{address!r}: an IPv6 host needs brackets, as in [::1]:7000")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{address!r} is not of the form HOST:PORT")
    return host, int(port)


def join(host: str, port: int) -> str:
    """Joins a host and a port to an address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True if `host` cannot be reached from other machines; of names only localhost counts."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def without_port(address: str) -> str:
    """The host of `host:port` or of `host`, with brackets if it has any."""
    host, _, port = address.rpartition(":")
    return host if host and port.isdigit() and not host.endswith(":") else address


def advertised(wanted: str, listening: str) -> str:
    """The address that peers dial: the given one, with the port in use if its own is 0 or
    missing.
    """
    if not wanted:
        return listening
    host = without_port(wanted)
    told = wanted[len(host) + 1 :]
    return wanted if told not in ("", "0") else f"{host}:{listening.rpartition(':')[2]}"
