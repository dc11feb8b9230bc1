"""Events and effects: the whole interface of the gossip machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.gossip.messages import Card, MemberRecord, Message
    from pdserve.ids import Epoch, NodeId

# ---------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class StartGossip:
    """The first event."""

    seeds: tuple[str, ...] = ()
    """Addresses to join through; empty: this node is the first."""
    known: tuple[MemberRecord, ...] = ()
    """Records from an earlier life, or from a file."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A link was authenticated, dialled by either side; it replaces an earlier one to that node."""

    node: NodeId
    epoch: Epoch
    address: str
    """Address at which the peer can be dialled."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link to `node` ended, and there is no other."""

    node: NodeId
    epoch: Epoch
    orderly: bool = False
    """True if one side closed it as unneeded; that is no evidence of a failure."""


@dataclass(frozen=True, slots=True)
class DialAttemptFailed:
    """A `Dial` failed."""

    address: str
    refused: bool
    """True if the host refused the connection: no process listens there."""
    ours: bool = False
    """True if the address led back to this node."""


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message came over the link to this life of `node`."""

    node: NodeId
    epoch: Epoch
    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; due at `Gossip.due`."""


@dataclass(frozen=True, slots=True)
class SetCard:
    """Sets this node's card."""

    card: Card
    parts: tuple[bytes, ...] = ()
    """Contents of `card.parts`, in their order."""


@dataclass(frozen=True, slots=True)
class WantPart:
    """Requests a part of `owner`'s card; ends in `PartReady` or `PartFailed`."""

    owner: NodeId
    hash: bytes


@dataclass(frozen=True, slots=True)
class Leave:
    """Says goodbye; `GossipStopped` follows after `leave_linger`."""


Event = (
    StartGossip
    | LinkUp
    | LinkDown
    | DialAttemptFailed
    | MessageReceived
    | Tick
    | SetCard
    | WantPart
    | Leave
)

# --------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Sends a message over the link to `node`, if it still exists; order matters."""

    node: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class Dial:
    """Dials an address; ends in `LinkUp` or `DialAttemptFailed` within the link layer's
    deadline.
    """

    address: str


@dataclass(frozen=True, slots=True)
class Close:
    """Membership no longer needs the link to `node`."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class TableReady:
    """This node has its seeds' table, or has found that it is alone. Emitted once."""

    alone: bool


@dataclass(frozen=True, slots=True)
class Joined:
    """A life of a member began."""

    record: MemberRecord


@dataclass(frozen=True, slots=True)
class Suspected:
    """A member does not answer its observers. It is still a member."""

    record: MemberRecord


@dataclass(frozen=True, slots=True)
class Refuted:
    """A suspected member was heard again."""

    record: MemberRecord


@dataclass(frozen=True, slots=True)
class Died:
    """A member's life ended, which is final: waits for it can stop."""

    record: MemberRecord


@dataclass(frozen=True, slots=True)
class Departed:
    """A member left in order; as final as a death."""

    record: MemberRecord


@dataclass(frozen=True, slots=True)
class Unreachable:
    """This node's own link to a member was lost; not gossiped to others."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Reachable:
    """This node has a link to a member again."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class CardReady:
    """A member's card, of this version, replaces the known one."""

    node: NodeId
    epoch: Epoch
    version: int
    card: Card


@dataclass(frozen=True, slots=True)
class PartReady:
    """A part, checked against its hash."""

    hash: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class PartFailed:
    """No asked peer had the part, or its bytes did not match. A later `WantPart` starts over."""

    hash: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class TableFull:
    """A newcomer was refused: there are `max_members` live members."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Peers declared this life dead and dropped its state. Drop it too, then start a new machine in
    an epoch above `above` with `start`. This machine is silent from now on.
    """

    above: Epoch
    start: StartGossip


@dataclass(frozen=True, slots=True)
class Superseded:
    """A later life of this node is in the cluster: another process has its name, or its clock once
    ran ahead. This machine is silent from now on.
    """

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class GossipStopped:
    """The goodbye had time to spread; no effect follows."""


Effect = (
    Send
    | Dial
    | Close
    | TableReady
    | Joined
    | Suspected
    | Refuted
    | Died
    | Departed
    | Unreachable
    | Reachable
    | CardReady
    | PartReady
    | PartFailed
    | TableFull
    | Rejoin
    | Superseded
    | GossipStopped
)
