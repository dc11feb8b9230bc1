"""`host:port`, with brackets around an IPv6 host; and which addresses stay on this machine."""

from __future__ import annotations

import ipaddress

from pdserve.errors import ConfigError

__all__ = ["is_loopback", "join", "split"]


def split(address: str) -> tuple[str, int]:
    """Host and port. Raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{address!r}: an IPv6 host needs brackets, as in [::1]:7000")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{address!r} is not of the form HOST:PORT")
    return host, int(port)


def join(host: str, port: int) -> str:
    """The address of a host and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether nobody outside this machine can reach `host`; names other than localhost can be."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
