"""Joins one stream's record in the wire protocol, the sink that reads, and who writes.

Owned by one connection of one `link`. The wire package counts credit; sinks hear of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import Overloaded

if TYPE_CHECKING:
    from pdserve.net.base import StreamSink
    from pdserve.net.connection_driver import ConnectionDriver
    from pdserve.net.link import PeerLink
    from pdserve.wire.flow import StreamState
    from pdserve.wire.parser import Buffer

__all__ = ["LinkStream"]


class LinkStream:
    """A stream of a link; implements `net.base.IncomingStream`."""

    __slots__ = ("_ended", "_shell", "_sink", "_wire", "link")

    def __init__(
        self,
        link: PeerLink,
        shell: ConnectionDriver,
        wire: StreamState,
        sink: StreamSink | None,
    ) -> None:
        self.link = link
        self._shell = shell
        self._wire = wire
        self._sink = sink
        # True or the error once the sink gets nothing more.
        self._ended: BaseException | bool = False

    # ------------------------------------------------------------------ reading

    def accept(self, sink: StreamSink, *, window: int = 0) -> None:
        if self._sink is not None:
            raise RuntimeError("the stream was accepted before")
        self._sink = sink
        if self._ended:
            sink.on_end(None if self._ended is True else self._ended)
        elif window and not self._shell.connection.grant(self._wire, window):
            self._sink = None
            raise Overloaded("no credit is left for another stream of the peer")
        self._wake()

    def on_data(self, items: list[Buffer], cost: int, *, last: bool) -> None:
        if self._sink is not None:
            on_data = self._sink.on_data
            for body in items:
                on_data(body)
                if self._ended:
                    return  # the sink aborted the stream
        self._shell.connection.consumed(self._wire, cost)
        if last:
            self.on_end(None)

    def on_end(self, error: BaseException | None) -> None:
        """Ends the peer's half, after its end or a failure of the stream; calls the sink once."""
        if not self._ended:
            self._ended = True if error is None else error
            if self._sink is not None:
                self._sink.on_end(error)

    # ------------------------------------------------------------------ writing

    @property
    def sendable(self) -> bool:
        return self._wire.sending and self._wire.credit > 0

    def try_send(self, body: Buffer, *, last: bool = False) -> bool:
        shell = self._shell
        if not shell.connection.send_data(self._wire, body, last=last):
            return False
        if not shell.due:
            shell.wake()
        return True

    def end(self) -> None:
        self._shell.connection.end(self._wire)
        self._wake()

    def abort(self, error: BaseException) -> None:
        if not self._ended:
            self._ended = True
        self._shell.connection.abort(self._wire, error)
        self._wake()

    def on_unblocked(self) -> None:
        """The peer has granted credit."""
        if self._sink is not None:
            self._sink.on_unblocked()

    def _wake(self) -> None:
        if not self._shell.due:
            self._shell.wake()
