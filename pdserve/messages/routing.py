"""Defines the routing messages: a frontend's request, the router's decision, and its inputs.

Frontends send `RouteRequest` and `ReleaseBooking` to routers, which answer with `RouteDecision`.
Workers publish `WorkerLoad`; routers publish `BookingRecord`. No prompt travels here: tokens go
from the frontend to the chosen worker, and routers see only block hashes.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.ids import NodeId
from pdserve.messages.demand import EndedRequest
from pdserve.messages.tiers import KvSource, LaneLoad

LOAD = "load"
"""Topic of a worker, a value: `WorkerLoad`."""
SEQUENCES = "sequences"
"""Topic of a worker, a set: the keys of the bookings that it holds; the value is empty until the
first token, then `messages.request.FirstTokenStats`."""
BOOKINGS = "bookings"
"""Topic of a router, a set: its own bookings, `BookingRecord` by key."""

BookingId = Annotated[int, Meta(ge=0)]
"""Identifies one booking in the cluster, in 63 bits, which every language's integers hold: the
router draws the upper 31 at its start, the lower 32 count."""

Count = Annotated[int, Meta(ge=0)]

WEIGHT_BOUNDS: Final = (0.001, 1000)
"""Smallest and largest weight of a tenant; bounded so that sums of time over weight stay
comparable."""

_FAR: Final = 1e9
"""Seconds; more is no time at all, and neither is what is no number."""

RequestOutcome = Literal["finished", "cancelled", "failed", "unreached"]
"""How a placed request ended, as its frontend saw it. `failed`: the worker answered with an error
or was lost; `unreached`: the request never left the frontend."""


class RouteRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Asks which worker takes a request. Sent again with another `attempt` if a worker was lost."""

    request_id: str
    attempt: Count = 0
    """0 for the first."""
    model: str
    """The model's own name; with `lora`, that of its base model."""
    prompt_tokens: Count
    """Tokens that must be in KV before the next token, including the output of earlier attempts."""
    max_tokens: Count
    """Output tokens that may still come, per choice."""
    n: Annotated[int, Meta(ge=1)] = 1
    """Choices; each becomes a sequence."""
    priority: int = 0
    """Higher is sooner."""
    excluded: tuple[NodeId, ...] = ()
    """Workers that this request has failed at, or that its client excludes."""
    allowed: tuple[NodeId, ...] = ()
    """The only workers that may take the request; empty: all."""
    names: bytes = b""
    """Short block hashes (`blocks.hashing.short_hashes`, 8 bytes each) of the prompt's full blocks,
    in order. Empty: the frontend could not compute them, so no overlap is known.
    """
    names_id: bytes = b""
    """Id of the secret the hashes were made with; workers with another secret have no overlap."""
    block_size: Count = 0
    """Tokens of a block; 0 without hashes."""
    session_id: str = ""
    """Requests of one conversation or agent; empty: none was given."""
    tenant: str = ""
    """Owner of the API key; empty: no keys are in use."""
    weight: Annotated[float, Meta(ge=WEIGHT_BOUNDS[0], le=WEIGHT_BOUNDS[1])] = 1.0
    """The tenant's share while requests wait in the router."""
    lora: str = ""
    """Id of the LoRA adapter; only workers that have it are eligible. Empty: none."""
    waited: Annotated[float, Meta(ge=0, le=_FAR)] = 0.0
    """Seconds since the request reached the frontend, at the moment of sending."""
    deadline: Annotated[float, Meta(ge=-_FAR, le=_FAR)] | None = None
    """Seconds remaining at the moment of sending; None: no deadline."""
    slo_ttft: Annotated[float, Meta(gt=0, le=_FAR)] | None = None
    """Target seconds from arrival at the frontend to the first token; None: no target."""
    hold: bool = True
    """False: refuse instead of queueing the request; it already has a worker."""
    trace: bool = False
    """True: the decision says what it rests on. A router of the release before ignores it."""
    asked: Count = 0
    """Routers that were asked before for this attempt, and may have counted the request."""


class RouteDecision(msgspec.Struct, frozen=True, array_like=True):
    """The chosen worker, and the booking that counts the request there until it ends."""

    worker: NodeId
    epoch: int
    """The life of the worker that is meant; the booking does not exist in another one."""
    booking: BookingId
    policy: str = ""
    """Name of the policy that chose, and of its fallback if one was used."""
    overlap_blocks: Count = 0
    """Leading blocks of the prompt that the router expects in the cache of the worker."""
    predicted_ttft: float | None = None
    """Seconds from this answer to the first token; None: no prediction."""
    held: float = 0.0
    """Seconds that the request waited in the router."""
    candidates: Count = 0
    """Workers that the policy could choose; this and the next two are told only to a request that
    asks for them."""
    waiting: Count = 0
    """Requests of the model that waited in the router at that time."""
    sequences: Count = 0
    """Sequences at the chosen worker, as the router knew."""
    kv_sources: tuple[KvSource, ...] = ()
    """Other workers that have more leading blocks of the prompt than the chosen one."""


class Candidate(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One worker in a routing preview."""

    worker: NodeId
    standing: str
    """`sound`, `doubtful`, `draining`, `unready`, or why the request's own filters leave it out."""
    chosen: bool = False
    overlap_blocks: Count = 0
    terms: dict[str, float] = {}
    """Values that the policy weighed, by name, in the units of the policy's docstring. `cost` is
    the sum that was compared, where there is one.
    """
    sources: dict[str, int] = {}
    """Leading blocks that it would not compute, by where it would take them from: `device`, `host`,
    `disk`, `peer`. A source without any is left out."""


class RoutingPreview(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a router would decide for a request now. Nothing is booked."""

    policy: str
    candidates: tuple[Candidate, ...] = ()
    worker: NodeId | None = None
    """None: the request would be queued or refused, see `refusal`."""
    refusal: str = ""
    """Reason of a refusal; empty: none."""
    held: Count = 0
    """Requests of the model that wait in this router now."""
    predicted_ttft: float | None = None
    kv_sources: tuple[KvSource, ...] = ()
    """What `RouteDecision.kv_sources` would be."""


class ReleaseBooking(msgspec.Struct, frozen=True, array_like=True):
    """Ends a booking: the request is over for its frontend, or will be tried on another worker."""

    booking: BookingId
    """0: no booking is open. The message only tells how a request ended that has none."""
    outcome: RequestOutcome
    ended: EndedRequest | None = None
    """How the client's request ended; None: it goes on, or its frontend is of the release
    before."""


class RouterMigrationHint(msgspec.Struct, frozen=True, array_like=True):
    """Tells the frontend that holds the booking that another worker would begin this request
    sooner. The frontend may ask for a new decision.
    """

    booking: BookingId


class WorkerLoad(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The load of a worker, from all its frontends.

    `running + waiting` includes every booking that the worker holds when it writes this: routers
    stop adding their own bookings to a report that follows their start.
    """

    ready: bool = False
    """True if it takes new requests; False while it loads, restarts or drains."""
    running: Count = 0
    """Sequences that steps compute."""
    waiting: Count = 0
    """Sequences that have not begun, or lost their blocks and wait for new ones."""
    max_sequences: Count = 0
    """Sequences that run at once, at most; 0: unknown."""
    blocks_total: Count = 0
    blocks_used: Count = 0
    """Blocks referenced by sequences."""
    blocks_cached: Count = 0
    """Unreferenced but valid blocks: reusable as prefix, evictable at once."""
    uncomputed_tokens: Count = 0
    """Prompt tokens in the engine that no step has computed yet."""
    kv_tokens: Count = 0
    """Tokens of running sequences: what a decode step reads."""
    itl: Annotated[float, Meta(ge=0)] = 0.0
    """Recent seconds between two tokens of a sequence; 0: unknown."""
    lanes: tuple[LaneLoad, ...] = ()
    """Lanes of the worker's tiers; empty: it has none."""
    transfer_token: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds to move a token's KV to this worker, as measured when its paths were made, their
    median; 0: not measured. Transfers that share a path take longer."""


class BookingRecord(msgspec.Struct, frozen=True, array_like=True):
    """A booking as other routers see it, until its own router ends it."""

    booking: BookingId
    worker: NodeId
    epoch: int
    sequences: Count
    """Sequences it charges: one per choice."""
    prompt_tokens: Count
    """Prompt tokens it charges."""
    cached_tokens: Count = 0
    """Prompt tokens expected in the worker's prefix cache."""


def booking_key(booking: int) -> bytes:
    """Encodes a booking's id as a topic key."""
    return booking.to_bytes(8, "big")


def booking_of(key: bytes) -> int:
    """Decodes a topic key to a booking id."""
    return int.from_bytes(key, "big")
