"""Connects nodes on one host through Unix sockets, and passes file descriptors.

The greeting is the first packet in each direction: the path's secret and the sender's descriptors.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import TYPE_CHECKING

import msgspec

from pdserve.transfer.copy_plan import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "SocketGreeting",
    "boot_id",
    "check_user",
    "close_all",
    "receive_greeting",
    "send_greeting",
    "seqpacket",
    "who_connects",
]


class SocketGreeting(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first packet, sent with descriptors: the table, then those of the backend."""

    token: bytes
    words: bytes = b""
    """What else the peer must know to map the pools: a record of the backend."""


_decode = msgspec.msgpack.Decoder(SocketGreeting).decode


def send_greeting(
    connection: socket.socket, token: bytes, own: Sequence[int], words: bytes = b""
) -> None:
    """Send a greeting with these descriptors, which the peer may only read."""
    fds: list[int] = []
    try:
        for fd in own:
            fds += [os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        packet = msgspec.msgpack.encode(SocketGreeting(token, words))
        connection.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
    finally:
        close_all(fds)


def seqpacket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def receive_greeting(connection: socket.socket) -> tuple[SocketGreeting, list[int]]:
    """Receive a greeting and its descriptors. Errors: `PlanError`, `OSError`."""
    packet, fds, flags, _ = socket.recv_fds(connection, 16 * 1024, 128)
    try:
        if not packet or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise PlanError("the connection ended before the greeting, or it was cut")
        greeting = _decode(packet)
    except BaseException:
        close_all(fds)
        raise
    for fd in fds:
        os.set_inheritable(fd, False)
    return greeting, list(fds)


def check_user(connection: socket.socket) -> None:
    """Check that the other process runs as this user, by what the kernel says. Errors:
    `PlanError`."""
    _, user = _credentials(connection)
    if user != os.geteuid():
        raise PlanError(f"the peer runs as user {user}, this node as {os.geteuid()}")


def who_connects(connection: socket.socket, _: object = None) -> str:
    """The party that a connection counts against: one process of this user, or another user as a
    whole."""
    process, user = _credentials(connection)
    return f"process {process}" if user == os.geteuid() else f"user {user}"


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """The process id and the user id of the other side."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    process, user, _ = struct.unpack("iII", packed)
    return process, user


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError as error:
        raise PlanError(f"cannot tell which host this is: {error}") from error


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
