"""Defines the messages by which a worker fetches KV blocks from another worker's pool.

    requester R                                             owner O
    PullKv       hashes, and a ticket for fresh blocks ──▶  matches the hashes in its pool
                 ◀═══════════════ KV, by pdserve.transfer ═══════════════
    ◀──────────────────────────── KvPullGrant               what it has sent, with checksums

O alone decides what it grants: the leading blocks that it has, or fewer. A hash names a block's
whole content, so a grant cannot be stale; the epoch in `PullKv` says which life of O is meant. R
ends its wait by cancelling the request, and O's writes by revoking the ticket.

Blocks that no request waits for move in the same way:

    OfferKv      a worker that leaves names what is worth keeping, and its heir pulls it
    WarmUp       an operator names a worker from which another one is to pull the same
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.messages.transfer import MAX_BLOCKS, MAX_PARTS, TransferTicket

HASH_BYTES: Final = 16
"""Bytes of a block hash (`blocks.hashing`)."""

MAX_CHAINS: Final = 256
"""Most chains of one offer."""

Count = Annotated[int, Meta(ge=0)]
Epoch = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Period = Annotated[float, Meta(ge=0, le=3600)]
Word = Annotated[str, Meta(max_length=40)]
Hashes = Annotated[bytes, Meta(max_length=HASH_BYTES * MAX_BLOCKS)]
"""Block hashes of one chain, one after the other."""


class PullKv(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Asks for the blocks with these hashes."""

    epoch: Epoch
    """The life of the owner that is meant."""
    hashes: Hashes
    """Of the ticket's blocks, in order."""
    ticket: TransferTicket
    timeout: Period
    """Seconds that the requester still waits, at the moment of sending."""


class KvPullGrant(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the owner has sent, or why it sends nothing."""

    granted: Count = 0
    """Leading blocks that it has sent."""
    parts: Annotated[int, Meta(ge=0, le=MAX_PARTS)] = 0
    """Parts of them under the ticket."""
    checksums: Annotated[tuple[int, ...], Meta(max_length=MAX_BLOCKS)] = ()
    """CRC-32 of each granted block, taken at the owner; empty if its pool is in device memory."""
    refused: Word = ""
    """Why nothing is granted, in one word (`PullEnd`); empty: something is."""
    eta: Period = 0.0
    """With `busy`: seconds after which the owner expects to be free; 0: unknown."""


class OfferedChain(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one chain that a worker offers."""

    first: Count
    """Index of the first of them in its chain."""
    parent: bytes
    """Hash before that block; for a chain's first block its root."""
    hashes: Hashes
    mark: Annotated[bytes, Meta(max_length=64)] = b""
    """Mark of the tenant that owns the blocks; empty: unknown, or nobody in particular."""
    turns: Annotated[int, Meta(ge=1)] = 1
    """The conversation's turn at the chain's end."""


class KvChains(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that a worker could give away, the most valuable chain first. The blocks before a
    chain's first one are in an earlier chain."""

    chains: Annotated[tuple[OfferedChain, ...], Meta(max_length=MAX_CHAINS)] = ()


class OfferKv(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A worker that leaves offers its blocks. Answered when the receiver has pulled what it
    wants."""

    epoch: Epoch
    """The life of the receiver that is meant."""
    compat_hash: str
    """What the blocks belong to (`ModelCard.compat_hash`)."""
    names_id: bytes
    """Id of the secret of their hashes."""
    chains: KvChains
    timeout: Period
    """Seconds for which the sender waits."""


class ListKv(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Asks a worker for the chains that it could give away. Answered by `KvChains`."""

    epoch: Epoch
    """The life of the receiver that is meant."""
    compat_hash: str
    names_id: bytes
    blocks: Count
    """Most blocks to list."""


class WarmUp(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An operator has a worker pull the most valuable blocks of another one."""

    source: str
    """The other worker's node."""
    blocks: Count = 0
    """Most blocks to pull; 0: as many as an offer may bring."""
    timeout: Period = 60.0


class KvTaken(msgspec.Struct, frozen=True, array_like=True):
    """How much of an offer, or of a warm-up, the receiver has pulled."""

    blocks: Count = 0
    refused: Word = ""
    """Why it pulled no more, in one word; empty: it has all."""
