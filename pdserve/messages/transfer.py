"""Defines what two nodes tell each other to set up KV transfers between them.

    once per (peer, epoch)  BackendProbe, BackendOffers          which backends could join the two
                            PathHello, PathWelcome, PathReady    the pools of both ends, and how to
                                                                 reach them
    per attempt             TransferTicket                       which blocks may be filled
    to stop it              StopTicket                           answered when nothing is under way

These messages travel over the authenticated link. What a backend sends on its own connection (a
Unix socket, a TCP connection) is defined there; what a handoff carries (first tokens, usage) in
`messages.handoff`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

MAX_BLOCKS: Final = 1 << 20
"""Most blocks of one ticket, and of one pool that takes part."""
MAX_SLOTS: Final = 1 << 12
"""Most slots: a slot's number has 12 bits on every backend, as in RDMA's immediate data."""
MAX_PARTS: Final = 1 << 12
"""Most parts of a ticket: a part's number has 12 bits too."""

Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Small = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
PartNumber = Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
Slot = Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]


class RankKvLayout(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one rank's pool holds: consecutive blocks of [layer][k|v][head][token][dim].

    For latent attention (one vector for all heads), `heads` is 1. The heads on a rank follow from
    `heads`, `tp` and `rank` (`transfer.copy_plan.heads_of`).
    """

    content: str
    """Identifies model, data type and whatever else decides what a byte means; equal at both ends.
    It does not depend on the tensor-parallel size."""
    layers: Annotated[int, Meta(ge=1, le=1 << 14)]
    """Layers on this rank."""
    first_layer: Annotated[int, Meta(ge=0, le=1 << 14)] = 0
    heads: Annotated[int, Meta(ge=1, le=1 << 14)]
    """KV heads of the model, over all ranks."""
    tp: Annotated[int, Meta(ge=1, le=1 << 10)] = 1
    rank: Annotated[int, Meta(ge=0, le=1 << 10)] = 0
    tokens: Annotated[int, Meta(ge=1, le=1 << 16)]
    """Tokens per block."""
    dim: Annotated[int, Meta(ge=1, le=1 << 16)]
    itemsize: Annotated[int, Meta(ge=1, le=16)]
    order: Literal["block-layer-kv-head-token-dim"] = "block-layer-kv-head-token-dim"


class RegionCard(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One rank's pool, as its peers need to know it."""

    layout: RankKvLayout
    blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    address: Size = 0
    """Address of its first byte for RDMA; 0 on backends that need none."""
    keys: Annotated[tuple[Small, ...], Meta(max_length=1 << 16)] = ()
    """RDMA remote keys: for each adapter, those of all slices."""
    slice: Size = 0
    """Bytes that one key covers; the last slice may be shorter."""


class PathHello(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=1):
    """Asks for a path."""

    backend: str
    epoch: Size
    """The sender's epoch."""
    path: Size
    """The sender's number for the path."""
    regions: Annotated[tuple[RegionCard, ...], Meta(max_length=64)]
    details: bytes = b""
    """A record of the backend."""


class PathWelcome(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=2):
    """Answers `PathHello`, with the same fields from the other side."""

    epoch: Size
    path: Size
    regions: Annotated[tuple[RegionCard, ...], Meta(max_length=64)]
    details: bytes = b""


class PathReady(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Both ends are set up: the receiver may use the path. Answered by `ControlDone`."""

    path: Size
    """The receiver's number for the path."""


class StopTicket(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Asks to write no more under this ticket. Answered by `ControlDone` when nothing is under
    way."""

    path: Size
    """The receiver's number for the path."""
    slot: Slot
    generation: Small


class ControlDone(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Confirms a control message."""


class PathGone(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The path has ended at the sender. Answered by `ControlDone`; may be lost."""

    path: Size
    """The receiver's number for the path."""
    reason: Annotated[str, Meta(max_length=500)] = ""


class BackendProbe(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Asks which backends the receiver has. From the node that wants a path; belongs to no backend.
    Answered by `BackendOffers`."""

    life: Size = 0
    """The life of the sender's engine, drawn at random. Tickets of another life are void, even if
    their slots are equal, and paths to an earlier life end."""


Name = Annotated[str, Meta(min_length=1, max_length=40)]
Place = Annotated[str, Meta(max_length=200)]
Words = Annotated[str, Meta(max_length=500)]


class BackendOffers(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The backends that a node can use, and the places that they reach: two ends need a place in
    common."""

    places: Annotated[dict[Name, tuple[Place, ...]], Meta(max_length=32)] = {}
    """Places by backend; a backend without places reaches any node."""
    lacking: Annotated[dict[Name, Words], Meta(max_length=32)] = {}
    """Why each other backend cannot be used there."""


class TicketWithdrawn(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The source delivers nothing more under this ticket. What is under way may still arrive.
    Answered by `ControlDone`; may be lost."""

    path: Size
    """The receiver's number for the path."""
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
    """The right to fill blocks of the destination, for one attempt.

    `blocks[i]` takes the tokens from `first_token + i * block_size` on. Tokens before `first_token`
    are already at the destination: both ends count from the same token.
    """

    transfer: str
    """Request and choice, for errors and logs."""
    attempt: Small
    epoch: Size
    """The destination's epoch: in another one, the ticket is void."""
    slot: Slot
    generation: Small
    first_token: Size
    """Position of the first token to send; a multiple of the block size."""
    tokens: Annotated[int, Meta(ge=1, le=1 << 40)]
    """Number of tokens; the last block may be partly filled."""
    blocks: Annotated[tuple[int, ...], Meta(max_length=MAX_BLOCKS)]
    backend: Annotated[str, Meta(max_length=40)] = ""
    """The backend whose slot this is; each backend counts its own. Empty: the peers have only
    one."""
    life: Size = 0
    """The life of the destination's engine (`BackendProbe.life`)."""
    path: Size = 0
    """The source's number for the path of the grant: the fence is on that path alone. 0: the
    destination is of a release that does not say it."""
    verify: Literal["", "off", "sample", "all"] = ""
    """The destination's `--verify-kv`: the source sends checksums for the stricter of this and its
    own. Empty: the destination is of a release that does not say it."""
