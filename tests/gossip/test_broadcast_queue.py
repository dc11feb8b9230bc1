"""The outbox: newest word only, least sent first, bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.gossip.broadcast_queue import BroadcastQueue, transmissions
from pdserve.gossip.config import GossipConfig
from pdserve.gossip.messages import MemberRecord, MemberState, Rumour
from pdserve.ids import NodeId
from tests.gossip.strategies import records

CONFIG = GossipConfig()


def rumour(node="a", state=MemberState.ALIVE, incarnation=0, by=""):
    return Rumour(MemberRecord(NodeId(node), 1, incarnation, state), NodeId(by))


def test_a_rumour_is_sent_as_often_as_the_size_of_the_cluster_asks():
    outbox = BroadcastQueue(CONFIG)
    outbox.put(rumour())
    sent = 0
    while outbox:
        assert outbox.take(1000, 3, 1) == (rumour(),)
        sent += 3
    assert transmissions(CONFIG, 1000) <= sent < transmissions(CONFIG, 1000) + 3


def test_a_rumour_stays_until_every_peer_had_a_turn():
    outbox = BroadcastQueue(CONFIG)
    outbox.put(rumour())
    turns = 0
    while outbox:
        outbox.take(3, 4, 16)
        turns += 4
    assert turns == 16 > transmissions(CONFIG, 3)


def test_a_newer_word_replaces_all_older_ones():
    outbox = BroadcastQueue(CONFIG)
    outbox.put(rumour())
    outbox.put(rumour(state=MemberState.SUSPECT, by="b"))
    outbox.put(rumour(state=MemberState.SUSPECT, by="c"))
    assert len(outbox) == 2
    outbox.put(rumour(incarnation=1))
    assert outbox.take(10, 1, 1) == (rumour(incarnation=1),)


def test_what_was_sent_least_goes_first():
    outbox = BroadcastQueue(GossipConfig(batch=1))
    outbox.put(rumour("a"))
    assert outbox.take(1000, 1, 1) == (rumour("a"),)
    outbox.put(rumour("b"))
    assert outbox.take(1000, 1, 1) == (rumour("b"),)
    assert outbox.take(1000, 1, 1) == (rumour("a"),)


def test_a_batch_fits_a_message():
    outbox = BroadcastQueue(CONFIG)
    for i in range(200):
        outbox.put(rumour(f"n{i}"))
    assert len(outbox.take(1000, 1, 1)) == 64


@given(st.lists(records("a", "b", "c", "d"), max_size=20), st.integers(1, 5))
def test_the_bound_holds_and_everything_runs_out(heard, limit):
    outbox = BroadcastQueue(GossipConfig(queue_limit=limit))
    for record in heard:
        outbox.put(Rumour(record))
        assert len(outbox) <= limit
        assert len(outbox.take(1, 0, 1)) == len(outbox)
    for _ in range(20):
        outbox.take(10, 4, 1)
    assert len(outbox) == 0
