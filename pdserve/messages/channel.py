"""What a frontend and a worker say to each other on the one stream between them.

    frontend  Open, Abort, Piece
    worker    Batch, Piece

A frontend numbers its requests on the channel; the worker answers with the engine's handle, which
every delta carries, so that nothing is rewritten on the way of a token. One `Batch` holds all that
a step produced for this frontend, whatever the number of its requests. A body too large for a frame
travels as `Piece`s. Fields are only added at a record's end, with a default: one release reads what
the one before and the one after it write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.errors import PayloadTooLarge, ProtocolError
from pdserve.messages.engine import Rejected
from pdserve.messages.request import GenerateRequest, TokenDelta

if TYPE_CHECKING:
    from pdserve.ids import Bytes

CHANNEL: Final = 0x0310
"""The method number of the stream, which the frontend opens."""

PIECE_BYTES: Final = 1 << 20
"""A frame of the channel is at most about this long, so that none delays the others for long."""
LARGEST: Final = 64 << 20
"""Bytes of one message, pieces together."""

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Serve this; answered by an entry in `Batch.accepted` or `Batch.rejected`."""

    number: Number
    """Chosen by the frontend, never reused on this channel."""
    booking: Number
    """The router's; 0: none."""
    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Free everything of this request; nothing more is wanted of it."""

    number: Number


MoveReason = Literal["drain", "queue", "itl", "kv"]
"""Why a request had better be served elsewhere: its worker is going away; another one would begin
it sooner; its worker's streams have become too slow; its worker runs out of KV blocks."""


class Moving(msgspec.Struct, frozen=True, array_like=True):
    """The worker would rather have this request served elsewhere. It goes on with it until the
    frontend aborts it, or until it has to go."""

    number: Number
    """The frontend's."""
    reason: MoveReason


class Batch(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Everything since the last one, in this order: accepted, deltas, rejected."""

    deltas: list[TokenDelta] = []
    accepted: list[tuple[int, int]] = []
    """(the frontend's number, the engine's handle), before the handle's first delta."""
    rejected: list[Rejected] = []
    """Requests that ended in an error, at once or later; `handle` is the frontend's number."""
    moving: list[Moving] = []
    """An older frontend does not know this and stays until the worker goes."""


class Piece(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A part of a larger message; the parts of one message follow each other."""

    data: bytes
    last: bool


def split(body: bytes) -> list[bytes]:
    """A message's body as the frames it travels in. Raises `PayloadTooLarge`."""
    if len(body) <= PIECE_BYTES:
        return [body]
    if len(body) > LARGEST:
        raise PayloadTooLarge(f"a message of {len(body)} bytes; {LARGEST} at most")
    starts = range(0, len(body), PIECE_BYTES)
    encode = msgspec.msgpack.encode
    return [
        encode(Piece(body[at : at + PIECE_BYTES], at + PIECE_BYTES >= len(body))) for at in starts
    ]


class Assembler:
    """Pieces back to the body they were cut from."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size: Bytes = 0

    def take(self, piece: Piece) -> bytes | None:
        """The whole body with its last piece, else None. Raises `ProtocolError`."""
        if not (piece.data or piece.last):
            raise ProtocolError("an empty piece that is not the last")
        self._parts.append(piece.data)
        self._size += len(piece.data)
        if self._size > LARGEST:
            raise ProtocolError(f"more than {LARGEST} bytes in pieces")
        if not piece.last:
            return None
        whole = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        return whole
