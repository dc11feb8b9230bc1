"""Lets a listening socket finish what it has begun, before it is closed.

Closing a listener resets the connections that wait to be accepted. A client that connects again and
again always has one there. So the kernel first drops the packets that begin a connection: the
backlog then ends, and the client tries again a second later, when it is refused or, if others share
the port, accepted by another.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from typing import Final

__all__ = ["end_backlog"]

_SO_ATTACH_FILTER: Final = 26
_LOAD_BYTE, _JUMP_IF_SET, _RETURN = 0x30, 0x45, 0x06
_FLAGS: Final = 13
"""Offset of the flags in a TCP header, where a filter of a TCP socket begins to read."""
_SYN: Final = 0x02
_PROGRAM: Final = (
    (_LOAD_BYTE, 0, 0, _FLAGS),
    (_JUMP_IF_SET, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),  # drop
    (_RETURN, 0, 0, 0xFFFFFFFF),  # keep all bytes
)
"""Classic BPF. Handshakes that have begun end well: only their first packet has SYN."""


def end_backlog(listener: socket.socket) -> None:
    """Lets no new connection into the backlog; those in it can be accepted as before."""
    try:
        _attach(listener)
    except OSError:
        # A sandbox without filters. Without a backlog, one connection at a time comes in.
        listener.listen(0)


def _attach(listener: socket.socket) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in _PROGRAM))
    program = struct.pack("HL", len(_PROGRAM), ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
