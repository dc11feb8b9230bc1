"""The transports' end of their socket to the node: reads control commands, writes control events.

Used in the transports' thread, so a control call never waits for the thread that computes. How much
it buffers is bounded by the calls that may be under way in each direction. It knows neither calls
nor paths; `ThreadKvConnector` owns one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

import msgspec

from pdserve.errors import ProtocolError
from pdserve.messages.engine import ControlCommand
from pdserve.wire.length_prefixed import FrameDecoder, encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.messages.engine import ControlEvent

__all__ = ["ControlSocket"]

_log = logging.getLogger(__name__)


class ControlSocket(asyncio.Protocol):
    """An asyncio protocol; each command is handled within `data_received`."""

    def __init__(self, on_broken: Callable[[str], None]) -> None:
        """`on_broken` is called with the reason, once, if the node sends what cannot be read or
        handled."""
        self.on_command: Callable[[ControlCommand], None] = lambda command: None
        self._on_broken = on_broken
        self._frames = FrameDecoder()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes], ControlCommand]
        self._decode = msgspec.msgpack.Decoder(ControlCommand).decode
        self._transport: asyncio.Transport | None = None

    def say(self, event: ControlEvent) -> None:
        """Send an event to the node. Dropped once the node has closed its end: the core ends."""
        if self._transport is not None:
            self._transport.write(encode_frame(self._encode(event)))

    def close(self) -> None:
        """Write what is unsent, then close. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------------ asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            commands = [self._decode(body) for body in self._frames.feed(data)]
        except (ProtocolError, msgspec.MsgspecError) as error:
            self._break(f"a control command cannot be read: {error}")
            return
        try:
            for command in commands:
                self.on_command(command)
        except Exception as error:
            # asyncio would close the socket, and not report every kind of error.
            _log.exception("a control command cannot be handled")
            self._break(f"a control command cannot be handled: {error!r}")

    def _break(self, reason: str) -> None:
        self.close()
        self._on_broken(reason)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
