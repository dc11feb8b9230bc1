"""The node's end of a core's sockets: decodes events, encodes commands, one write per loop tick.

An asyncio protocol without streams or tasks: each event is passed on synchronously within
`data_received`. It knows neither submissions nor restarts; each `CoreRun` owns one to the thread
that computes and one to the thread of the transports.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import msgspec

from pdserve.errors import ProtocolError
from pdserve.messages.engine import Event
from pdserve.token_ids import packed_ids
from pdserve.wire.length_prefixed import FrameDecoder, encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes
    from pdserve.messages.engine import Command, ControlCommand

__all__ = ["CoreConnection"]

_WRITE_HIGH_WATER: Bytes = 8 * 1024 * 1024


class CoreConnection(asyncio.Protocol):
    """Connection to one thread of a core. `lost` is done when it has ended; its result is the error
    if this side closed it because of one, else None."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_event: Callable[[Any], None],
        reads: Any = Event,
        *,
        first: bytes | None = None,
    ) -> None:
        """`on_event` gets events of the union `reads`. `first`: the rest of a command that was
        begun on the socket before."""
        self.lost: asyncio.Future[ProtocolError | None] = loop.create_future()
        self.congested = False
        """True while more than `_WRITE_HIGH_WATER` bytes wait for the core to read them."""
        self.posted = 0 if first is None else 1
        """Number of commands posted so far."""
        self._first = first
        self._loop = loop
        self._on_event = on_event
        self._frames = FrameDecoder()
        self._encode = msgspec.msgpack.Encoder(enc_hook=packed_ids).encode
        self._decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(reads).decode
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._error: ProtocolError | None = None

    # ------------------------------------------------------------------ commands

    def post(self, command: Command | ControlCommand) -> None:
        """Send a command together with all others of this loop tick. It is dropped silently once
        the connection has ended, since `lost` reports that."""
        body = encode_frame(self._encode(command))
        self.posted += 1
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(body)

    def _flush(self) -> None:
        data = b"".join(self._unsent)
        self._unsent.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection now; unsent commands are dropped. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: ProtocolError) -> None:
        """Close the connection because of an error, which `lost` tells."""
        self._error = error
        self.close()

    # ------------------------------------------------------------------ asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER)
        if self._first:
            self._transport.write(self._first)
            self._first = None

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._on_event(self._decode(body))
        except (ProtocolError, msgspec.MsgspecError) as error:
            self.fail(ProtocolError(f"the engine core sent an unreadable message: {error}"))

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.lost.done():
            self.lost.set_result(self._error)
