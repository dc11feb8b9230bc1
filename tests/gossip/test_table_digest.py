"""Any two tables become equal in one exchange, and equal ones exchange eight bytes."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.gossip import messages as m
from pdserve.gossip.member_table import MemberTable
from pdserve.gossip.table_digest import TableDigest
from pdserve.ids import NodeId
from pdserve.wire.codec import encode
from tests.gossip.strategies import records
from tests.support.seeds import is_long


class Side:
    def __init__(self, heard):
        self.members = MemberTable()
        self.ledger = TableDigest(self.members)
        self.bytes = 0
        self.hear(heard)

    def hear(self, heard):
        for record in heard:
            change = self.members.apply(record)
            if change:
                self.ledger.update(change.new)

    def answer(self, message):
        self.bytes += len(encode(message))
        if isinstance(message, m.TableHash):
            buckets = self.ledger.answer_summary(message)
            return [] if buckets is None else [buckets]
        if isinstance(message, m.BucketHashes):
            return list(self.ledger.answer_buckets(message))
        if isinstance(message, m.RecordHashes):
            return list(self.ledger.answer_digests(message))
        self.hear(message.records)
        return list(self.ledger.answer_records(message))

    def table(self):
        return sorted(self.members, key=lambda record: record.node)

    def present(self):
        return [record for record in self.table() if not record.state.final]


def exchange(a, b):
    """Returns how many messages it took."""
    queue = deque([(b, a, a.ledger.summary())])
    count = 0
    while queue:
        to, sender, message = queue.popleft()
        count += 1
        assert count < 100
        queue.extend((sender, to, answer) for answer in to.answer(m.decode(encode(message))))
    return count


NODES = ("a", "b", "c", "d", "e")


@given(st.lists(records(*NODES), max_size=8), st.lists(records(*NODES), max_size=8))
def test_one_exchange_makes_two_views_equal(first, second):
    a, b = Side(first), Side(second)
    exchange(a, b)
    assert a.present() == b.present()
    assert exchange(a, b) == 1


@settings(max_examples=1000 if is_long() else 30)
@given(st.lists(records(*NODES), max_size=8))
def test_hashes_depend_on_the_table_alone(heard):
    a, b = Side(heard), Side(reversed(heard))
    assert a.ledger.summary() == b.ledger.summary() == TableDigest(a.members).summary()


def test_the_dead_are_sent_only_to_those_who_take_them_for_living():
    alive, dead = (
        m.MemberRecord(NodeId("a"), 1),
        m.MemberRecord(NodeId("a"), 1, state=m.MemberState.DEAD),
    )
    knows, ignorant, stranger = Side([dead]), Side([alive]), Side([])
    assert exchange(knows, stranger) == 1
    exchange(ignorant, knows)
    assert ignorant.table() == [dead]


def test_a_newcomer_learns_a_large_table_in_bounded_messages():
    table = [m.MemberRecord(NodeId(f"n{i}"), 1, address=f"n{i}:1") for i in range(3000)]
    old, new = Side(table), Side([m.MemberRecord(NodeId("new"), 2)])
    assert exchange(new, old) < 20
    assert new.table() == old.table()
    assert len(new.table()) == 3001


def test_one_difference_in_a_large_table_is_found_cheaply():
    table = [m.MemberRecord(NodeId(f"n{i}"), 1) for i in range(3000)]
    a, b = Side(table), Side([*table, m.MemberRecord(NodeId("x"), 1)])
    assert exchange(a, b) <= 5
    assert a.bytes + b.bytes < 3000
    assert a.table() == b.table()
