"""Which worker takes a request: a frontend's question, the router's answer, what it rests on.

`Route` and `Release` go from frontends to routers, `Routed` back. `WorkerLoad` is what a worker
publishes of itself, `Booked` what a router publishes of its decisions. No prompt travels here:
tokens go from the frontend to the worker that was named, routers see only the names of blocks.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.ids import NodeId

LOAD = "load"
"""Topic of a worker, a value: `WorkerLoad`."""
SEQUENCES = "sequences"
"""Topic of a worker, a set: the keys of the bookings that it holds; the value is empty until the
first token, then `messages.request.Started`."""
BOOKINGS = "bookings"
"""Topic of a router, a set: its own bookings, `Booked` by key."""

BookingId = Annotated[int, Meta(ge=0)]
"""Names one booking in the whole cluster, in 63 bits, which every language's integers hold: the
upper 31 are drawn by the router at its start, the lower 32 count."""

Count = Annotated[int, Meta(ge=0)]

WEIGHTS: Final = (0.001, 1000)
"""The smallest and the largest share of a tenant: sums of time over weight stay numbers that can
be compared."""

_FAR: Final = 1e9
"""Seconds; more is no time at all, and neither is what is no number."""

Outcome = Literal["finished", "cancelled", "failed", "unreached"]
"""Of a placed request, as its frontend saw it. `failed`: the worker answered with an error or was
lost; `unreached`: the request never left the frontend."""


class Route(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Who takes this request? Asked again, with another `attempt`, when a worker was lost."""

    request_id: str
    attempt: Count = 0
    """0 for the first."""
    model: str
    """As the client wrote it: a name or an alias."""
    prompt_tokens: Count
    """All that must be in KV before the next token: the output of earlier attempts included."""
    max_tokens: Count
    """Output tokens that may still come, per choice."""
    n: Annotated[int, Meta(ge=1)] = 1
    """Choices; each becomes a sequence."""
    priority: int = 0
    """Higher is sooner."""
    excluded: tuple[NodeId, ...] = ()
    """Workers that this request has already failed at, or that its client will not have."""
    allowed: tuple[NodeId, ...] = ()
    """Only these workers; empty: all."""
    names: bytes = b""
    """Short names (`blocks.hashing.short_names`, 8 bytes each) of the prompt's full blocks, in
    order. Empty: the asker could not name them, so nothing is known to overlap."""
    names_id: bytes = b""
    """Which secret the names were made with; a worker with another one overlaps nowhere."""
    block_size: Count = 0
    """Tokens of a block; 0 without names."""
    session_id: str = ""
    """Requests of one conversation or agent; empty: none was given."""
    tenant: str = ""
    """Whom the API key belongs to; empty: no keys are in use."""
    weight: Annotated[float, Meta(ge=WEIGHTS[0], le=WEIGHTS[1])] = 1.0
    """The tenant's share where requests wait for each other."""
    lora: str = ""
    """Adapter; only workers that have it. Empty: none."""
    waited: Annotated[float, Meta(ge=0, le=_FAR)] = 0.0
    """Seconds since the request reached the frontend, at the moment of sending."""
    deadline: Annotated[float, Meta(ge=-_FAR, le=_FAR)] | None = None
    """Seconds that remain at the moment of sending; None: none."""
    slo_ttft: Annotated[float, Meta(gt=0, le=_FAR)] | None = None
    """Seconds from arrival at the frontend to the first token that its client can bear."""
    hold: bool = True
    """False: refuse rather than keep the question waiting; the request has a place where it is."""


class Routed(msgspec.Struct, frozen=True, array_like=True):
    """This worker, and the booking that counts the request there until it ends."""

    worker: NodeId
    epoch: int
    """The life of the worker that was meant; in another one the booking does not exist."""
    booking: BookingId
    policy: str = ""
    """That chose; with what it fell back to, if it did."""
    overlap_blocks: Count = 0
    """Leading blocks of the prompt that the router believes to be there."""
    predicted_ttft: float | None = None
    """Seconds from this answer to the first token; None: no prediction."""
    held: float = 0.0
    """Seconds that the router kept the question before it answered."""


class Candidate(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One worker in an explanation."""

    worker: NodeId
    standing: str
    """`sound`, `doubtful`, `draining`, `unready`, or why the request's own filters leave it out."""
    chosen: bool = False
    overlap_blocks: Count = 0
    terms: dict[str, float] = {}
    """What the policy weighed, by name; the policy's own docstring says in which unit. `cost` is
    the sum that was compared, where there is one."""


class Explained(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a router would do with a question now. Nothing has been booked."""

    policy: str
    candidates: tuple[Candidate, ...] = ()
    worker: NodeId | None = None
    """None: it would be held or refused, see `refusal`."""
    refusal: str = ""
    """In words; empty: none."""
    held: Count = 0
    """Requests of the model that wait in this router now."""
    predicted_ttft: float | None = None


class Release(msgspec.Struct, frozen=True, array_like=True):
    """The request is over for its frontend, or will be tried elsewhere."""

    booking: BookingId
    outcome: Outcome


class Move(msgspec.Struct, frozen=True, array_like=True):
    """From a router to the frontend that holds the booking: another worker would begin this request
    sooner. The frontend asks anew, or leaves it."""

    booking: BookingId


class WorkerLoad(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How busy a worker is, all its work counted, whoever sent it.

    `running + waiting` includes every booking that the worker holds when it writes this: routers
    stop adding their own bookings to a report that follows their start.
    """

    ready: bool = False
    """It takes new requests; False while it loads, restarts or drains."""
    running: Count = 0
    """Sequences that steps compute."""
    waiting: Count = 0
    """Sequences that have not begun, or lost their blocks and wait for new ones."""
    max_sequences: Count = 0
    """As many run at once; 0: unknown."""
    blocks_total: Count = 0
    blocks_used: Count = 0
    """Referenced by sequences."""
    blocks_cached: Count = 0
    """Unreferenced but valid: reusable as prefix, evictable at once."""
    uncomputed_tokens: Count = 0
    """Prompt tokens in the engine that no step has computed yet."""
    kv_tokens: Count = 0
    """Tokens of running sequences: what a decode step reads."""
    itl: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds between two tokens of a sequence, lately; 0: unknown."""


class Booked(msgspec.Struct, frozen=True, array_like=True):
    """A booking as the other routers see it, until its own router says that it has ended."""

    booking: BookingId
    worker: NodeId
    epoch: int
    sequences: Count
    """What it charges: one per choice."""
    prompt_tokens: Count
    """What it charges besides."""
    cached_tokens: Count = 0
    """Of those, believed to be in the worker's pool."""


def booking_key(booking: int) -> bytes:
    """A booking's id as a topic's key."""
    return booking.to_bytes(8, "big")


def booking_of(key: bytes) -> int:
    """The booking that a key stands for."""
    return int.from_bytes(key, "big")
