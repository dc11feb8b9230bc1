"""What members say to each other: typed, bounded, appended to but never reordered.

    Rumour               a record and, for a suspicion, who accuses            dissemination
    Ping Ack             proof of life, by a nonce nobody else can know        probing
    PingFor Answer       the same through somebody else                        probing
    Summary Buckets Digests Records     comparing tables, cheapest first       antientropy
    CardRequest CardReply               what a member says of itself           cards
    PartRequest PartReply               the large parts of it, by content      cards

One number on the wire (`TELL`) carries them all; each is an array that starts with its own tag."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import msgspec
from msgspec import Meta

from pdserve.ids import Epoch, NodeId
from pdserve.wire.codec import decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.wire.parser import Buffer

__all__ = [
    "BUCKETS",
    "HIGHEST",
    "TELL",
    "Ack",
    "Answer",
    "Buckets",
    "Card",
    "CardReply",
    "CardRequest",
    "Digests",
    "Message",
    "News",
    "Part",
    "PartReply",
    "PartRequest",
    "Ping",
    "PingFor",
    "Record",
    "Records",
    "Rumour",
    "State",
    "Summary",
    "decode",
]

TELL: Final = 0x0100
"""The method number of every membership message."""

BUCKETS: Final = 256
"""Parts of the table that are compared apart."""


class State(IntEnum):
    """Of one life of a member. The last two are final."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    """Others found it gone."""
    LEFT = 3
    """It said so itself."""

    @property
    def final(self) -> bool:
        return self >= State.DEAD


HIGHEST: Final = (1 << 63) - 1
"""Epochs, incarnations, versions and nonces go no further."""

Node = Annotated[NodeId, Meta(min_length=1, max_length=128)]
Life = Annotated[Epoch, Meta(ge=0, le=HIGHEST)]
Counter = Annotated[int, Meta(ge=0, le=HIGHEST)]
Nonce = Annotated[int, Meta(ge=0, le=HIGHEST)]
Hash8 = Annotated[bytes, Meta(min_length=8, max_length=8)]
Hash16 = Annotated[bytes, Meta(min_length=16, max_length=16)]


class Record(msgspec.Struct, frozen=True, array_like=True):
    """All that gossip carries of one member. `member.merge` says which of two holds."""

    node: Node
    epoch: Life
    incarnation: Counter = 0
    """Raised by the member itself, only to answer a suspicion."""
    state: State = State.ALIVE
    card: Counter = 0
    """Version of the member's card, raised by the member itself; 0: it has none."""
    address: Annotated[str, Meta(max_length=256)] = ""
    """Where others dial it; fixed for the epoch. Empty: nobody can."""
    role: Annotated[str, Meta(max_length=32)] = ""
    """Fixed for the epoch."""


class Rumour(msgspec.Struct, frozen=True, array_like=True):
    """News of one member."""

    record: Record
    by: Annotated[NodeId, Meta(max_length=128)] = NodeId("")
    """Who accuses, if the state is SUSPECT; empty: unknown."""
    refused: bool = False
    """The accuser lost its connection and was refused a new one."""


Rumours = Annotated[tuple[Rumour, ...], Meta(max_length=64)]


class News(msgspec.Struct, frozen=True, array_like=True, tag=1):
    rumours: Rumours


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=2):
    nonce: Nonce
    rumours: Rumours = ()
    """What the receiver should know first: that it is suspected."""


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=3):
    nonce: Nonce
    rumours: Rumours = ()
    """The receiver's answer to what the ping told it."""


class PingFor(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Ping this life of `node` and tell me."""

    nonce: Nonce
    node: Node
    epoch: Life


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """To `PingFor`: it answered, or it did not; either way its sender is well."""

    nonce: Nonce
    alive: bool


class Summary(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """One hash of the sender's whole table."""

    hash: Hash8


class Buckets(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A hash of each bucket, since the summaries differ."""

    hashes: Annotated[bytes, Meta(min_length=8 * BUCKETS, max_length=8 * BUCKETS)]


class Digests(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Hashes of all the sender's records in the named buckets, since those differ."""

    buckets: Annotated[bytes, Meta(max_length=BUCKETS)]
    """One byte per bucket's number."""
    hashes: Annotated[dict[Node, Hash8], Meta(max_length=1 << 14)]


class Records(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Records the receiver lacks, and the members whose records the sender wants."""

    records: Annotated[tuple[Record, ...], Meta(max_length=512)] = ()
    wanted: Annotated[tuple[Node, ...], Meta(max_length=512)] = ()


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A large part of a card, named by its content."""

    name: Annotated[str, Meta(max_length=64)]
    hash: Hash16
    """BLAKE2b-128 of the bytes."""
    size: Annotated[int, Meta(ge=0, le=1 << 28)]


class Card(msgspec.Struct, frozen=True, array_like=True):
    """What a member says about itself, replaced whole."""

    body: Annotated[bytes, Meta(max_length=8192)] = b""
    """For the layers above; gossip does not read it."""
    parts: Annotated[tuple[Part, ...], Meta(max_length=32)] = ()


class CardRequest(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The card of this life of `node`, of this version or a later one."""

    node: Node
    epoch: Life
    version: Counter


class CardReply(msgspec.Struct, frozen=True, array_like=True, tag=11):
    node: Node
    epoch: Life
    version: Counter
    """The one asked for if `card` is missing, otherwise the card's own."""
    card: Card | None


class PartRequest(msgspec.Struct, frozen=True, array_like=True, tag=12):
    hash: Hash16
    offset: Annotated[int, Meta(ge=0, le=1 << 28)]


class PartReply(msgspec.Struct, frozen=True, array_like=True, tag=13):
    hash: Hash16
    offset: Annotated[int, Meta(ge=0, le=1 << 28)]
    data: Annotated[bytes, Meta(max_length=256 * 1024)] | None
    """None: the sender does not have the part. Empty: there is nothing at that offset."""


Message = (
    News
    | Ping
    | Ack
    | PingFor
    | Answer
    | Summary
    | Buckets
    | Digests
    | Records
    | CardRequest
    | CardReply
    | PartRequest
    | PartReply
)

decode: Callable[[Buffer], Message] = decoder(cast("Any", Message))
"""Bytes to a message. Raises `ProtocolError` for anything else."""
