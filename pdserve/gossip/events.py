"""What membership is told, and what it wants done: the whole of its outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.gossip.messages import Card, Message, Record
    from pdserve.ids import Epoch, NodeId

# ------------------------------------------------------------------------------------ told


@dataclass(frozen=True, slots=True)
class Start:
    """The first event."""

    seeds: tuple[str, ...] = ()
    """Addresses to join through; empty: be the first, others come here."""
    known: tuple[Record, ...] = ()
    """The table of an earlier life, or of a file."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """An authenticated link, ours or the peer's; it replaces an earlier one to that node."""

    node: NodeId
    epoch: Epoch
    address: str
    """Where the peer can be dialled."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The current link to `node` is gone, and there is no other."""

    node: NodeId
    epoch: Epoch
    orderly: bool = False
    """One of the two closed it, having no need of it: that says nothing against the other."""


@dataclass(frozen=True, slots=True)
class DialFailed:
    """A `Dial` did not lead to a link."""

    address: str
    refused: bool
    """The host said that nobody listens there."""
    ours: bool = False
    """It led back to this node: the address is one more name of ours."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message came over the link to this life of `node`."""

    node: NodeId
    epoch: Epoch
    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; due at `Gossip.due`."""


@dataclass(frozen=True, slots=True)
class SetCard:
    """This node's card is another one now."""

    card: Card
    parts: tuple[bytes, ...] = ()
    """The content of `card.parts`, in their order."""


@dataclass(frozen=True, slots=True)
class WantPart:
    """Fetch a part of `owner`'s card; ends in `PartReady` or `PartFailed`."""

    owner: NodeId
    hash: bytes


@dataclass(frozen=True, slots=True)
class Leave:
    """Say goodbye; `Stopped` follows after `leave_linger`."""


Event = Start | LinkUp | LinkDown | DialFailed | Received | Tick | SetCard | WantPart | Leave

# ---------------------------------------------------------------------------------- wanted


@dataclass(frozen=True, slots=True)
class Send:
    """Over the link to `node`, if it still stands; order matters."""

    node: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class Dial:
    """Ends in `LinkUp` or `DialFailed`, within the link layer's own deadline."""

    address: str


@dataclass(frozen=True, slots=True)
class Close:
    """The link to `node` is no longer needed for membership."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Ready:
    """This node has its seeds' table, or has found that it is alone. Once."""

    alone: bool


@dataclass(frozen=True, slots=True)
class Joined:
    """A life of a member begins."""

    record: Record


@dataclass(frozen=True, slots=True)
class Suspected:
    """Others, or we, cannot hear it. Still a member."""

    record: Record


@dataclass(frozen=True, slots=True)
class Refuted:
    """It was heard again."""

    record: Record


@dataclass(frozen=True, slots=True)
class Died:
    """That life is over, for good: whatever waits for it can stop waiting."""

    record: Record


@dataclass(frozen=True, slots=True)
class Departed:
    """It left as it should; as final as a death."""

    record: Record


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Our own link to it is lost: a fact about the two of us, which nobody else is told."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Reachable:
    """We have a link to it."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class CardReady:
    """A member's card, of this version, replaces what was known."""

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
    """Nobody asked had the part, or what they sent was not it. A later `WantPart` starts over."""

    hash: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class TableFull:
    """A newcomer was refused: `max_members` members live."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Others hold this life for dead and have dropped what it owned. Drop it too, then start a new
    machine in an epoch above `above` with `start`. This one is silent from now on."""

    above: Epoch
    start: Start


@dataclass(frozen=True, slots=True)
class Superseded:
    """A later life of this node is in the cluster: another process has its name, or its earlier
    clock ran ahead. This machine is silent from now on."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Stopped:
    """Everybody could hear the goodbye; nothing follows."""


Effect = (
    Send
    | Dial
    | Close
    | Ready
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
    | Stopped
)
