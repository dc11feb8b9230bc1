"""Keeps one node's links: listens, dials, does handshakes, and keeps one link per peer.

Every connection begins as a `_PendingConnection` with a deadline. After the handshake,
`duplicate_links.resolve` decides whether it becomes the node's link to that peer; a bulk connection
finds its link by the id that the acceptor named in its READY. This file owns all connections, dials
and timers of the node; after `close` there are none.

The wire package handles frames, `link` what happens on a link. The caller decides when to dial
again (`redial` computes the delay).
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pdserve.errors import (
    DialFailed,
    DialTimeout,
    HandshakeRefused,
    LinkLost,
    PdserveError,
    WrongPeer,
)
from pdserve.ids import NodeId
from pdserve.net.base import LinkDownReason, Peer
from pdserve.net.connection_driver import IGNORE, ConnectionDriver
from pdserve.net.duplicate_links import Contender, Verdict, resolve
from pdserve.net.handshake_limit import PendingHandshakes
from pdserve.net.link import PeerLink
from pdserve.net.log_throttle import LogThrottle
from pdserve.net.settings import NetSettings
from pdserve.net.timers import Timers
from pdserve.wire import events as ev
from pdserve.wire.flow import BodyBudget
from pdserve.wire.handshake import (
    NONCE_BYTES,
    AcceptorHandshake,
    ConnectionRole,
    DialerHandshake,
    HandshakeRefusalReason,
)
from pdserve.wire.protocol import Connection, GoAwayCode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from pdserve.ids import Seconds
    from pdserve.net.base import ByteNetwork, LinkHandler, NetListener
    from pdserve.net.timers import Timer
    from pdserve.wire.handshake import Identity, IdentityClaim, Negotiated
    from pdserve.wire.limits import Limits

__all__ = ["Endpoint"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_SESSION_BYTES: Final = 16
_RENEW_PAUSE: Final[Seconds] = 5.0
"""Pause between two attempts to renew a link whose key is no longer accepted here."""
_DUPLICATE: Final = LinkDownReason(
    "duplicate", "another connection between the two nodes took over"
)


class Endpoint:
    """Listens, dials, and keeps one link per peer; implements `net.base.Network`. Create it inside
    the running loop."""

    def __init__(
        self,
        identity: Identity,
        handler: LinkHandler,
        network: ByteNetwork,
        *,
        keys: Callable[[], tuple[bytes, ...]],
        entropy: Callable[[int], bytes],
        settings: NetSettings | None = None,
        bodies: BodyBudget | None = None,
    ) -> None:
        """`keys` is called for each handshake (`cluster_keys`). `entropy(n)` gives n random bytes.
        `bodies` counts the bytes of request bodies over all lives of a node."""
        self.identity = identity
        self.settings = settings or NetSettings()
        self._handler = handler
        self._network = network
        self._keys = keys
        self._entropy = entropy

        self._loop = asyncio.get_running_loop()
        self.timers = Timers(self._loop)
        self._scratch = memoryview(bytearray(self.settings.read_size))
        self._closing = False

        self._bodies = bodies or BodyBudget(self.settings.requests)
        self._links: dict[NodeId, PeerLink] = {}
        self._sessions: dict[bytes, PeerLink] = {}  # accepted links
        self._all: dict[PeerLink, None] = {}  # includes retiring links
        self._pending: PendingHandshakes[_PendingConnection] = PendingHandshakes(
            self.settings.pending_handshakes
        )
        self._guests: dict[_PendingConnection, None] = {}  # all connections
        self._listeners: list[NetListener] = []
        self._dials: dict[str, asyncio.Task[PeerLink]] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._bulk_dials: set[PeerLink] = set()
        self._closer: asyncio.Future[None] | None = None
        self._complaints = LogThrottle()
        self.refused: dict[str, int] = {}
        """Handshakes that this node refused, by the name of the error."""

    # ------------------------------------------------------------------ lookups and counts

    @property
    def links(self) -> Mapping[NodeId, PeerLink]:
        return MappingProxyType(self._links)

    def link(self, node: NodeId) -> PeerLink | None:
        return self._links.get(node)

    @property
    def connections(self) -> int:
        """Number of connections of any kind, in any state."""
        return len(self._guests)

    @property
    def unauthenticated(self) -> int:
        """Number of accepted connections whose handshake is not complete."""
        return len(self._pending)

    # ------------------------------------------------------------------ listening and dialling

    async def listen(self, address: str) -> str:
        listener = await self._network.listen(address, self._accepting)
        self._listeners.append(listener)
        return listener.address

    def _accepting(self) -> ConnectionDriver:
        return self._shell(_PendingConnection(self))

    def _shell(self, guest: _PendingConnection) -> ConnectionDriver:
        return ConnectionDriver(guest, self._loop, self.timers, self.settings, self._scratch)

    async def dial(self, address: str, *, expect: NodeId | None = None) -> PeerLink:
        known = self._links.get(expect) if expect is not None else None
        if known is not None and not known.retiring:
            return known
        if self._closing:
            raise DialFailed("this node is shutting down")
        task = self._dials.get(address)
        if task is None:
            task = self._spawn(self._dial(address), f"dial {address}")
            self._dials[address] = task
            task.add_done_callback(lambda _: self._dials.pop(address, None))
        # `wait` leaves the shared dial running for its other callers if this one is cancelled.
        await asyncio.wait({task})
        if task.cancelled():
            raise DialFailed("this node is shutting down")
        link = task.result()
        if expect is not None and link.peer.node != expect:
            raise WrongPeer(f"{link.peer.node} is at {address}, not {expect}")
        return link

    async def _dial(self, address: str) -> PeerLink:
        guest = _PendingConnection(self, address=address)
        await self._connect(guest)
        assert guest.link is not None
        return guest.link

    async def _connect(self, guest: _PendingConnection) -> None:
        """Dials; returns when the handshake is complete. Errors: `DialFailed` or one of its
        kinds."""
        settled = guest.settled = self._loop.create_future()
        # A caller that is cancelled in the turn in which the connection is lost does not read the
        # exception; read it here, or asyncio logs it as never retrieved.
        settled.add_done_callback(lambda done: done.cancelled() or done.exception())
        shell = self._shell(guest)
        timeout = self.settings.dial_timeout
        deadline = self._loop.time() + timeout
        await self._network.connect(guest.address, lambda: shell, timeout=timeout)
        try:
            await asyncio.wait({settled}, timeout=max(0.0, deadline - self._loop.time()))
        finally:
            if not settled.done():
                settled.cancel()
                shell.abort()
        if settled.cancelled():
            raise DialTimeout(
                f"{guest.address} accepts connections but did not complete the handshake in time"
            )
        settled.result()

    def _dial_bulk(self, link: PeerLink) -> None:
        """Dials the bulk connection of a link that this node has dialled."""
        if link.address and not self._closing and link not in self._bulk_dials:
            self._bulk_dials.add(link)
            _ = self._spawn(self._connect_bulk(link), f"dial bulk {link.peer.node}")

    async def _connect_bulk(self, link: PeerLink) -> None:
        try:
            await self._connect(_PendingConnection(self, address=link.address, bulk_of=link))
        except PdserveError as error:
            link.bulk_failed(error)
        finally:
            self._bulk_dials.discard(link)

    def _spawn(self, work: Coroutine[object, object, T], name: str) -> asyncio.Task[T]:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # Read the exception: without a waiting caller, asyncio would log it as never retrieved.
        if not task.cancelled():
            task.exception()

    # ------------------------------------------------------------------ handshakes

    def start(self, guest: _PendingConnection, shell: ConnectionDriver) -> Connection:
        """Begins the handshake on a connected transport."""
        self._guests[guest] = None
        nonce, keys = self._entropy(NONCE_BYTES), self._keys()
        versions = self.settings.versions
        binding = self._network.binding(shell.transport)
        if guest.address:
            channel = ConnectionRole.CONTROL if guest.bulk_of is None else ConnectionRole.BULK
            session = b"" if guest.bulk_of is None else guest.bulk_of.session
            claim = self.identity.claim(channel, session)
            guest.proof = dialler = DialerHandshake(
                claim, keys, nonce, versions=versions, binding=binding
            )
            return Connection(dialler, self._limits(channel), self._bodies)
        victim = self._pending.add(guest, guest.host)
        if victim is not None:
            victim.give_up(HandshakeRefusalReason.BUSY, "evicted by newer unfinished handshakes")
        guest.timer = self.timers.call_later(
            self.settings.handshake_timeout,
            lambda: guest.give_up(HandshakeRefusalReason.BUSY, "took too long"),
        )
        guest.proof = acceptor = AcceptorHandshake(
            self.identity, keys, nonce, versions=versions, binding=binding
        )
        return Connection(acceptor, self.settings.limits, self._bodies)

    def _limits(self, channel: ConnectionRole) -> Limits:
        return (
            self.settings.limits if channel is ConnectionRole.CONTROL else self.settings.bulk_limits
        )

    def authenticated(
        self, guest: _PendingConnection, claim: IdentityClaim, spoken: Negotiated
    ) -> None:
        """Acceptor: the peer has proved its identity. Accepts or refuses the connection."""
        self.settle(guest)
        connection = guest.shell.connection
        if self._closing:
            guest.refuse(
                HandshakeRefusalReason.CLOSING, HandshakeRefused("this node is shutting down")
            )
        elif claim.channel == ConnectionRole.BULK:
            self._admit_bulk(guest, claim)
        elif claim.channel != ConnectionRole.CONTROL:
            guest.refuse(
                HandshakeRefusalReason.SESSION, HandshakeRefused(f"unknown channel {claim.channel}")
            )
        elif (verdict := self._resolve(claim, dialled=False)) is Verdict.REFUSE:
            guest.refuse(
                HandshakeRefusalReason.STALE,
                WrongPeer(f"{claim.node} has connected in a later life"),
            )
        else:
            session = self._entropy(_SESSION_BYTES)
            if connection.accept(session):
                link = self._make_link(guest, claim, spoken, session)
                self._sessions[session] = link
                self._install(link, verdict)

    def _admit_bulk(self, guest: _PendingConnection, claim: IdentityClaim) -> None:
        link = self._sessions.get(claim.session)
        if link is None or (link.peer.node, link.peer.epoch) != (claim.node, claim.epoch):
            guest.refuse(
                HandshakeRefusalReason.SESSION,
                HandshakeRefused(f"{claim.node} names a session that is not its own"),
            )
        elif guest.shell.connection.accept(limits=self.settings.bulk_limits):
            guest.on_lost = link.bulk_ready(guest.shell)

    def ready(self, guest: _PendingConnection, claim: IdentityClaim, spoken: Negotiated) -> None:
        """Dialler: the connection is open, and the peer has proved its identity."""
        if guest.bulk_of is not None:
            link = guest.bulk_of
            if (link.peer.node, link.peer.epoch) != (claim.node, claim.epoch):
                guest.fail(WrongPeer(f"{claim.node} answered in place of {link.peer.node}"))
            elif link.down is not None:
                guest.fail(LinkLost("the link is closed", sent=False))
            else:
                guest.on_lost = link.bulk_ready(guest.shell)
                guest.succeed()
            return
        verdict = self._resolve(claim, dialled=True)
        if self._closing or claim.node == self.identity.node or verdict is Verdict.REFUSE:
            text = f"{claim.node} at {guest.address} is this node, or an earlier life of a peer"
            guest.fail(WrongPeer(text))
            return
        link = self._make_link(guest, claim, spoken, claim.session)
        self._install(link, verdict)
        guest.link = self._links.get(link.peer.node, link)
        guest.succeed()

    def settle(self, guest: _PendingConnection) -> None:
        """The handshake of an accepted connection has ended."""
        self._pending.remove(guest, guest.host)
        if guest.timer is not None:
            guest.timer.cancel()
            guest.timer = None

    def complain(self, guest: _PendingConnection, error: PdserveError) -> None:
        """An accepted connection failed its handshake: count it, and log it unless throttled."""
        name = type(error).__name__
        self.refused[name] = self.refused.get(name, 0) + 1
        suppressed = self._complaints.admit(name, self._loop.time())
        if suppressed is not None:
            more = f" ({suppressed} more like it were not logged)" if suppressed else ""
            _log.warning("refused a connection from %s: %s%s", guest.host, error.message, more)

    # ------------------------------------------------------------------ links

    def _resolve(self, claim: IdentityClaim, *, dialled: bool) -> Verdict:
        node = NodeId(claim.node)
        old = self._links.get(node)
        known = None if old is None else Contender(old.peer.epoch, old.dialled, old.retiring)
        return resolve(self.identity.node, node, known, Contender(claim.epoch, dialled))

    def _make_link(
        self, guest: _PendingConnection, claim: IdentityClaim, spoken: Negotiated, session: bytes
    ) -> PeerLink:
        peer = Peer(NodeId(claim.node), claim.epoch, claim.address, spoken.version, spoken.features)
        link = PeerLink(
            peer,
            guest.shell,
            self._handler,
            self.timers,
            self.settings,
            address=guest.address,
            session=session,
            dial_bulk=self._dial_bulk,
            on_down=self._link_down,
        )
        link.key = guest.proof.key
        guest.on_lost = link.lost
        self._all[link] = None
        return link

    def _install(self, link: PeerLink, verdict: Verdict) -> None:
        """Carries out the decision of `resolve`."""
        old = self._links.get(link.peer.node)
        if verdict is Verdict.YIELD:
            link.retire(_DUPLICATE, GoAwayCode.DUPLICATE)
            return
        if verdict is Verdict.REPLACE and old is not None:
            old.replaced()
            old = None
        self._links[link.peer.node] = link
        link.announced = True
        self._handler.on_link_up(link)
        if old is not None:
            old.retire(_DUPLICATE, GoAwayCode.DUPLICATE)
        # The keys may have changed since this link's handshake began.
        self._check_key(link)

    def _link_down(self, link: PeerLink) -> None:
        if self._links.get(link.peer.node) is link:
            del self._links[link.peer.node]
        self._sessions.pop(link.session, None)
        self._all.pop(link, None)
        if link.announced and link.down is not None:
            self._handler.on_link_down(link, link.down)
        self._wake_closer()

    # ------------------------------------------------------------------ key rotation

    def keys_changed(self) -> None:
        """Applies new cluster keys. The side that dialled a link whose key is no longer accepted
        dials again; work under way goes on. Links that still use the old key end after
        `revoke_after`."""
        for link in tuple(self._all):
            self._check_key(link)

    def _check_key(self, link: PeerLink) -> None:
        if link.key in self._keys():
            return
        self.timers.call_later(self.settings.revoke_after, partial(self._revoke, link))
        if link.dialled and self._is_current(link):
            _ = self._spawn(self._renew(link), f"renew {link.peer.node}")

    def _is_current(self, link: PeerLink) -> bool:
        """True if this is the current link to its peer, neither retiring nor down."""
        known = self._links.get(link.peer.node) is link
        return known and not link.retiring and link.down is None

    async def _renew(self, link: PeerLink) -> None:
        """Dials again until the link is replaced or ends; the peer's key file may change a little
        later."""
        while self._is_current(link) and link.key not in self._keys():
            try:
                await self.dial(link.address)
            except DialFailed as error:
                _log.warning(
                    "the link to %s keeps its old key for now: %s", link.peer.node, error.message
                )
            else:
                return
            await asyncio.sleep(_RENEW_PAUSE)

    def _revoke(self, link: PeerLink) -> None:
        """Ends a link whose peer has not shown an accepted key in time."""
        if link.down is not None or link.key in self._keys():
            return
        # Another link to the peer has replaced this one, which closes when its work is done.
        if self._links.get(link.peer.node) not in (link, None):
            return
        _log.warning(
            "the link to %s ends: its cluster key is no longer in use",
            link.peer.node,
        )
        link.abort("its cluster key is no longer in use")

    # ------------------------------------------------------------------ closing

    def forget(self, guest: _PendingConnection) -> None:
        """Removes a connection whose transport is gone."""
        self.settle(guest)
        self._guests.pop(guest, None)
        self._wake_closer()

    async def close(self, *, grace: Seconds = 0.0) -> None:
        self._closing = True
        for listener in self._listeners:
            await listener.close()
        self._listeners.clear()
        for guest in self._pending.drain():
            guest.give_up(HandshakeRefusalReason.CLOSING, "this node is shutting down")
        deadline = self._loop.time() + grace
        for link in tuple(self._all):
            link.close("the node is shutting down")
        await self._until(lambda: not self._all, deadline)
        for link in tuple(self._all):
            link.abort("the node is shutting down")
        await self._until(lambda: not self._guests, self._loop.time() + self.settings.close_timeout)
        for guest in tuple(self._guests):
            guest.shell.abort()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        await self._until(lambda: not self._guests, self._loop.time() + self.settings.close_timeout)
        self.timers.close()

    async def _until(self, met: Callable[[], bool], deadline: Seconds) -> None:
        """Waits until `met` is true; it is checked whenever a link or a transport ends."""
        while not met() and (left := deadline - self._loop.time()) > 0:
            self._closer = self._loop.create_future()
            await asyncio.wait({self._closer}, timeout=left)
        self._closer = None

    def _wake_closer(self) -> None:
        if self._closer is not None and not self._closer.done():
            self._closer.set_result(None)


class _PendingConnection:
    """One connection from its first byte to its last: a handshake, then part of a link."""

    def __init__(
        self, endpoint: Endpoint, *, address: str = "", bulk_of: PeerLink | None = None
    ) -> None:
        self.address = address
        """The address that was dialled; empty: the connection was accepted."""
        self.bulk_of = bulk_of
        """The link that a dialled bulk connection is for."""
        self.link: PeerLink | None = None
        """After a dial: the node's link to that peer, which may be an older one."""
        self.host = ""
        self.shell: ConnectionDriver
        self.proof: DialerHandshake | AcceptorHandshake
        self.timer: Timer | None = None
        self.settled: asyncio.Future[None] | None = None
        """Done when the handshake of a dialled connection is over."""
        self.on_lost: Callable[[BaseException | None], None] | None = None
        """Called at the end of the connection if the handshake has succeeded."""
        self._endpoint = endpoint

    def connected(self, shell: ConnectionDriver) -> Connection:
        self.shell = shell
        peername = shell.transport.get_extra_info("peername")
        self.host = str(peername[0]) if peername else ""
        shell.rules = {
            ev.Authenticated: lambda e: self._endpoint.authenticated(self, e.claim, e.spoken),
            ev.ConnectionReady: lambda e: self._endpoint.ready(self, e.claim, e.spoken),
            ev.ProtocolViolated: lambda e: self.fail(e.error),
        }
        return self._endpoint.start(self, shell)

    def succeed(self) -> None:
        """Dialler: the handshake is complete."""
        if self.settled is not None and not self.settled.done():
            self.settled.set_result(None)

    def fail(self, error: PdserveError) -> None:
        """The handshake has failed: the dialler gets the error, the acceptor logs it."""
        self._endpoint.settle(self)
        if self.settled is None:
            self._endpoint.complain(self, error)
        elif not self.settled.done():
            self.settled.set_exception(error)
        self.shell.rules = IGNORE
        self.shell.connection.send_goaway(GoAwayCode.REPLACED, "the handshake has failed")
        self.shell.close()

    def refuse(self, why: HandshakeRefusalReason, error: HandshakeRefused) -> None:
        """Acceptor: refuses the peer and tells it why."""
        self.shell.connection.refuse(why, error)
        self.fail(error)

    def give_up(self, why: HandshakeRefusalReason, text: str) -> None:
        """Acceptor: ends an unfinished handshake at once; the reason may not arrive."""
        self._endpoint.settle(self)
        self._endpoint.complain(self, HandshakeRefused(text))
        self.shell.rules = IGNORE
        self.shell.connection.refuse(why, HandshakeRefused(text))
        self.shell.flush()
        self.shell.abort()

    def lost(self, shell: ConnectionDriver, error: BaseException | None) -> None:
        self._endpoint.forget(self)
        if self.settled is not None and not self.settled.done():
            text = f"the connection to {self.address} was lost during the handshake"
            self.settled.set_exception(DialFailed(f"{text}: {error}" if error else text))
        if self.on_lost is not None:
            self.on_lost(error)
