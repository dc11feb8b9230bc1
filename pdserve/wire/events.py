"""Events of a connection: one record for each thing that happened, in the order of the bytes.

An event is returned once and not kept. Requests, answers and stream items are frequent and come in
lists: one event for a run of them. `context` is the object that the owner gave when it started the
request; the context of a stream is in its `StreamState`.
"""

from __future__ import annotations

import msgspec

from pdserve.errors import PdserveError
from pdserve.wire.flow import StreamState
from pdserve.wire.handshake import IdentityClaim, Negotiated
from pdserve.wire.parser import Buffer

__all__ = [
    "AnswersReceived",
    "Authenticated",
    "BulkWanted",
    "ConnectionReady",
    "DataReceived",
    "Event",
    "GoingAway",
    "Pong",
    "ProtocolViolated",
    "RequestCancelled",
    "RequestFailed",
    "RequestsReceived",
    "StreamEnded",
    "StreamOpened",
    "StreamReset",
    "StreamUnblocked",
    "TellReceived",
]


class _Event(msgspec.Struct, gc=False):
    """Base of events. The garbage collector skips them, because they are in no reference cycles.
    Events with an error are an exception: its traceback refers to the frame that holds the event.
    """


class Authenticated(_Event):
    """Acceptor: the peer has proved the key. Answer with `accept` or `refuse` before reading on."""

    claim: IdentityClaim
    spoken: Negotiated


class ConnectionReady(_Event):
    """Dialler: the connection is open."""

    claim: IdentityClaim
    spoken: Negotiated


class TellReceived(_Event):
    """A one-way message."""

    method: int
    body: Buffer


class RequestsReceived(_Event):
    """Requests that came in a run. Answer each exactly once by `respond` or `fail`, unless it is
    cancelled first.
    """

    requests: list[tuple[int, int, int, Buffer]]
    """Tuples of (id, method, milliseconds left of the caller's deadline, body)."""


class AnswersReceived(_Event):
    """Answers of own requests that succeeded, in a run."""

    answers: list[tuple[object, Buffer]]
    """Tuples of (context, body)."""


class RequestFailed(_Event, gc=True):
    """An own request failed at the peer."""

    context: object
    error: PdserveError


class RequestCancelled(_Event):
    """The peer has cancelled a request; the connection has already confirmed that."""

    stream: int


class StreamOpened(_Event):
    """The peer opened a stream. Give it a context, then `grant` credit if data is to come."""

    stream: StreamState
    method: int
    body: Buffer
    last: bool
    """True if the peer sends nothing."""


class DataReceived(_Event):
    """Items of one stream that came in a run."""

    stream: StreamState
    items: list[Buffer]
    cost: int
    """Total cost of the items: the credit to return once they are taken."""
    last: bool


class StreamEnded(_Event):
    """The peer's half of the stream is complete."""

    stream: StreamState


class StreamReset(_Event, gc=True):
    """The stream is over in both directions."""

    stream: StreamState
    error: PdserveError


class StreamUnblocked(_Event):
    """Credit came for a stream that had none left."""

    stream: StreamState


class Pong(_Event):
    value: int


class GoingAway(_Event):
    """The peer starts nothing more here; work under way goes on."""

    code: int
    message: str


class BulkWanted(_Event):
    """The peer asks this side, which dialled, for the bulk connection."""


class ProtocolViolated(_Event, gc=True):
    """The last event: the connection cannot go on. Send what is left, then close the transport."""

    error: PdserveError


Event = (
    Authenticated
    | ConnectionReady
    | TellReceived
    | RequestsReceived
    | AnswersReceived
    | RequestFailed
    | RequestCancelled
    | StreamOpened
    | DataReceived
    | StreamEnded
    | StreamReset
    | StreamUnblocked
    | Pong
    | GoingAway
    | BulkWanted
    | ProtocolViolated
)
