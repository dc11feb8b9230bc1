"""Asks running nodes from outside, over an authenticated link to any one of them.

It reaches a cluster over TCP, and a server that has no cluster through its admin socket. If no
setting says which, it takes the only one on this machine. An admin client has no address of its
own, so no node takes it for a member. It knows the requests and the remedy for each refusal, not
how a response is displayed. The command that asks owns it.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve import __version__
from pdserve.errors import (
    ConfigError,
    DialFailed,
    HandshakeRefused,
    LinkLost,
    NoCommonVersion,
    NoMethod,
    ProtocolError,
    WrongCluster,
    WrongClusterKey,
)
from pdserve.ids import NodeId
from pdserve.launch.cluster import admin_socket
from pdserve.launch.cluster.addresses import DEFAULT_ROUTER_PORT
from pdserve.launch.cluster.admin_door import DoorAnswer
from pdserve.launch.cluster.door_network import DoorNetwork
from pdserve.messages.handoff import SetDisagg
from pdserve.messages.status import DrainOrder, StatusQuery, UndoDrain
from pdserve.net.cluster_keys import cluster_key_file
from pdserve.net.endpoint import Endpoint
from pdserve.net.settings import NetSettings
from pdserve.net.transport.tcp import TcpNetwork
from pdserve.net.transport.tls import Tls
from pdserve.runtime.rpc_methods import (
    DISAGG,
    DRAIN,
    DROP_KV,
    MODE,
    PLANNER,
    STATUS,
    TRACES,
    UNDO_DRAIN,
    WARM,
)
from pdserve.wire.handshake import Identity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.ids import Seconds
    from pdserve.launch.cluster.addresses import ClusterConfig
    from pdserve.launch.cluster.admin_socket import AdminSocket
    from pdserve.messages.handoff import Disagg
    from pdserve.messages.kv_pull import KvTaken, WarmUp
    from pdserve.messages.mode import ModeReport, SetMode
    from pdserve.messages.planner_orders import PlannerAnswer, PlannerOrder
    from pdserve.messages.status import ClusterStatus, DrainState
    from pdserve.messages.tiers import DropOrder, DropReport
    from pdserve.messages.trace import TraceQuery, TraceReply
    from pdserve.net.base import ByteNetwork, IncomingCall, IncomingStream, Link, LinkDownReason
    from pdserve.wire.parser import Buffer

__all__ = ["AdminClient", "choose_socket", "with_remedy"]

_DEFAULT: Final = f"127.0.0.1:{DEFAULT_ROUTER_PORT}"
_KNOCK: Final[Seconds] = 0.5
"""Seconds in which a router on this machine takes a connection, if there is one."""
_TIMEOUT: Final[Seconds] = 3.0
"""Seconds for a request; the node that is asked waits one second for the others."""


_UNDO_TIMEOUT: Final[Seconds] = 20.0
"""For a frontend that first ends the connections that it was closing."""
_DROP_TIMEOUT: Final[Seconds] = 60.0
"""Seconds for a worker to look through all its blocks."""


class AdminClient:
    """Client for admin requests. Create it inside the running loop; `close` it when done."""

    def __init__(
        self,
        config: ClusterConfig,
        environ: Mapping[str, str] = os.environ,
        *,
        port: int | None = None,
    ) -> None:
        """Choose whom to ask; read keys and certificates. `port`: the HTTP port of the server on
        this machine that is meant. Errors: `ConfigError` if a file cannot be used, or if several
        servers run and no setting says which.
        """
        self.socket = choose_socket(config, environ, port=port)
        self._environ = environ
        self._door: DoorNetwork | None = None
        self._answer = DoorAnswer()
        settings = NetSettings(dial_timeout=_TIMEOUT)
        network: ByteNetwork
        if self.socket is None:
            self.addresses = config.join or (_DEFAULT,)
            keys = cluster_key_file(config.cluster_key_file, self.addresses, environ).keys
            network = TcpNetwork(settings, _tls(config))
        else:
            self.addresses = (str(self.socket),)
            keys = self._told_key
            network = self._door = DoorNetwork(self.socket, self._on_answer)
        self._endpoint = Endpoint(
            _visitor(config.cluster),
            _Deaf(),
            network,
            keys=keys,
            entropy=os.urandom,
            settings=settings,
        )
        self._link: Link | None = None

    def _on_answer(self, answer: DoorAnswer) -> None:
        self._answer = answer
        mine = self._endpoint.identity
        self._endpoint.identity = Identity(answer.cluster, mine.node, mine.epoch, "")

    def _told_key(self) -> tuple[bytes, ...]:
        return (bytes.fromhex(self._answer.key),)

    async def status(self) -> ClusterStatus:
        """Return the cluster's status from the first node that answers.

        Errors: `LinkError` of some kind, `DeadlineExceeded`, `ProtocolError`, each with a remedy.
        """
        link = await self._connect()
        try:
            return await link.request(STATUS, StatusQuery(), timeout=_TIMEOUT)
        except ProtocolError as error:
            raise ProtocolError(
                f"{link.peer.node} does not know how to answer pdserve {__version__}: "
                f"{error.message}; use the cluster's version of pdserve"
            ) from None

    async def traces(self, query: TraceQuery) -> TraceReply:
        """Ask all frontends for traces, through the first node that answers.

        Errors: as `status`.
        """
        link = await self._connect()
        try:
            return await link.request(TRACES, replace(query, everywhere=True), timeout=_TIMEOUT)
        except NoMethod:
            raise ProtocolError(
                f"{link.peer.node} has no traces: its version of pdserve is older than "
                f"{__version__}"
            ) from None

    async def _connect(self) -> Link:
        if self._link is not None and self._link.down is None:
            return self._link
        failures: list[str] = []
        if self.socket is not None and self._door is not None:
            # The server may have been started again, with another PID.
            self.socket = self._door.path = admin_socket.successor(self.socket, self._environ)
            self.addresses = (str(self.socket),)
        for address in self.addresses:
            try:
                self._link = await self._endpoint.dial(address)
            except HandshakeRefused as error:
                raise with_remedy(address, error) from None
            except DialFailed as error:
                failures.append(error.message)
            else:
                return self._link
        if self.socket is not None:
            raise DialFailed(f"the server does not answer: {'; '.join(failures)}")
        raise DialFailed(_no_answer(self.addresses, failures))

    async def set_disagg(self, address: str, disagg: Disagg) -> Disagg:
        """Set the disaggregation mode of the decode worker at `address`; return the previous mode.

        Errors: `LinkError` of some kind, `DeadlineExceeded`, what the worker raises.
        """
        link = await self._endpoint.dial(address)
        answer = await link.request(DISAGG, SetDisagg(disagg), timeout=_TIMEOUT)
        return answer.before

    async def drain(self, address: str, node: NodeId, *, stay: bool) -> DrainState:
        """Tell `node`, at `address`, to drain; return the state of its drain.

        Errors: `LinkError` of some kind, `DeadlineExceeded`, what the node raises.
        """
        link = await self._endpoint.dial(address, expect=node)
        try:
            return await link.request(DRAIN, DrainOrder(stay), timeout=_TIMEOUT)
        except ProtocolError as error:
            raise ProtocolError(
                f"it cannot be drained from here: {error.message}; send its process SIGTERM"
            ) from None

    async def undo_drain(self, address: str, node: NodeId) -> DrainState:
        """Tell `node`, at `address`, to serve again; return what it does.

        Errors: `LinkError` of some kind, `DeadlineExceeded`, what the node raises.
        """
        link = await self._endpoint.dial(address, expect=node)
        try:
            return await link.request(UNDO_DRAIN, UndoDrain(), timeout=_UNDO_TIMEOUT)
        except NoMethod:
            raise ProtocolError(
                f"its drain cannot be undone: its version of pdserve is older than {__version__}"
            ) from None

    async def set_mode(self, address: str, node: NodeId, order: SetMode) -> ModeReport:
        """Have the worker `node`, at `address`, change its mode; return what it does.

        Errors: `LinkError` of some kind, `DeadlineExceeded`, what the worker raises.
        """
        link = await self._endpoint.dial(address, expect=node)
        try:
            return await link.request(MODE, order, timeout=_TIMEOUT)
        except NoMethod:
            raise ProtocolError(
                f"it cannot change its mode: its version of pdserve is older than {__version__}"
            ) from None

    async def tell_planner(self, address: str, node: NodeId, order: PlannerOrder) -> PlannerAnswer:
        """Ask or tell the planner `node`, at `address`.

        Errors: `LinkError` of some kind, `DeadlineExceeded`, what the planner raises.
        """
        link = await self._endpoint.dial(address, expect=node)
        return await link.request(PLANNER, order, timeout=_TIMEOUT)

    async def drop_kv(self, address: str, node: NodeId, order: DropOrder) -> DropReport:
        """Have the worker `node`, at `address`, forget KV on its tiers.

        Errors: `LinkError` of some kind, `DeadlineExceeded`, what the worker raises.
        """
        link = await self._endpoint.dial(address, expect=node)
        try:
            return await link.request(DROP_KV, order, timeout=_DROP_TIMEOUT)
        except NoMethod:
            raise ProtocolError(
                f"it has no KV tiers: its version of pdserve is older than {__version__}"
            ) from None

    async def warm(self, address: str, node: NodeId, order: WarmUp) -> KvTaken:
        """Have the worker `node`, at `address`, pull blocks of another worker.

        Errors: `LinkError` of some kind, `DeadlineExceeded`, what the worker raises.
        """
        link = await self._endpoint.dial(address, expect=node)
        try:
            return await link.request(WARM, order, timeout=order.timeout + _TIMEOUT)
        except NoMethod:
            raise ProtocolError(
                f"it moves no KV, or its version of pdserve is older than {__version__}"
            ) from None

    async def close(self) -> None:
        """Close all links."""
        await self._endpoint.close()


def choose_socket(
    config: ClusterConfig, environ: Mapping[str, str], *, port: int | None = None
) -> Path | None:
    """The admin socket of the server that is meant; None: a cluster is asked over TCP. Errors:
    `ConfigError` if there are several, or none at `port`.
    """
    if config.admin_socket not in ("", "none"):
        return Path(config.admin_socket)
    if config.join or config.admin_socket == "none":
        return None
    found = admin_socket.find(environ, everywhere=port is not None)
    if port is not None:
        return _at_port(found, port)
    router = bool(found) and _listens(DEFAULT_ROUTER_PORT)
    if len(found) + router > 1:
        raise ConfigError(_several(found, router=router))
    return found[0].path if found else None


def _at_port(found: Sequence[AdminSocket], port: int) -> Path:
    there = [one for one in found if one.port == port]
    if len(there) == 1:
        return there[0].path
    if there:
        paths = " or ".join(f"--admin-socket {one.path}" for one in there)
        raise ConfigError(f"several servers say that they listen on port {port}: choose {paths}")
    others = ", ".join(str(one.port) for one in found)
    hint = f"there are servers on {others}" if others else "none of this user's servers is found"
    raise ConfigError(
        f"no server without a cluster listens on port {port}: {hint}; a server of another user or "
        f"in a container is asked with --url http://127.0.0.1:{port}, a cluster with --join"
    )


def _several(found: Sequence[AdminSocket], *, router: bool) -> str:
    lines = [f"  --port {one.port}    (pid {one.pid}, {one.path})" for one in found]
    if router:
        lines.append(f"  --join {_DEFAULT}    (a cluster's router)")
    return "\n".join(["several servers run on this machine; say which with one of:", *lines])


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_KNOCK):
            return True
    except OSError:
        return False


def _visitor(cluster: str) -> Identity:
    name = NodeId(f"visitor-{secrets.token_hex(6)}")
    return Identity(cluster, name, int(time.time() * 1000), "")


def _tls(config: ClusterConfig) -> Tls | None:
    config.check_tls()
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Tls.load(config.tls_cert, config.tls_key, config.tls_ca)


def _no_answer(addresses: tuple[str, ...], failures: list[str]) -> str:
    return (
        f"no node answers at {', '.join(addresses)} ({'; '.join(failures)}), and no server of this "
        "user is found: start one with `pdserve`, name a cluster's node with --join HOST:PORT, "
        "or ask a server in a container or of another user with --url http://127.0.0.1:8000"
    )


def with_remedy(address: str, error: HandshakeRefused) -> HandshakeRefused:
    """Add a remedy to the message of a refused handshake."""
    if isinstance(error, WrongClusterKey):
        remedy = "give the cluster's key with --cluster-key-file"
    elif isinstance(error, WrongCluster):
        remedy = "give its name with --cluster"
    elif isinstance(error, NoCommonVersion):
        remedy = f"use its version of pdserve; this one is {__version__}"
    else:
        remedy = "try again, or another node with --join"
    return type(error)(f"{address} turned us away: {error.message}; {remedy}")


class _Deaf:
    """Link handler of an admin client: refuses all requests."""

    def on_link_up(self, link: Link) -> None:
        pass

    def on_link_down(self, link: Link, down: LinkDownReason) -> None:
        pass

    def on_tell(self, link: Link, method: int, body: Buffer) -> None:
        pass

    def on_request(self, call: IncomingCall) -> None:
        raise LinkLost("this connection takes no calls", sent=False)

    def on_stream(self, stream: IncomingStream, method: int, body: Buffer) -> None:
        raise LinkLost("this connection takes no calls", sent=False)
