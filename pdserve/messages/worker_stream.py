"""Defines the stream between a frontend and a worker: requests in, batched output back.

    frontend  OpenRequest, AbortRequest, Fragment
    worker    OutputBatch, Fragment

A frontend numbers its requests on the stream. The worker answers with the engine's handle, which
every delta carries, so that no delta is rewritten. One `OutputBatch` holds all that a step produced
for this frontend. A body too large for a frame travels as `Fragment`s. Fields are only added at a
record's end, with a default: a release reads what the previous and the next one write.
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

WORKER_STREAM: Final = 0x0310
"""Method number of the stream, which the frontend opens."""

FRAGMENT_BYTES: Final = 1 << 20
"""Approximate most bytes of a frame, so that no frame delays the others for long."""
MAX_MESSAGE_BYTES: Final = 64 << 20
"""Most bytes of one message, all fragments together."""

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class OpenRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Asks to serve a request; answered in `OutputBatch.accepted` or `OutputBatch.rejected`."""

    number: Number
    """Request number, chosen by the frontend, never reused on this stream."""
    booking: Number
    """The router's booking id; 0: none."""
    request: GenerateRequest


class AbortRequest(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Ends a request and frees everything it holds."""

    number: Number


MigrationHintReason = Literal["drain", "queue", "itl", "kv"]
"""Why a worker asks to move a request: `drain`: the worker is shutting down; `queue`: another
worker would begin it sooner; `itl`: the worker's streams are too slow; `kv`: it runs out of KV
blocks.
"""


class WorkerMigrationHint(msgspec.Struct, frozen=True, array_like=True):
    """Asks to move this request to another worker. The worker goes on with it until the frontend
    aborts it, or until the worker stops.
    """

    number: Number
    """The frontend's request number."""
    reason: MigrationHintReason


class OutputBatch(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """All output since the last batch, to be applied in this order: accepted, deltas, rejected."""

    deltas: list[TokenDelta] = []
    accepted: list[tuple[int, int]] = []
    """(the frontend's number, the engine's handle), before the handle's first delta."""
    rejected: list[Rejected] = []
    """Requests that ended in an error, at once or later; `handle` is the frontend's number."""
    moving: list[WorkerMigrationHint] = []
    """Migration hints. An older frontend ignores them and stays until the worker stops."""


class Fragment(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A part of a larger message; the parts of one message follow each other."""

    data: bytes
    last: bool


def split_message(body: bytes) -> list[bytes]:
    """Splits a message body into frames. Raises `PayloadTooLarge`."""
    if len(body) <= FRAGMENT_BYTES:
        return [body]
    if len(body) > MAX_MESSAGE_BYTES:
        raise PayloadTooLarge(
            f"a message has {len(body)} bytes, at most {MAX_MESSAGE_BYTES} are allowed"
        )
    starts = range(0, len(body), FRAGMENT_BYTES)
    encode = msgspec.msgpack.encode
    return [
        encode(Fragment(body[at : at + FRAGMENT_BYTES], at + FRAGMENT_BYTES >= len(body)))
        for at in starts
    ]


class FragmentAssembler:
    """Reassembles fragments into a message body."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size: Bytes = 0

    def take(self, piece: Fragment) -> bytes | None:
        """Adds a fragment; returns the whole body with its last one, else None. Raises
        `ProtocolError`.
        """
        if not (piece.data or piece.last):
            raise ProtocolError("an empty fragment that is not the last")
        self._parts.append(piece.data)
        self._size += len(piece.data)
        if self._size > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"the fragments of a message have more than {MAX_MESSAGE_BYTES} bytes"
            )
        if not piece.last:
            return None
        whole = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        return whole
