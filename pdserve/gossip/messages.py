"""Gossip messages between members: typed, bounded, with append-only fields.

    News                                    rumours: records and accusers         broadcast_queue
    Ping Ack                                proof of life, by a secret nonce      probing
    IndirectPing IndirectPingResult         the same through a helper             probing
    TableHash BucketHashes RecordHashes     comparing tables, cheapest first      table_digest
    Records                                 records of the difference             table_digest
    CardRequest CardReply                   a member's card                       cards
    PartRequest PartReply                   large parts of a card, by content     cards

One method number (`TELL`) carries them all; each is an array that starts with its own tag.
"""

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
    "BucketHashes",
    "Card",
    "CardPart",
    "CardReply",
    "CardRequest",
    "IndirectPing",
    "IndirectPingResult",
    "MemberRecord",
    "MemberState",
    "Message",
    "News",
    "PartReply",
    "PartRequest",
    "Ping",
    "RecordHashes",
    "Records",
    "Rumour",
    "TableHash",
    "decode",
]

TELL: Final = 0x0100
"""Method number of every gossip message."""

BUCKETS: Final = 256
"""Number of buckets of the table that are compared separately."""


class MemberState(IntEnum):
    """State of one life of a member. The last two are final."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    """Other members found it gone."""
    LEFT = 3
    """The member announced its own departure."""

    @property
    def final(self) -> bool:
        return self >= MemberState.DEAD


HIGHEST: Final = (1 << 63) - 1
"""Upper bound of epochs, incarnations, versions and nonces."""

BoundedNodeId = Annotated[NodeId, Meta(min_length=1, max_length=128)]
BoundedEpoch = Annotated[Epoch, Meta(ge=0, le=HIGHEST)]
Counter = Annotated[int, Meta(ge=0, le=HIGHEST)]
Nonce = Annotated[int, Meta(ge=0, le=HIGHEST)]
Hash8 = Annotated[bytes, Meta(min_length=8, max_length=8)]
Hash16 = Annotated[bytes, Meta(min_length=16, max_length=16)]


class MemberRecord(msgspec.Struct, frozen=True, array_like=True):
    """All that gossip carries about one member. `member_table.merge` merges two."""

    node: BoundedNodeId
    epoch: BoundedEpoch
    incarnation: Counter = 0
    """Raised by the member itself, only to refute a suspicion."""
    state: MemberState = MemberState.ALIVE
    card: Counter = 0
    """Version of the member's card, raised by the member itself; 0: no card."""
    address: Annotated[str, Meta(max_length=256)] = ""
    """Address at which peers dial it; fixed for the epoch. Empty: it cannot be dialled."""
    role: Annotated[str, Meta(max_length=32)] = ""
    """Its role; fixed for the epoch."""


class Rumour(msgspec.Struct, frozen=True, array_like=True):
    """A record of one member, with its accuser if it is suspected."""

    record: MemberRecord
    by: Annotated[NodeId, Meta(max_length=128)] = NodeId("")
    """The accuser, if the state is SUSPECT; empty: unknown."""
    refused: bool = False
    """True if the accuser lost its connection and was refused a new one."""


Rumours = Annotated[tuple[Rumour, ...], Meta(max_length=64)]


class News(msgspec.Struct, frozen=True, array_like=True, tag=1):
    rumours: Rumours


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=2):
    nonce: Nonce
    rumours: Rumours = ()
    """Rumours that the receiver applies before it answers: that it is suspected."""


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=3):
    nonce: Nonce
    rumours: Rumours = ()
    """The receiver's refutation of the ping's rumours."""


class IndirectPing(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Asks the receiver to ping this life of `node` and report."""

    nonce: Nonce
    node: BoundedNodeId
    epoch: BoundedEpoch


class IndirectPingResult(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Answers `IndirectPing`: whether `node` answered. Either way the sender is healthy."""

    nonce: Nonce
    alive: bool


class TableHash(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """One hash of the sender's whole table."""

    hash: Hash8


class BucketHashes(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A hash of each bucket, sent when the table hashes differ."""

    hashes: Annotated[bytes, Meta(min_length=8 * BUCKETS, max_length=8 * BUCKETS)]


class RecordHashes(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Hashes of all the sender's records in the named buckets, which differ."""

    buckets: Annotated[bytes, Meta(max_length=BUCKETS)]
    """Bucket numbers, one byte each."""
    hashes: Annotated[dict[BoundedNodeId, Hash8], Meta(max_length=1 << 14)]


class Records(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Records that the receiver lacks, and members whose records the sender wants."""

    records: Annotated[tuple[MemberRecord, ...], Meta(max_length=512)] = ()
    wanted: Annotated[tuple[BoundedNodeId, ...], Meta(max_length=512)] = ()


class CardPart(msgspec.Struct, frozen=True, array_like=True):
    """A large part of a card, named by its hash."""

    name: Annotated[str, Meta(max_length=64)]
    hash: Hash16
    """BLAKE2b-128 of the bytes."""
    size: Annotated[int, Meta(ge=0, le=1 << 28)]


class Card(msgspec.Struct, frozen=True, array_like=True):
    """What a member publishes about itself; replaced whole."""

    body: Annotated[bytes, Meta(max_length=8192)] = b""
    """Content for the layers above; gossip does not read it."""
    parts: Annotated[tuple[CardPart, ...], Meta(max_length=32)] = ()


class CardRequest(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Asks for the card of this life of `node`, of this version or a later one."""

    node: BoundedNodeId
    epoch: BoundedEpoch
    version: Counter


class CardReply(msgspec.Struct, frozen=True, array_like=True, tag=11):
    node: BoundedNodeId
    epoch: BoundedEpoch
    version: Counter
    """The requested version if `card` is missing, else the card's own."""
    card: Card | None


class PartRequest(msgspec.Struct, frozen=True, array_like=True, tag=12):
    hash: Hash16
    offset: Annotated[int, Meta(ge=0, le=1 << 28)]


class PartReply(msgspec.Struct, frozen=True, array_like=True, tag=13):
    hash: Hash16
    offset: Annotated[int, Meta(ge=0, le=1 << 28)]
    data: Annotated[bytes, Meta(max_length=256 * 1024)] | None
    """The bytes. None: the sender does not have the part. Empty: the offset is past its end."""


Message = (
    News
    | Ping
    | Ack
    | IndirectPing
    | IndirectPingResult
    | TableHash
    | BucketHashes
    | RecordHashes
    | Records
    | CardRequest
    | CardReply
    | PartRequest
    | PartReply
)

decode: Callable[[Buffer], Message] = decoder(cast("Any", Message))
"""Decodes a message. Raises `ProtocolError`."""
