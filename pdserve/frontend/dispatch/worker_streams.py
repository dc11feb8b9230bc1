"""Owns a frontend's streams to workers: one per worker for new requests, older ones until they end.

The stream to a worker in the same process uses its local link.

A link may be replaced while requests run on it: they stay on their stream, and new ones get one on
the new link. When a worker is gone, its streams end, and with them the requests on them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from pdserve.errors import DeadlineExceeded, DialTimeout, WorkerLost
from pdserve.frontend.dispatch.worker_stream import WorkerStream
from pdserve.runtime.registry import MemberGone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.errors import PdserveError
    from pdserve.ids import NodeId, NodeLife, Seconds
    from pdserve.net.base import StreamOpener
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent

__all__ = ["WorkerStreams"]

_LINK_TIMEOUT: Final[Seconds] = 3.0
_LAST_WORDS: Final[Seconds] = 2.0
"""A node that leaves in order ends its streams itself, after its last output."""


class WorkerStreams:
    """The streams of one frontend. Used on the event loop's thread."""

    def __init__(self, node: Node) -> None:
        """Pass each member event to `note`."""
        self._node = node
        self.newest: dict[NodeId, WorkerStream] = {}
        """The stream for new requests, by worker."""
        self.retired: dict[WorkerStream, None] = {}
        """Replaced streams that still carry requests."""

    @property
    def requests(self) -> int:
        """Number of requests at workers."""
        return sum(stream.requests for stream in self._all())

    async def stream(self, life: NodeLife) -> WorkerStream | None:
        """The stream to this life of a worker, opened if needed; None if a later life has begun.

        Errors: those of the dial; `DialTimeout` after 3 s.
        """
        worker, epoch = life
        local = self._node.local_link(worker)
        if local is not None and local.peer.epoch == epoch:
            return self._on(local)
        link = self._node.link_nowait(worker)
        if link is not None and link.peer.epoch < epoch:
            # This end has not noticed yet that the older life is over.
            link.abort("the peer has restarted")
            link = None
        if link is None or link.retiring:
            try:
                link = await self._node.link(worker, timeout=_LINK_TIMEOUT)
            except DeadlineExceeded as error:
                # Only the dial has timed out; the request may have time left.
                raise DialTimeout(error.message) from None
        if link.peer.epoch != epoch:
            return None
        return self._on(link)

    def _on(self, link: StreamOpener) -> WorkerStream:
        """The stream on this link."""
        stream = self.newest.get(link.peer.node)
        if stream is not None and stream.link is link and stream.over is None:
            return stream
        return self._make(link)

    def _make(self, link: StreamOpener) -> WorkerStream:
        """Opens a stream on this link for new requests; the old stream, if any, ends with its last
        request."""
        worker = link.peer.node
        stream = WorkerStream(link, self._node.timers)
        old = self.newest.get(worker)
        self.newest[worker] = stream
        stream.on_over = partial(self._forget, stream)
        if old is not None:
            self.retired[old] = None
            old.retire()
        return stream

    def _forget(self, stream: WorkerStream) -> None:
        self.retired.pop(stream, None)
        if self.newest.get(stream.worker) is stream:
            del self.newest[stream.worker]

    def _all(self) -> Iterator[WorkerStream]:
        yield from self.newest.values()
        yield from self.retired

    def note(self, event: MemberEvent) -> None:
        """Takes over a change of the membership."""
        if not isinstance(event, MemberGone):
            return
        member = event.member
        error = WorkerLost(f"worker {member.node} is gone: {event.reason}", retry_after=1.0)
        for stream in tuple(self._all()):
            peer = stream.link.peer
            if (peer.node, peer.epoch) != (member.node, member.epoch):
                continue
            if event.reason == "left":
                # The news may overtake the worker's last tokens.
                self._node.timers.call_later(_LAST_WORDS, partial(stream.close, error))
            else:
                stream.close(error)

    def close(self, error: PdserveError) -> None:
        """Ends every stream; requests on them end with `error`."""
        for stream in tuple(self._all()):
            stream.close(error)
