"""How this process takes part in a cluster: its addresses, its key, its name, and nodes made so.

Whatever a person leaves open is decided here, in plain functions: where to listen, what to
advertise on a host with several addresses, which key. Nothing here knows what a role does.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import random
import secrets
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve import __version__
from pdserve.errors import ConfigError
from pdserve.ids import NodeId
from pdserve.messages.node import NodeCard
from pdserve.net.address import is_loopback, join, split
from pdserve.net.memory import MemoryWorld
from pdserve.net.security import cluster_key_file
from pdserve.net.settings import NetSettings
from pdserve.net.tcp import TcpNetwork
from pdserve.net.tls import Tls
from pdserve.runtime.node import Node, NodeConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pdserve.net.base import ByteNetwork
    from pdserve.net.security import KeyFile

__all__ = ["DEFAULT_ROUTER_PORT", "ClusterConfig", "Membership", "advertise", "listen_address"]

_log = logging.getLogger(__name__)

DEFAULT_ROUTER_PORT: Final = 7700
"""Where a router listens if nobody says, so that one machine needs no `--listen` at all."""

_WILDCARDS: Final = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What a process is told of the cluster. Addresses are `host:port`."""

    listen: str = ""
    """Where other nodes reach this one; empty: see `listen_address`."""
    advertise: str = ""
    """What others dial, if it differs; empty: see `advertise`."""
    join: tuple[str, ...] = ()
    """Nodes to join through, any of them will do; empty: others come here."""
    cluster: str = "pdserve"
    """Nodes of clusters with other names are refused."""
    node_name: str = ""
    """Unique in the cluster; empty: the role, the host and a random word."""
    cluster_key_file: Path | None = None
    """One key per line in hexadecimal, two while one is replaced; None: the user's own, which is
    made at first use and good for this machine only."""
    tls_cert: Path | None = None
    """With `tls_key`: encrypt what nodes say to each other. All nodes or none."""
    tls_key: Path | None = None
    tls_ca: Path | None = None
    """Demand a certificate of this authority from every node."""

    def validate(self) -> None:
        """Errors: `ConfigError` names the field and the remedy."""
        for name in ("listen", "advertise"):
            if getattr(self, name):
                _check(name, getattr(self, name))
        for address in self.join:
            _check("join", address)
            if split(address)[1] == 0:
                raise ConfigError(f"join: {address} has no port that can be dialled")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls-cert and tls-key belong together: give both")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ConfigError("tls-ca needs tls-cert and tls-key: nodes show them to each other")

    @property
    def alone(self) -> bool:
        """Nothing was said about other nodes."""
        return not (self.listen or self.join or self.advertise)


def _check(name: str, address: str) -> None:
    try:
        split(address)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}") from None


def listen_address(config: ClusterConfig, role: str) -> str:
    """Where to listen: as told; else on this machine only, unless a seed is elsewhere."""
    if config.listen:
        return config.listen
    port = DEFAULT_ROUTER_PORT if role == "router" else 0
    near = all(is_loopback(split(address)[0]) for address in config.join)
    return join("127.0.0.1" if near else "0.0.0.0", port)


def advertise(config: ClusterConfig, listen: str, route: Callable[[str], str | None]) -> str:
    """The host (and port, if told) that others dial: as told; else where we listen; on all
    addresses, the one that leads to the first seed, which others can most likely reach too.

    `route` says which of our addresses a packet to a host leaves from. Errors: `ConfigError`.
    """
    if config.advertise:
        return config.advertise
    host, _ = split(listen)
    if host not in _WILDCARDS:
        return ""
    towards = [split(address)[0] for address in config.join] or ["192.0.2.1", "2001:db8::1"]
    for target in towards:
        found = route(target)
        if found is not None and not ipaddress.ip_address(found).is_loopback:
            return f"[{found}]" if ":" in found else found
    raise ConfigError(
        f"none of this host's addresses leads to {towards[0]}: say which one others can dial, "
        "with --advertise HOST:PORT"
    )


def route_from(host: str) -> str | None:
    """The local address that packets to `host` leave from; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


class Membership:
    """Makes the nodes of one process."""

    def __init__(
        self, config: ClusterConfig, *, private: bool, environ: Mapping[str, str] = os.environ
    ) -> None:
        """`private`: the nodes of this process find each other in memory and nobody else.

        Errors: `ConfigError`.
        """
        self._config = config
        self._host = socket.gethostname().partition(".")[0] or "localhost"
        self._world = MemoryWorld(random.Random()) if private else None
        self._settings = NetSettings()
        self._environ = environ
        self._tls: Tls | None = None
        self.keys: KeyFile | None = None
        if private:
            self._private_key = secrets.token_bytes(32)
        elif config.tls_cert is not None and config.tls_key is not None:
            self._tls = Tls.load(config.tls_cert, config.tls_key, config.tls_ca)

    def node(self, role: str, *, join: tuple[str, ...] = (), first: bool = True) -> Node:
        """A node that has not started. `first` takes the configured address, others any.

        Errors: `ConfigError`. Call it inside the running loop.
        """
        name = self._name(role) if first else self._default_name(role)
        seeds = join or self._config.join
        if self._world is not None:
            config = NodeConfig(
                node=name, role=role, listen=f"{name}:7700", join=seeds, cluster="private"
            )
            return self._make(config, self._world.network(name), lambda: (self._private_key,))
        listen = listen_address(self._config, role) if first else "127.0.0.1:0"
        told = advertise(self._config, listen, route_from) if first else ""
        keys = self._key_file(listen, told)
        config = NodeConfig(
            node=name,
            role=role,
            listen=listen,
            advertise=told,
            join=seeds,
            cluster=self._config.cluster,
            net=self._settings,
        )
        return self._make(config, TcpNetwork(self._settings, self._tls), keys.keys)

    def _key_file(self, listen: str, told: str) -> KeyFile:
        if self.keys is None:
            host = told.rpartition(":")[0] if told.rpartition(":")[2].isdigit() else told
            addresses = [listen, *self._config.join, *([f"{host}:0"] if host else [])]
            self.keys = cluster_key_file(self._config.cluster_key_file, addresses, self._environ)
        return self.keys

    def _make(
        self, config: NodeConfig, network: ByteNetwork, keys: Callable[[], tuple[bytes, ...]]
    ) -> Node:
        return Node(
            config,
            network,
            keys=keys,
            entropy=os.urandom,
            random=random.Random(secrets.randbits(64)),
            wall=time.time,
        )

    def card(self, role: str) -> NodeCard:
        """What every node says of itself; roles add theirs."""
        return NodeCard(
            version=__version__,
            role=role,
            started=int(time.time()),
            host=self._host,
            pid=os.getpid(),
        )

    def _name(self, role: str) -> NodeId:
        return (
            NodeId(self._config.node_name) if self._config.node_name else self._default_name(role)
        )

    def _default_name(self, role: str) -> NodeId:
        return NodeId(f"{role}-{self._host}-{secrets.token_hex(3)}")
