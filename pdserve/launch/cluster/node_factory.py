"""Creates cluster nodes for this process from its addresses, key and name.

`addresses` decides where to listen and what to advertise. Nothing here knows what a role does.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import time
from typing import TYPE_CHECKING

from pdserve import __version__
from pdserve.gossip.config import GossipConfig
from pdserve.ids import NodeId
from pdserve.launch.cluster.addresses import advertise, listen_address, route_from
from pdserve.launch.cluster.admin_door import AdminDoor
from pdserve.messages.engine import TransferSpec
from pdserve.messages.node import NodeCard
from pdserve.net.address import join, split, without_port
from pdserve.net.cluster_keys import cluster_key_file, read_hash_secret
from pdserve.net.settings import NetSettings
from pdserve.net.transport.certificates import Certificates
from pdserve.net.transport.memory import MemoryWorld
from pdserve.net.transport.tcp import TcpNetwork
from pdserve.runtime.hash_secret import HashSecrets
from pdserve.runtime.node import Node, NodeConfig
from pdserve.runtime.peers.local_link import Neighbours

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pdserve.launch.cluster.addresses import ClusterConfig
    from pdserve.net.base import ByteNetwork
    from pdserve.net.cluster_keys import KeyFile
    from pdserve.observe.degraded import Degradations
    from pdserve.worker.config import WorkerConfig

__all__ = ["NodeFactory"]

_PRIVATE_GOSSIP = GossipConfig(
    gossip_interval=0.005, ping_interval=60.0, sync_interval=300.0, reunion_interval=300.0
)
_PRIVATE_LINKS = NetSettings(ping_after=60.0, silent_after=180.0)
"""Nodes of one process end together, and no network is between them: they need not watch each
other. News need not wait to travel together: a model is served as soon as it has loaded."""


class NodeFactory:
    """Creates the nodes of one process."""

    def __init__(
        self, config: ClusterConfig, *, private: bool, environ: Mapping[str, str] = os.environ
    ) -> None:
        """`private`: the nodes of this process reach only each other, over an in-memory network.

        Errors: `ConfigError`.
        """
        self.private = private
        self._config = config
        self._host = socket.gethostname().partition(".")[0] or "localhost"
        self._world = MemoryWorld(random.Random()) if private else None
        self._settings = NetSettings()
        self._neighbours = Neighbours(time.perf_counter)
        self._environ = environ
        self._tls: Certificates | None = None
        self.keys: KeyFile | None = None
        path = config.hash_secret_file
        self._given = None if path is None else read_hash_secret(path)
        if not private:
            config.check_tls()
        if private:
            self._private_key = secrets.token_bytes(32)
        elif config.tls_cert is not None and config.tls_key is not None:
            self._tls = Certificates(config.tls_cert, config.tls_key, config.tls_ca)

    def node(self, role: str, *, first: bool = True, label: str = "") -> Node:
        """Creates a node, not started. The first node has the configured name and address. Others
        of this process have their own names, which begin with `label`, and any free port.

        Errors: `ConfigError`. Call it inside the running loop.
        """
        name = self._name(role) if first else self._default_name(label or role)
        if self._world is not None:
            config = NodeConfig(
                node=name,
                role=role,
                listen=f"{name}:7700",
                cluster="private",
                leave_timeout=0.0,
                gossip=_PRIVATE_GOSSIP,
                net=_PRIVATE_LINKS,
            )
            return self._make(config, self._world.network(name), lambda: (self._private_key,))
        listen = listen_address(self._config, role)
        told = advertise(self._config, listen, route_from)
        keys = self._key_file(listen, told)
        config = NodeConfig(
            node=name,
            role=role,
            listen=listen if first else join(split(listen)[0], 0),
            advertise=told if first else without_port(told),
            join=self._config.join,
            cluster=self._config.cluster,
            net=self._settings,
        )
        node = self._make(config, TcpNetwork(self._settings, self._tls), keys.keys)
        keys.on_change(node.keys_changed)
        return node

    def admin_door(self, path: Path, node: Node) -> AdminDoor:
        """Creates the door to this process's nodes, not open; visitors who name no node reach
        `node`. Call it inside the running loop."""
        network: ByteNetwork = TcpNetwork(self._settings, self._tls)
        if self._world is not None:
            network = self._world.network("admin")
        return AdminDoor(
            path,
            network,
            cluster=node.config.cluster,
            key=self._current_key,
            address=lambda: node.address,
        )

    def _current_key(self) -> bytes:
        return self._private_key if self.keys is None else self.keys.keys()[0]

    def reload_certificates(self) -> bool:
        """Reload certificates; True if they changed. On `ConfigError` the old ones stay."""
        return self._tls is not None and self._tls.reload()

    def _key_file(self, listen: str, told: str) -> KeyFile:
        if self.keys is None:
            host = without_port(told)
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
            neighbours=self._neighbours,
        )

    def secrets(
        self, node: Node, degradations: Degradations, kept: tuple[bytes, int] | None = None
    ) -> HashSecrets:
        """Creates the object that agrees on the secret of block hashes for `node`. `kept`: the
        secret of an earlier life and its birth."""
        return HashSecrets(
            node,
            entropy=os.urandom,
            wall=time.time,
            degradations=degradations,
            given=self._given,
            kept=kept,
        )

    def transfer(self, node: Node, config: WorkerConfig) -> TransferSpec | None:
        """Returns the KV transfer settings of a worker on `node`, or None. Transfer connections
        listen where the node does, and are encrypted if its links are. An aggregated worker
        transfers only requests that migrate: if it is alone in its cluster it needs none, and if
        transfer is not possible it serves without it."""
        aggregated = config.mode == "aggregated"
        if aggregated and self.private:
            return None
        host, advertised = "127.0.0.1", ""
        if not self.private:
            host = split(node.config.listen)[0]
            advertised = without_port(node.config.advertise).strip("[]")
        tls = self._config
        return TransferSpec(
            backends=() if config.transfer_backend == "auto" else (config.transfer_backend,),
            verify=config.verify_kv,
            host=host,
            advertise=advertised,
            tls=None
            if self._tls is None
            else (str(tls.tls_cert), str(tls.tls_key), str(tls.tls_ca or "")),
            optional=aggregated,
            rdma_devices=config.rdma_devices,
            rdma_traffic_class=config.rdma_traffic_class,
        )

    def card(self, role: str) -> NodeCard:
        """Create the card that every node publishes; roles add their fields."""
        return NodeCard(
            version=__version__,
            role=role,
            started=int(time.time()),
            host=self._host,
            pid=os.getpid(),
            change=self._config.change,
        )

    def _name(self, role: str) -> NodeId:
        return (
            NodeId(self._config.node_name) if self._config.node_name else self._default_name(role)
        )

    def _default_name(self, role: str) -> NodeId:
        return NodeId(f"{role}-{self._host}-{secrets.token_hex(3)}")
