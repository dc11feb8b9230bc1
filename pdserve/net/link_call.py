"""Records the peer's requests until each is answered.

A record ends exactly once: by its answer, its deadline, its cancellation, or the end of its link. A
request that is answered before its handler returns is never put into a table. Owned by one `link`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from pdserve.errors import DeadlineExceeded, PdserveError
from pdserve.ids import NodeLife, Seconds
from pdserve.net.base import Link
from pdserve.wire.codec import encoder_for
from pdserve.wire.parser import Buffer

if TYPE_CHECKING:
    from pdserve.net.connection_driver import ConnectionDriver
    from pdserve.wire.codec import Method
    from pdserve.wire.protocol import Connection

__all__ = ["CallLink", "LinkCall"]

_log = logging.getLogger(__name__)

Q = TypeVar("Q")
R = TypeVar("R")


class CallLink(Link, Protocol):
    """The part of a link that a record needs."""

    shell: ConnectionDriver
    connection: Connection

    def now(self) -> Seconds: ...

    def wake(self) -> None: ...

    def served(self, serving: LinkCall) -> None:
        """A recorded request was answered."""
        ...


class LinkCall(msgspec.Struct, eq=False):
    """One request of a peer; implements `net.base.IncomingCall`. One is made per request; it is a
    Struct because a plain class costs twice as much."""

    link: CallLink
    id: int
    method: int
    milliseconds: int
    body: Buffer
    done: bool = False
    kept: Seconds = 0.0
    """Its deadline once it is in the link's table; 0 before."""
    on_cancel: Callable[[], None] | None = None

    @property
    def life(self) -> NodeLife:
        peer = self.link.peer
        return NodeLife(peer.node, peer.epoch)

    @property
    def deadline(self) -> Seconds:
        return self.kept or self.link.now() + self.milliseconds / 1000

    def read(self, method: Method[Q, R]) -> Q:
        return method.decode_request(self.body)

    def reply(self, message: object) -> None:
        if not self.done:
            link = self.link
            link.connection.respond(self.id, encoder_for(link.peer.features)(message))
            self.done = True
            if self.kept:
                link.served(self)
            if not link.shell.due:
                link.shell.wake()

    def fail(self, error: BaseException) -> None:
        if self.done:
            return
        if not isinstance(error, PdserveError):
            _log.error("method %d failed", self.method, exc_info=error)
        self.done = True
        self.link.connection.fail(self.id, error)
        if self.kept:
            self.link.served(self)
        self.link.wake()

    def expire(self) -> None:
        """The deadline has passed: cancel the work, since the peer no longer waits."""
        self.fail(DeadlineExceeded("the request was not answered in time"))
        self.cancelled()

    def cancelled(self) -> None:
        """Ends the work: the answer is no longer needed."""
        self.done = True
        callback, self.on_cancel = self.on_cancel, None
        if callback is not None:
            try:
                callback()
            except Exception:  # a bug; the link ends other requests in the same turn
                _log.exception("method %d failed when it was cancelled", self.method)
