"""What a connection reports: one record per thing that happened, in the order of the bytes.

An event is handed over once and not kept. What a busy connection has most of, requests, answers
and items of streams, comes by the list: one event for a run of them.

`context` is whatever the owner gave when it started the request; a stream's is on the `Stream`.
"""

from __future__ import annotations

import msgspec

from pdserve.errors import PdserveError
from pdserve.wire.flow import Stream
from pdserve.wire.handshake import Claim, Spoken
from pdserve.wire.parser import Buffer

__all__ = [
    "Answered",
    "Asked",
    "Authenticated",
    "BulkWanted",
    "Data",
    "Ended",
    "Event",
    "Failed",
    "GoingAway",
    "Opened",
    "PayloadBegins",
    "Pong",
    "Raw",
    "Ready",
    "RequestCancelled",
    "Reset",
    "Told",
    "Unblocked",
    "Violated",
]


class _Event(msgspec.Struct, gc=False):
    """No cycles run through an event, so the collector need not look at it: except where it has an
    error, whose traceback leads to the frame that holds the event."""


class Authenticated(_Event):
    """Acceptor: the peer has proved the key. Answer with `accept` or `refuse` before reading on."""

    claim: Claim
    spoken: Spoken


class Ready(_Event):
    """Dialler: the connection is open."""

    claim: Claim
    spoken: Spoken


class Told(_Event):
    """A one-way message."""

    method: int
    body: Buffer


class Asked(_Event):
    """Requests that came one behind the other.

    Exactly one of `respond` and `fail` answers each, unless it is cancelled first.
    """

    requests: list[tuple[int, int, int, Buffer]]
    """(id, method, milliseconds left of the asker's deadline, body)."""


class Answered(_Event):
    """Requests of ours that succeeded, whose answers came one behind the other."""

    answers: list[tuple[object, Buffer]]
    """(context, body)."""


class Failed(_Event, gc=True):
    """A request of ours failed at the peer."""

    context: object
    error: PdserveError


class RequestCancelled(_Event):
    """The peer no longer wants the answer; the connection has already confirmed that."""

    stream: int


class Opened(_Event):
    """The peer opened a stream. Give it a context, then `grant` credit if data is to come."""

    stream: Stream
    method: int
    body: Buffer
    last: bool
    """The peer sends nothing."""


class Data(_Event):
    """Items of one stream that came one behind the other."""

    stream: Stream
    items: list[Buffer]
    cost: int
    """What they cost together: the credit to return once they are taken."""
    last: bool


class PayloadBegins(_Event):
    """A large payload waits: call `place` with its destination, or None to drop it.

    Always the last event of a `receive_*` call.
    """

    stream: Stream
    meta: bytes
    size: int


class Raw(_Event):
    """A raw payload is complete; a large one is where it was placed, empty if it was dropped."""

    stream: Stream
    meta: bytes
    payload: Buffer
    size: int
    """Of meta and payload together, also if it was dropped."""
    last: bool


class Ended(_Event):
    """The peer's half of the stream is complete."""

    stream: Stream


class Reset(_Event, gc=True):
    """The stream is over in both directions."""

    stream: Stream
    error: PdserveError


class Unblocked(_Event):
    """Credit came for a stream that had none left."""

    stream: Stream


class Pong(_Event):
    value: int


class GoingAway(_Event):
    """The peer starts nothing more here; what is under way goes on."""

    code: int
    message: str


class BulkWanted(_Event):
    """The peer asks us, who dialled, for the bulk connection."""


class Violated(_Event, gc=True):
    """The last event: the connection cannot go on. Send what is left, then close the transport."""

    error: PdserveError


Event = (
    Authenticated
    | Ready
    | Told
    | Asked
    | Answered
    | Failed
    | RequestCancelled
    | Opened
    | Data
    | PayloadBegins
    | Raw
    | Ended
    | Reset
    | Unblocked
    | Pong
    | GoingAway
    | BulkWanted
    | Violated
)
