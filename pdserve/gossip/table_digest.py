"""Compares two member tables by hashes, so that equal tables cost eight bytes.

    A       TableHash ->          B    equal: done
    A    <- BucketHashes          B    256 hashes
    A       RecordHashes ->       B    hashes of A's records in the buckets that differ
    A    <- Records               B    what A lacks, and what B wants
    A       Records ->            B    what B wants

The hash of many records is the XOR of theirs, updated record by record. Dead members are in no
hash: nodes forget them at different times and would differ for ever. They are sent when the other
side shows that it still believes them alive. It merges nothing; records go through the table.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from pdserve.gossip.member_table import precedence
from pdserve.gossip.messages import (
    BUCKETS,
    BucketHashes,
    MemberRecord,
    RecordHashes,
    Records,
    TableHash,
)
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.gossip.member_table import MemberTable
    from pdserve.ids import NodeId

__all__ = ["TableDigest"]

_CHUNK: Final = 512
"""Most records, or names, in one message."""


def _bucket(node: NodeId) -> int:
    return blake2b(node.encode(), digest_size=1).digest()[0]


def _hash(record: MemberRecord) -> int:
    return int.from_bytes(blake2b(encode(record), digest_size=8).digest(), "big")


class TableDigest:
    """The hashes of one table."""

    def __init__(self, members: MemberTable) -> None:
        self._members = members
        self._hashes: list[dict[NodeId, int]] = [{} for _ in range(BUCKETS)]
        self._sums = [0] * BUCKETS
        for record in members:
            self.update(record)

    def update(self, record: MemberRecord) -> None:
        """Updates the hashes for a record that the table now holds."""
        number = _bucket(record.node)
        bucket = self._hashes[number]
        self._sums[number] ^= bucket.pop(record.node, 0)
        if not record.state.final:
            bucket[record.node] = _hash(record)
            self._sums[number] ^= bucket[record.node]

    def summary(self) -> TableHash:
        total = 0
        for part in self._sums:
            total ^= part
        return TableHash(total.to_bytes(8, "big"))

    def answer_summary(self, summary: TableHash) -> BucketHashes | None:
        """Answers a `TableHash`; None: the tables are equal."""
        if summary == self.summary():
            return None
        return BucketHashes(b"".join(part.to_bytes(8, "big") for part in self._sums))

    def answer_buckets(self, theirs: BucketHashes) -> Iterator[RecordHashes]:
        """Answers `BucketHashes` with the hashes of own records in differing buckets, in several
        messages if there are many.
        """
        numbers = bytearray()
        hashes: dict[NodeId, bytes] = {}
        for number in range(BUCKETS):
            mine = self._sums[number].to_bytes(8, "big")
            if mine == theirs.hashes[8 * number : 8 * number + 8]:
                continue
            if hashes and len(hashes) + len(self._hashes[number]) > _CHUNK:
                yield RecordHashes(bytes(numbers), hashes)
                numbers, hashes = bytearray(), {}
            numbers.append(number)
            for node, value in self._hashes[number].items():
                hashes[node] = value.to_bytes(8, "big")
        if numbers:
            yield RecordHashes(bytes(numbers), hashes)

    def answer_digests(self, theirs: RecordHashes) -> Iterator[Records]:
        """Answers `RecordHashes` with the records that the peer lacks, and the names of those
        wanted.
        """
        records = [
            node
            for number in sorted(set(theirs.buckets))
            for node, value in self._hashes[number].items()
            if theirs.hashes.get(node) != value.to_bytes(8, "big")
        ]
        wanted = []
        for node, value in theirs.hashes.items():
            mine = self._hashes[_bucket(node)].get(node)
            if mine is None and self._members.get(node) is not None:
                # The member is dead here, and the peer does not know it.
                records.append(node)
            if mine is None or mine.to_bytes(8, "big") != value:
                wanted.append(node)
        yield from self._chunks(records, wanted)

    def answer_records(self, theirs: Records) -> Iterator[Records]:
        """Answers `Records`, after they were merged: the requested records, and deaths that the
        peer does not know.
        """
        answer = dict.fromkeys(node for node in theirs.wanted if self._members.get(node))
        for record in theirs.records:
            mine = self._members.get(record.node)
            if mine and mine.state.final and precedence(mine) > precedence(record):
                answer[record.node] = None
        yield from self._chunks(list(answer), [])

    def _chunks(self, records: list[NodeId], wanted: list[NodeId]) -> Iterator[Records]:
        for start in range(0, max(len(records), len(wanted)), _CHUNK):
            found = (self._members.get(node) for node in records[start : start + _CHUNK])
            yield Records(
                tuple(record for record in found if record is not None),
                tuple(wanted[start : start + _CHUNK]),
            )
