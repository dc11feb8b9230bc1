"""References to other nodes: how a role asks, tells and opens streams.

A reference names a node, or one life of it; a later life then counts as gone. It holds no link and
may be kept or thrown away: each message finds the node's present link, or dials one. Requests and
one-way messages to a node of the same process take a local link (`runtime.peers.local_link`). What
can be said is in `runtime.rpc_methods`; who serves it, in `runtime.peers.handlers`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from pdserve.errors import DeadlineExceeded, LinkLost, PdserveError
from pdserve.wire.codec import encoder_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.net.base import Link, Peer
    from pdserve.runtime.node import Node
    from pdserve.runtime.peers.local_link import LocalLink
    from pdserve.wire.codec import Method, Notice

__all__ = ["PeerRef", "ask_all"]

Q = TypeVar("Q")
R = TypeVar("R")

_LEAST: Final[Seconds] = 0.001
"""Time that a request gets at least, if the dial took all there was."""
_AT_ONCE: Final = 64
"""Most nodes that `ask_all` asks at a time: each may need a new connection."""


class LinkSource(Protocol):
    """The part of a node that is needed."""

    def now(self) -> Seconds: ...

    def link_nowait(self, node: NodeId) -> Link | None: ...

    async def link(self, node: NodeId, *, timeout: Seconds) -> Link: ...

    def local_link(self, node: NodeId) -> LocalLink | None: ...


class _Way(Protocol):
    """A link of either kind."""

    @property
    def peer(self) -> Peer: ...


W = TypeVar("W", bound=_Way)


class PeerRef:
    """A reference to `node`; with `epoch`, to that life of it."""

    __slots__ = ("_source", "epoch", "node")

    def __init__(self, source: LinkSource, node: NodeId, epoch: Epoch | None = None) -> None:
        self._source = source
        self.node = node
        self.epoch = epoch

    def __repr__(self) -> str:
        return str(self.node)

    async def link(self, *, timeout: Seconds) -> Link:
        """The link to the node, dialled if there is none.

        Errors: `LinkLost` (not sent) if it is no member or has begun another life; `DialFailed`,
        `DeadlineExceeded`. Cancellation: ends only this wait.
        """
        return self._checked(await self._source.link(self.node, timeout=timeout))

    async def reach(self, *, timeout: Seconds) -> None:
        """Dials the node if there is no link of either kind. Errors: those of `link`."""
        if self._source.local_link(self.node) is None:
            await self.link(timeout=timeout)

    async def ask(
        self,
        method: Method[Q, R],
        message: Q,
        *,
        timeout: Seconds,
        late: Callable[[R], None] | None = None,
    ) -> R:
        """Sends a request and waits for the answer, the dial included. Errors: those of `link` and
        of `net.base.Link.request`, which explains `late`."""
        local = self._source.local_link(self.node)
        if local is not None:
            asking = self._checked(local).request(method, message, timeout=timeout, late=late)
            return await asking
        until = self._source.now() + timeout
        link = await self.link(timeout=timeout)
        left = max(_LEAST, until - self._source.now())
        return await link.request(method, message, timeout=left, late=late)

    def tell(self, notice: Notice[Q], message: Q) -> None:
        """Sends a one-way message on the present link; none is dialled. Errors: `LinkLost` (not
        sent), `Overloaded`, `PayloadTooLarge`."""
        local = self._source.local_link(self.node)
        if local is not None:
            self._checked(local).tell(notice, message)
            return
        link = self._source.link_nowait(self.node)
        if link is None:
            raise LinkLost(f"there is no link to {self.node}", sent=False)
        self._checked(link).tell(notice.id, encoder_for(link.peer.features)(message))

    def _checked(self, link: W) -> W:
        if self.epoch is not None and link.peer.epoch != self.epoch:
            raise LinkLost(f"life {self.epoch} of {self.node} is over", sent=False)
        return link


async def ask_all(
    node: Node, peers: Sequence[NodeId], method: Method[Q, R], message: Q, *, timeout: Seconds
) -> dict[NodeId, R | PdserveError]:
    """Asks all `peers` at the same time; `timeout` is for all together. Each has its answer or its
    error in the result. Cancellation: ends the requests."""
    silent = DeadlineExceeded(f"no answer within {timeout:g} s")
    answers: dict[NodeId, R | PdserveError] = {**dict.fromkeys(peers, silent)}
    turn = asyncio.Semaphore(_AT_ONCE)

    async def ask(peer: NodeId) -> None:
        async with turn:
            try:
                answer = await node.ref(peer).ask(method, message, timeout=timeout)
            except PdserveError as error:
                answers[peer] = error
            else:
                answers[peer] = answer

    asking = [node.tasks.spawn(ask(peer), f"{method.name} of {peer}") for peer in peers]
    try:
        if asking:
            await asyncio.wait(asking, timeout=timeout)
    finally:
        for task in asking:
            task.cancel()
    return answers
