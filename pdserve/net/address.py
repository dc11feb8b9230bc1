"""`host:port`, with brackets around an IPv6 host; and which addresses stay on this machine."""

from __future__ import annotations

import ipaddress

from pdserve.errors import ConfigError

__all__ = ["advertised", "is_loopback", "join", "split", "without_port"]


def split(address: str) -> tuple[str, int]:
    """Host and port. Raises `ConfigError`."""
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


def without_port(address: str) -> str:
    """The host of `host:port` or of `host`, with its brackets if it has any."""
    host, _, port = address.rpartition(":")
    return host if host and port.isdigit() and not host.endswith(":") else address


def advertised(wanted: str, listening: str) -> str:
    """What others dial: as told, with the port in use where the told one is 0 or missing."""
    if not wanted:
        return listening
    host = without_port(wanted)
    told = wanted[len(host) + 1 :]
    return wanted if told not in ("", "0") else f"{host}:{listening.rpartition(':')[2]}"
