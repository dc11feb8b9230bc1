"""Asks a running cluster from outside, over an authenticated link to any one node.

An admin client has no address of its own, so no node takes it for a member. It knows the requests
and the remedy for each refusal, not how a response is displayed. The command that asks owns it.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import TYPE_CHECKING, Final

from pdserve import __version__
from pdserve.errors import (
    DialFailed,
    HandshakeRefused,
    LinkLost,
    NoCommonVersion,
    ProtocolError,
    WrongCluster,
    WrongClusterKey,
)
from pdserve.ids import NodeId
from pdserve.launch.cluster.addresses import DEFAULT_ROUTER_PORT
from pdserve.messages.handoff import SetDisagg
from pdserve.messages.status import DrainOrder, StatusQuery
from pdserve.net.cluster_keys import cluster_key_file
from pdserve.net.endpoint import Endpoint
from pdserve.net.settings import NetSettings
from pdserve.net.transport.tcp import TcpNetwork
from pdserve.net.transport.tls import Tls
from pdserve.runtime.rpc_methods import DISAGG, DRAIN, STATUS
from pdserve.wire.handshake import Identity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Seconds
    from pdserve.launch.cluster.addresses import ClusterConfig
    from pdserve.messages.handoff import Disagg
    from pdserve.messages.status import ClusterStatus, DrainState
    from pdserve.net.base import IncomingCall, IncomingStream, Link, LinkDownReason
    from pdserve.wire.parser import Buffer

__all__ = ["AdminClient", "with_remedy"]

_DEFAULT: Final = f"127.0.0.1:{DEFAULT_ROUTER_PORT}"
_TIMEOUT: Final[Seconds] = 3.0
"""Seconds for a request; the node that is asked waits one second for the others."""


class AdminClient:
    """Client for admin requests. Create it inside the running loop; `close` it when done."""

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> None:
        """Read keys and certificates. Errors: `ConfigError` if they cannot be used."""
        self.addresses = config.join or (_DEFAULT,)
        keys = cluster_key_file(config.cluster_key_file, self.addresses, environ)
        config.check_tls()
        tls = None
        if config.tls_cert is not None and config.tls_key is not None:
            tls = Tls.load(config.tls_cert, config.tls_key, config.tls_ca)
        settings = NetSettings(dial_timeout=_TIMEOUT)
        name = NodeId(f"visitor-{secrets.token_hex(6)}")
        self._endpoint = Endpoint(
            Identity(config.cluster, name, int(time.time() * 1000), ""),
            _Deaf(),
            TcpNetwork(settings, tls),
            keys=keys.keys,
            entropy=os.urandom,
            settings=settings,
        )
        self._link: Link | None = None

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

    async def _connect(self) -> Link:
        if self._link is not None and self._link.down is None:
            return self._link
        failures: list[str] = []
        for address in self.addresses:
            try:
                self._link = await self._endpoint.dial(address)
            except HandshakeRefused as error:
                raise with_remedy(address, error) from None
            except DialFailed as error:
                failures.append(error.message)
            else:
                return self._link
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

    async def close(self) -> None:
        """Close all links."""
        await self._endpoint.close()


def _no_answer(addresses: tuple[str, ...], failures: list[str]) -> str:
    return (
        f"no node answers at {', '.join(addresses)} ({'; '.join(failures)}): name one that runs "
        "with --join HOST:PORT. A pdserve that serves alone, without --listen, is no cluster: "
        "look at it with `pdserve status --url http://127.0.0.1:8000`"
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
