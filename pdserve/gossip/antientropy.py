"""Comparing two tables by hashes, so that equal ones cost eight bytes.

    A            Summary ->            B    equal: done
    A         <- Buckets               B    256 hashes
    A            Digests ->            B    hashes of A's records in the buckets that differ
    A         <- Records               B    what A lacks, and what B wants
    A            Records ->            B    that

A hash of many records is the exclusive or of theirs, kept up to date record by record. The dead are
in no hash: nodes forget them at different times and would differ for ever. They are sent when the
other side shows that it still takes them for living. It merges nothing; records go through the
table."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from pdserve.gossip.member import precedence
from pdserve.gossip.messages import BUCKETS, Buckets, Digests, Record, Records, Summary
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.gossip.member import Members
    from pdserve.ids import NodeId

__all__ = ["Ledger"]

_CHUNK: Final = 512
"""Records, or names, in one message."""


def _bucket(node: NodeId) -> int:
    return blake2b(node.encode(), digest_size=1).digest()[0]


def _hash(record: Record) -> int:
    return int.from_bytes(blake2b(encode(record), digest_size=8).digest(), "big")


class Ledger:
    """The hashes of one table."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._hashes: list[dict[NodeId, int]] = [{} for _ in range(BUCKETS)]
        self._sums = [0] * BUCKETS
        for record in members:
            self.update(record)

    def update(self, record: Record) -> None:
        """The table holds this record now."""
        number = _bucket(record.node)
        bucket = self._hashes[number]
        self._sums[number] ^= bucket.pop(record.node, 0)
        if not record.state.final:
            bucket[record.node] = _hash(record)
            self._sums[number] ^= bucket[record.node]

    def summary(self) -> Summary:
        total = 0
        for part in self._sums:
            total ^= part
        return Summary(total.to_bytes(8, "big"))

    def answer_summary(self, summary: Summary) -> Buckets | None:
        """None: the tables are equal."""
        if summary == self.summary():
            return None
        return Buckets(b"".join(part.to_bytes(8, "big") for part in self._sums))

    def answer_buckets(self, theirs: Buckets) -> Iterator[Digests]:
        """Ours, of the buckets that differ; several messages when they hold much."""
        numbers = bytearray()
        hashes: dict[NodeId, bytes] = {}
        for number in range(BUCKETS):
            mine = self._sums[number].to_bytes(8, "big")
            if mine == theirs.hashes[8 * number : 8 * number + 8]:
                continue
            if hashes and len(hashes) + len(self._hashes[number]) > _CHUNK:
                yield Digests(bytes(numbers), hashes)
                numbers, hashes = bytearray(), {}
            numbers.append(number)
            for node, value in self._hashes[number].items():
                hashes[node] = value.to_bytes(8, "big")
        if numbers:
            yield Digests(bytes(numbers), hashes)

    def answer_digests(self, theirs: Digests) -> Iterator[Records]:
        """What they lack of the named buckets, and whose records we want."""
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
                records.append(node)  # dead here: they should know
            if mine is None or mine.to_bytes(8, "big") != value:
                wanted.append(node)
        yield from self._chunks(records, wanted)

    def answer_records(self, theirs: Records) -> Iterator[Records]:
        """After these have been merged: the records asked for, and deaths they do not know of."""
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
