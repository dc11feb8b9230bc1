"""The node's end of a core's socket: frames to events, commands to frames, one write per tick.

An asyncio protocol without streams or tasks: every event is handed on synchronously inside
`data_received`. It knows no submissions and no restarts; `CoreClient` owns one per life of a core.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import msgspec

from pdserve.errors import ProtocolError
from pdserve.messages.engine import Event
from pdserve.wire.length_prefixed import FrameDecoder, encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes
    from pdserve.messages.engine import Command

__all__ = ["CoreConnection"]

_WRITE_HIGH_WATER: Bytes = 8 * 1024 * 1024


class CoreConnection(asyncio.Protocol):
    """`lost` is done when the connection has ended, with the reason if we ended it for cause."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_event: Callable[[Event], None]) -> None:
        self.lost: asyncio.Future[ProtocolError | None] = loop.create_future()
        self.congested = False
        """The core reads more slowly than we write; the bound is `_WRITE_HIGH_WATER`."""
        self.posted = 0
        """Commands so far."""
        self._loop = loop
        self._on_event = on_event
        self._frames = FrameDecoder()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes], Event] = msgspec.msgpack.Decoder(Event).decode
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._error: ProtocolError | None = None

    # ------------------------------------------------------------------ commands

    def post(self, command: Command) -> None:
        """Send with everything else of this loop tick; silently dropped once the other end is
        gone, since its end is reported by `lost`."""
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
        """End the connection now; unsent commands are dropped. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------ asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._on_event(self._decode(body))
        except (ProtocolError, msgspec.MsgspecError) as error:
            self._error = ProtocolError(f"the engine core sent what cannot be read: {error}")
            self.close()

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.lost.done():
            self.lost.set_result(self._error)
