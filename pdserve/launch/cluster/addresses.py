"""Chooses the addresses of a process: where to listen, and what to advertise.

Plain functions over the cluster settings and the host's addresses.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError
from pdserve.ids import CHANGE_PATTERN
from pdserve.net.address import advertised, is_loopback, join, split

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["DEFAULT_ROUTER_PORT", "ClusterConfig", "advertise", "listen_address", "route_from"]

DEFAULT_ROUTER_PORT: Final = 7700
"""Default port of a router, so that one machine needs no `--listen` at all."""

_WILDCARDS: Final = ("0.0.0.0", "::")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_CHANGE: Final = re.compile(CHANGE_PATTERN)
_ANYWHERE: Final = ("192.0.2.1", "2001:db8::1")
"""Reserved documentation addresses; a packet to them would take the default route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Cluster settings of a process. Addresses are `host:port`."""

    listen: str = ""
    """Address to listen on for other nodes; empty: `listen_address` chooses."""
    advertise: str = ""
    """Address that other nodes dial, if it differs; empty: `advertise` chooses."""
    join: tuple[str, ...] = ()
    """Seed nodes; one reachable seed is enough; empty: other nodes join through this one."""
    cluster: str = "pdserve"
    """Cluster name; nodes of clusters with other names are refused."""
    node_name: str = ""
    """Node name, unique in the cluster; empty: the role, the host and a random word."""
    change: str = ""
    """Id of the planner's change that started this process; empty: someone else did."""
    cluster_key_file: Path | None = None
    """File with one key per line in hexadecimal, two while a key is being replaced; None: the
    user's own key, which is created at first use and works on this machine only."""
    hash_secret_file: Path | None = None
    """File with the secret of KV block hashes in hexadecimal; None: the nodes agree on one."""
    tls_cert: Path | None = None
    """Certificate; with `tls_key` it encrypts the links between nodes. Either all nodes have one or
    none."""
    tls_key: Path | None = None
    tls_ca: Path | None = None
    """Certificate authority that must have signed every node's certificate."""
    admin_socket: str = ""
    """Path of the Unix socket at which a server without a cluster answers the commands of its user;
    empty: one in the user's runtime directory; `none`: there is no such socket."""

    def validate(self) -> None:
        """Errors: `ConfigError` names the field and the remedy."""
        if self.listen:
            _check("listen", self.listen)
        if self.advertise:
            told = advertised(self.advertise, "127.0.0.1:0")
            _check("advertise", told)
            if split(told)[0] in _WILDCARDS:
                raise ConfigError(
                    f"advertise: {self.advertise} cannot be dialled; name one address"
                )
        for name, value in (("node-name", self.node_name), ("cluster", self.cluster)):
            if value and not _NAME.fullmatch(value):
                raise ConfigError(
                    f"{name}: {value!r} is not 1 to 100 letters, digits, dots, dashes and "
                    "underscores"
                )
        if self.change and not _CHANGE.fullmatch(self.change):
            raise ConfigError(
                f"change: {self.change!r} is not 1 to 64 letters, digits, dots, dashes and "
                "underscores"
            )
        for address in self.join:
            _check("join", address)
            if split(address)[1] == 0:
                raise ConfigError(f"join: {address} has no port that can be dialled")

    def check_tls(self) -> None:
        """Check that the certificate settings are complete. Errors: `ConfigError`."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls-cert and tls-key belong together: give both")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ConfigError("tls-ca needs tls-cert and tls-key: nodes show them to each other")

    @property
    def alone(self) -> bool:
        """True if the settings name no other nodes."""
        return not (self.listen or self.join or self.advertise)


def _check(name: str, address: str) -> None:
    try:
        split(address)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}") from None


def listen_address(config: ClusterConfig, role: str) -> str:
    """Return the address to listen on: `listen`; else local only, unless a seed is remote."""
    if config.listen:
        return config.listen
    port = DEFAULT_ROUTER_PORT if role == "router" else 0
    near = all(is_loopback(split(address)[0]) for address in config.join)
    return join("127.0.0.1" if near else "0.0.0.0", port)


def advertise(config: ClusterConfig, listen: str, route: Callable[[str], str | None]) -> str:
    """Return the host (and port, if set) that others dial: `advertise`, else the listen host. If
    that is all addresses: the address towards the first seed, which others can most likely reach,
    or towards other machines if the seeds are local.

    `route` returns the local address that packets to a host leave from. Errors: `ConfigError`.
    """
    if config.advertise:
        return config.advertise
    host, _ = split(listen)
    if host not in _WILDCARDS:
        return ""
    seeds = [split(address)[0] for address in config.join]
    found = [source for source in map(route, seeds) if source is not None]
    if all(map(is_loopback, found)) and (found or not seeds):
        # All seeds that answer are on this machine, so use the address towards other machines.
        seeds = []
        found = [source for source in map(route, _ANYWHERE) if source is not None]
    for source in found:
        if not is_loopback(source):
            return f"[{source}]" if ":" in source else source
    target = seeds[0] if seeds else "other machines"
    hint = " (is the name right?)" if seeds and not found else ""
    raise ConfigError(
        f"none of this host's addresses leads to {target}{hint}: say which one others can dial, "
        "with --advertise HOST:PORT"
    )


def route_from(host: str) -> str | None:
    """The local address from which packets to `host` leave; sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        # IDNA refuses some names with a `ValueError`.
        return None
