"""Carries messages between rank 0 and another rank outside of steps: loading, and what went wrong.

A socket pair that keeps message boundaries; descriptors travel with messages. The end of either
process closes it, which the other end notices at once.
"""

from __future__ import annotations

import os
import select
import socket
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.messages.engine import EngineSpec
from pdserve.transfer.cuda.driver import CudaIpcExport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Seconds

__all__ = [
    "AllocatePool",
    "JoinRanks",
    "LoadRank",
    "PoolAllocated",
    "RankFailed",
    "RankLink",
    "RankLinkClosed",
    "RankLoaded",
    "RankMessage",
    "link_pair",
]

_MOST_BYTES: Final = 1 << 17
_MOST_FDS: Final = 8


class LoadRank(msgspec.Struct, frozen=True, tag=1):
    """Asks a rank to load its shard. With it come the descriptors of the plan ring, of the group's
    store, of the rank's bell and of its heartbeat page."""

    spec: EngineSpec
    rank: int
    patience: float
    """Longest wait for another rank within a step, in seconds."""


class RankLoaded(msgspec.Struct, frozen=True, tag=2):
    """The shard is loaded."""

    weight_bytes: int
    free: int = 0
    """Bytes that are free on the rank's GPU; the three are 0 on a CPU."""
    total: int = 0
    own: int = 0
    """Bytes of the GPU that the rank has taken."""
    checkpoint: bytes = b""
    """Tells checkpoints apart (`OpenedModel.digest`)."""


class JoinRanks(msgspec.Struct, frozen=True, tag=3):
    """Asks a rank to join the group of ranks; all do at the same time."""


class AllocatePool(msgspec.Struct, frozen=True, tag=4):
    """Asks a rank for a KV pool."""

    num_blocks: int
    memory: CudaIpcExport | None = None
    """Memory of the pool on the rank's GPU; None: the rank allocates host memory."""


class PoolAllocated(msgspec.Struct, frozen=True, tag=5):
    """The pool is there, zeroed. With it comes the descriptor of its memory, if it has one."""


class RankFailed(msgspec.Struct, frozen=True, tag=6):
    """The rank ends, for this reason."""

    reason: str


RankMessage = LoadRank | RankLoaded | JoinRanks | AllocatePool | PoolAllocated | RankFailed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)


class RankLinkClosed(Exception):
    """The other process has ended, or has closed its end."""


class RankLink:
    """One end of the link."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """The descriptor, to wait for messages together with other things."""
        return self._socket.fileno()

    def send(self, message: RankMessage, fds: Sequence[int] = ()) -> None:
        """Send a message and copies of descriptors. Raises `RankLinkClosed`."""
        try:
            socket.send_fds(self._socket, [_encoder.encode(message)], list(fds))
        except OSError as error:
            raise RankLinkClosed(str(error)) from error

    def receive(self, patience: Seconds) -> tuple[RankMessage, list[int]] | None:
        """The next message and its descriptors, which the caller closes; None if there is none for
        `patience` seconds. Raises `RankLinkClosed`."""
        if not select.select([self._socket], [], [], patience)[0]:
            return None
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, _MOST_FDS)
        except OSError as error:
            raise RankLinkClosed(str(error)) from error
        if not data:
            raise RankLinkClosed("closed by the other end")
        for fd in fds:
            os.set_inheritable(fd, False)
        return _decoder.decode(data), list(fds)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


def link_pair() -> tuple[RankLink, socket.socket]:
    """This process's end, and the socket for another one to inherit."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return RankLink(ours), theirs
