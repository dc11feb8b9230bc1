"""What two nodes tell each other so that KV can move between them.

Once per (peer, epoch):  Probe, BackendOffers           which back ends could join the two
                         Hello, PathWelcome, PathReady   the pools of both ends, and how to reach
                         them
Per attempt:             Ticket                  which blocks of the destination may be filled
When it is given up:     Stop                    answered when nothing more is under way

These go over the authenticated link. What a back end says on its own road (a Unix socket, a bulk
connection) is its own; what the handoff says (first tokens, usage) is the handoff's.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

MAX_BLOCKS: Final = 1 << 20
"""Of one ticket, and of one pool that takes part."""
MAX_SLOTS: Final = 1 << 12
"""A slot's number has 12 bits on every back end, as in RDMA's immediate data."""
MAX_PARTS: Final = 1 << 12
"""So has a part's."""

Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Small = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
PartNumber = Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
Slot = Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]


class RankKvLayout(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one rank's pool holds: blocks of [layer][k|v][head][token][dim], one after the other.

    Of latent attention (one vector for all heads): `heads` is 1. What a rank holds of the heads
    follows from `heads`, `tp` and `rank` (`transfer.copy_plan.heads_of`).
    """

    content: str
    """Names model, data type and whatever else decides what a byte means; both ends must agree. No
    tensor-parallel size in it."""
    layers: Annotated[int, Meta(ge=1, le=1 << 14)]
    """Of this rank."""
    first_layer: Annotated[int, Meta(ge=0, le=1 << 14)] = 0
    heads: Annotated[int, Meta(ge=1, le=1 << 14)]
    """KV heads of the model, over all ranks."""
    tp: Annotated[int, Meta(ge=1, le=1 << 10)] = 1
    rank: Annotated[int, Meta(ge=0, le=1 << 10)] = 0
    tokens: Annotated[int, Meta(ge=1, le=1 << 16)]
    """Of a block."""
    dim: Annotated[int, Meta(ge=1, le=1 << 16)]
    itemsize: Annotated[int, Meta(ge=1, le=16)]
    order: Literal["block-layer-kv-head-token-dim"] = "block-layer-kv-head-token-dim"


class RegionCard(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One rank's pool, as its peers need to know it."""

    layout: RankKvLayout
    blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    address: Size = 0
    """Where it begins, as RDMA names it; 0 on back ends that need no address."""
    keys: Annotated[tuple[Small, ...], Meta(max_length=1 << 16)] = ()
    """The remote keys: of each adapter, those of all slices."""
    slice: Size = 0
    """Bytes that one key covers; the last slice may be shorter."""


class PathHello(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=1):
    """Let us have a path: from the side that wants it."""

    backend: str
    epoch: Size
    """Of the sender."""
    path: Size
    """The sender's number for the path."""
    regions: Annotated[tuple[RegionCard, ...], Meta(max_length=64)]
    details: bytes = b""
    """The back end's own record."""


class PathWelcome(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=2):
    """The answer; the same fields from the other side."""

    epoch: Size
    path: Size
    regions: Annotated[tuple[RegionCard, ...], Meta(max_length=64)]
    details: bytes = b""


class PathReady(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Both ends are set up: the receiver of this may start. Answered by `ControlDone`."""

    path: Size
    """The receiver's number."""


class StopTicket(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Write no more under this ticket. Answered by `ControlDone` when nothing is under way any
    more."""

    path: Size
    """The receiver's number."""
    slot: Slot
    generation: Small


class ControlDone(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """It is so."""


class PathGone(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The path has ended at the sender. Answered by `ControlDone`; may be lost."""

    path: Size
    """The receiver's number."""
    reason: Annotated[str, Meta(max_length=500)] = ""


class BackendProbe(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Which back ends do you have? From the side that wants a path; of no back end. Answered by
    `BackendOffers`."""

    life: Size = 0
    """Of the sender's engine, drawn at random: tickets of another one are void, though they may
    have the same slots. Paths to an earlier one end."""


Name = Annotated[str, Meta(min_length=1, max_length=40)]
Place = Annotated[str, Meta(max_length=200)]
Words = Annotated[str, Meta(max_length=500)]


class BackendOffers(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """What a node's transports can use, and where: two ends that have places must share one."""

    places: Annotated[dict[Name, tuple[Place, ...]], Meta(max_length=32)] = {}
    """By back end; without places it is reached from anywhere."""
    lacking: Annotated[dict[Name, Words], Meta(max_length=32)] = {}
    """Why the others cannot be used there."""


class TicketWithdrawn(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Nothing more comes under this ticket: its source has given it up. What is under way may still
    arrive. Answered by `ControlDone`; may be lost."""

    path: Size
    """The receiver's number."""
    slot: Slot
    generation: Small


TransferControl = (
    PathHello
    | PathWelcome
    | PathReady
    | StopTicket
    | ControlDone
    | PathGone
    | BackendProbe
    | BackendOffers
    | TicketWithdrawn
)


class TransferTicket(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The right to fill blocks of the destination, under one attempt.

    `blocks[i]` takes the tokens from `first_token + i * block_size` on. What the destination has
    already is before `first_token` and not mentioned: both ends count from the same token.
    """

    transfer: str
    """Whom it is for, in errors and logs: request and choice."""
    attempt: Small
    epoch: Size
    """Of the destination: of another life of it, a ticket is void."""
    slot: Slot
    generation: Small
    first_token: Size
    """A multiple of the block size."""
    tokens: Annotated[int, Meta(ge=1, le=1 << 40)]
    """Those of the last block may be fewer than it holds."""
    blocks: Annotated[tuple[int, ...], Meta(max_length=MAX_BLOCKS)]
    backend: Annotated[str, Meta(max_length=40)] = ""
    """Whose slots these are: each counts its own. Empty: the peers have but one."""
    life: Size = 0
    """Of the destination's engine: see `BackendProbe`."""
