"""One machine by hand: its phases, what it says of itself, what it does with each kind of news."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.gossip import events as ev
from pdserve.gossip import messages as m
from pdserve.gossip.config import GossipConfig
from pdserve.gossip.core import Gossip, GossipPhase
from pdserve.gossip.messages import MemberRecord, MemberState, Rumour
from pdserve.ids import NodeId
from tests.gossip.strategies import records
from tests.support.seeds import is_long

ME, A, B, C = NodeId("me"), NodeId("a"), NodeId("b"), NodeId("c")


class Node:
    """A machine with a clock, in its epoch 5."""

    def __init__(self, start=None, **changes):
        me = MemberRecord(ME, 5, address="me:1", role="worker")
        self.core = Gossip(me, GossipConfig(**changes), Random(1))
        self.now = 0.0
        self.started = self.step(start or ev.StartGossip())

    def step(self, event):
        return self.core.step(self.now, event)

    def hear(self, *rumours, teller=A):
        return self.step(ev.MessageReceived(teller, 1, m.News(rumours)))

    def link(self, *nodes):
        for node in nodes:
            self.step(ev.LinkUp(node, 1, f"{node}:1"))
            self.hear(Rumour(MemberRecord(node, 1, address=f"{node}:1")), teller=node)

    def wait(self, seconds):
        """Let time pass, every appointment kept."""
        end, effects = self.now + seconds, []
        while (due := self.core.due) is not None and due <= end:
            self.now = max(due, self.now)
            effects += self.step(ev.Tick())
        self.now = end
        return effects


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def record(node, state=MemberState.ALIVE, incarnation=0, epoch=1):
    return MemberRecord(node, epoch, incarnation, state, address=f"{node}:1")


def test_without_seeds_a_node_is_ready_and_alone():
    node = Node()
    assert node.started == [ev.TableReady(alone=True)]
    assert node.core.phase is GossipPhase.UP


def test_with_seeds_it_waits_for_an_equal_table():
    node = Node(ev.StartGossip(("a:1", "me:1")))
    assert node.started == [ev.Dial("a:1")]
    node.link(A)
    assert node.core.phase is GossipPhase.JOINING
    assert ev.TableReady(alone=False) in node.step(ev.MessageReceived(A, 1, m.Records()))


@pytest.mark.parametrize("refused", [False, True])
def test_seeds_that_do_not_answer_are_tried_again_and_waited_for_only_so_long(refused):
    node = Node(ev.StartGossip(("a:1",)))
    node.step(ev.DialAttemptFailed("a:1", refused=refused))
    assert of(ev.Dial, node.wait(0.2)) == [ev.Dial("a:1")]
    assert of(ev.TableReady, node.wait(3.0)) == [ev.TableReady(alone=True)]


def test_it_refutes_only_a_suspicion_of_its_present_word():
    node = Node()
    node.link(A)
    node.hear(Rumour(record(ME, MemberState.SUSPECT, 0, epoch=5)))
    assert node.core.me.incarnation == 1
    node.hear(Rumour(record(ME, MemberState.SUSPECT, 0, epoch=5)))
    node.hear(Rumour(record(ME, MemberState.SUSPECT, 7, epoch=4)))
    node.hear(Rumour(record(ME, MemberState.DEAD, 7, epoch=4)))
    assert node.core.me.incarnation == 1
    assert node.core.phase is GossipPhase.UP


def test_the_answer_to_a_ping_that_accuses_is_the_refutation():
    node = Node()
    node.link(A)
    effects = node.step(
        ev.MessageReceived(A, 1, m.Ping(9, (Rumour(record(ME, MemberState.SUSPECT, 0, epoch=5)),)))
    )
    (ack,) = (e.message for e in of(ev.Send, effects) if isinstance(e.message, m.Ack))
    assert ack.nonce == 9
    assert ack.rumours[0].record.incarnation == 1


def test_its_own_death_silences_it_and_the_next_life_starts_among_the_living():
    node = Node(ev.StartGossip(("seed:1",)))
    node.link(A, B, C)
    node.hear(Rumour(record(B, MemberState.DEAD)))
    effects = node.hear(
        Rumour(record(ME, MemberState.DEAD, epoch=5)), Rumour(record(C, MemberState.DEAD))
    )
    (rejoin,) = of(ev.Rejoin, effects)
    assert rejoin.above == 5
    assert {known.node for known in rejoin.start.known} == {A, C}
    assert set(rejoin.start.seeds) == {"seed:1", "a:1", "b:1", "c:1"}
    assert of(ev.Send, effects) == []
    assert node.core.due is None
    assert node.hear(Rumour(record(C))) == []


@pytest.mark.parametrize(
    ("state", "effect"), [(MemberState.ALIVE, ev.Superseded(9)), (MemberState.LEFT, ev.Rejoin)]
)
def test_a_later_life_of_its_name_silences_it(state, effect):
    node = Node()
    node.link(A)
    (last,) = (
        e for e in node.hear(Rumour(record(ME, state, epoch=9))) if not isinstance(e, ev.Send)
    )
    assert last == effect if isinstance(effect, ev.Superseded) else isinstance(last, effect)
    assert node.core.phase is GossipPhase.OUT


def test_leaving_tells_everybody_answers_for_a_while_and_stops():
    node = Node()
    node.link(A, B)
    told = {e.node for e in of(ev.Send, node.step(ev.Leave())) if isinstance(e.message, m.News)}
    assert told == {A, B}
    node.hear(Rumour(record(ME, MemberState.DEAD, epoch=5)))
    answers = of(ev.Send, node.step(ev.MessageReceived(A, 1, m.Ping(3))))
    assert ev.Send(A, m.Ack(3)) in answers
    assert of(ev.GossipStopped, node.wait(1.0)) == [ev.GossipStopped()]


def test_a_lost_and_refused_connection_is_a_death_once_two_say_so():
    node = Node()
    node.link(A, B, C)
    lost = node.step(ev.LinkDown(A, 1))
    assert lost[:2] == [ev.Unreachable(A), ev.Dial("a:1")]
    refused = node.step(ev.DialAttemptFailed("a:1", refused=True))
    assert len(of(ev.Suspected, refused)) == 1
    dead = node.hear(Rumour(record(A, MemberState.SUSPECT), by=B, refused=True), teller=B)
    assert [e.record.node for e in of(ev.Died, dead)] == [A]


def test_a_link_that_somebody_closed_speaks_against_nobody():
    node = Node()
    node.link(A, B, C)
    closed = node.step(ev.LinkDown(A, 1, orderly=True))
    assert of(ev.Unreachable, closed) == []
    assert A not in node.core.context.links


def test_a_refusal_by_an_address_never_linked_proves_nothing():
    node = Node()
    node.link(B)
    node.hear(Rumour(record(A)), teller=B)
    assert of(ev.Suspected, node.step(ev.DialAttemptFailed("a:1", refused=True))) == []


def test_a_later_life_ends_the_earlier_one_at_once():
    node = Node()
    node.link(A, B)
    effects = node.hear(Rumour(record(A, epoch=2)), teller=B)
    assert [type(e) for e in effects if isinstance(e, (ev.Died, ev.Joined))] == [ev.Died, ev.Joined]
    assert node.hear(Rumour(record(A)), teller=A)[0].message.records[0].epoch == 2


def test_a_life_that_is_over_is_told_and_not_believed():
    node = Node()
    node.link(A, B)
    node.hear(Rumour(record(A, MemberState.DEAD)), teller=B)
    effects = node.step(ev.MessageReceived(A, 1, m.Ping(1)))
    assert effects == [ev.Send(A, m.Records((record(A, MemberState.DEAD),)))]
    effects = node.hear(Rumour(record(A, MemberState.ALIVE, 99)), teller=B)
    assert of(ev.Joined, effects) == of(ev.Refuted, effects) == []


def test_a_silent_member_dies_only_after_the_whole_suspicion():
    node = Node()
    node.link(A)
    suspected = None
    while suspected is None:
        suspected = next(iter(of(ev.Suspected, node.wait(0.1))), None)
    at = node.now
    assert of(ev.Died, node.wait(3.8)) == []
    assert len(of(ev.Died, node.wait(0.4))) == 1
    assert 1.0 <= at < 2.2, "a ping at a random phase, two misses, nobody to help"


def test_a_refutation_ends_the_countdown():
    node = Node()
    node.link(A, B)
    node.hear(Rumour(record(B, MemberState.SUSPECT), by=A))
    effects = node.hear(Rumour(record(B, MemberState.ALIVE, 1)))
    assert len(of(ev.Refuted, effects)) == 1
    assert ("suspect", B) not in node.core.context.agenda


def test_a_node_that_stood_still_passes_no_verdict_on_what_it_did_not_hear():
    node = Node()
    node.link(A)
    node.hear(Rumour(record(A, MemberState.SUSPECT), by=B))
    node.now += 30.0
    assert of(ev.Died, node.step(ev.Tick())) == []
    node.hear(Rumour(record(A, MemberState.ALIVE, 1)))
    assert of(ev.Died, node.wait(0.9)) == []


def test_a_full_table_forgets_the_dead_and_then_refuses_by_name():
    node = Node(max_members=3)
    node.link(A, B)
    node.hear(Rumour(record(B, MemberState.DEAD)))
    assert len(of(ev.Joined, node.hear(Rumour(record(C))))) == 1
    assert node.core.members.get(B) is None
    d = NodeId("d")
    assert of(ev.TableFull, node.hear(Rumour(record(d)))) == [ev.TableFull(d)]


def test_the_dead_are_forgotten_after_the_window():
    node = Node(reunion_window=100.0)
    node.link(A, B)
    node.hear(Rumour(record(B, MemberState.DEAD)))
    node.wait(200.0)
    assert node.core.members.get(B) is None


def test_a_later_life_introduces_itself_before_the_earlier_one_is_given_up():
    """Else a process that runs under the same name would hear of its death, and rejoin above."""
    node = Node()
    node.link(A, B)
    node.wait(0.9)
    effects = node.step(ev.LinkUp(A, 2, "a:2"))
    assert of(ev.Died, effects) == []
    effects = node.step(ev.MessageReceived(A, 2, m.News((Rumour(record(A, epoch=2)),))))
    assert [type(e) for e in effects if isinstance(e, (ev.Died, ev.Joined))] == [ev.Died, ev.Joined]
    told = [e.message for e in effects + node.wait(0.9) if isinstance(e, ev.Send)]
    records = [r.record for message in told if isinstance(message, m.News) for r in message.rumours]
    assert {r.epoch for r in records if r.node == A} == {2}


def test_who_outlives_its_seeds_goes_on_looking_for_them():
    node = Node(ev.StartGossip(("s:1", "t:1")), reunion_interval=1000.0)
    node.step(ev.LinkUp(A, 1, "s:1"))
    node.step(ev.LinkUp(B, 1, "b:1"))
    node.step(ev.LinkUp(B, 1, "t:1"))  # a seed may go by another address
    node.hear(Rumour(record(A)), Rumour(record(B)))
    node.step(ev.MessageReceived(A, 1, m.Records()))
    node.hear(Rumour(record(A, MemberState.DEAD)))
    assert of(ev.Dial, node.wait(3.0)) == []  # one seed is enough
    node.hear(Rumour(record(B, MemberState.LEFT)), teller=B)
    assert {e.address for e in of(ev.Dial, node.wait(2.0))} == {"s:1", "t:1"}
    node.step(ev.DialAttemptFailed("s:1", refused=True))
    node.step(ev.DialAttemptFailed("t:1", refused=False))
    assert {e.address for e in of(ev.Dial, node.wait(6.0))} == {"s:1", "t:1"}
    node.step(ev.LinkUp(C, 1, "s:1"))
    node.hear(Rumour(record(C)), teller=C)
    node.step(ev.DialAttemptFailed("t:1", refused=True))
    assert of(ev.Dial, node.wait(3.0)) == []


def test_news_waits_for_the_interval_between_rounds():
    node = Node()
    node.link(A)
    node.wait(0.95)
    rounds = []
    for i in range(10):
        effects = node.hear(Rumour(record(NodeId(f"x{i}"))))
        rounds += [e for e in of(ev.Send, effects) if isinstance(e.message, m.News)]
    assert len(rounds) == 1


def test_news_reaches_every_peer_without_luck():
    node = Node()
    peers = [NodeId(f"p{i:02}") for i in range(16)]
    node.link(*peers)
    node.wait(0.9)
    effects = node.hear(Rumour(record(A)), teller=peers[0]) + node.wait(0.9)
    told = {
        effect.node
        for effect in of(ev.Send, effects)
        if isinstance(effect.message, m.News) and Rumour(record(A)) in effect.message.rumours
    }
    assert told == set(peers)


def test_a_link_of_ours_that_nobody_needs_is_closed():
    node = Node(ev.StartGossip(("seed:1",)))
    node.step(ev.LinkUp(NodeId("seed"), 1, "seed:1"))
    assert of(ev.Close, node.wait(11.0)) == [ev.Close(NodeId("seed"))]


NODES = st.sampled_from([A, B, C, ME])
NONCES = st.integers(0, 3)
MESSAGES = st.one_of(
    st.builds(
        m.News, st.lists(st.builds(Rumour, records("a", "b", "c"), NODES, st.booleans())).map(tuple)
    ),
    st.builds(m.Ping, NONCES),
    st.builds(m.Ack, NONCES),
    st.builds(m.IndirectPing, NONCES, NODES, st.integers(1, 3)),
    st.builds(m.IndirectPingResult, NONCES, st.booleans()),
    st.builds(m.TableHash, st.just(bytes(8))),
    st.builds(m.BucketHashes, st.just(bytes(8 * m.BUCKETS))),
    st.builds(m.RecordHashes, st.binary(max_size=9), st.dictionaries(NODES, st.just(bytes(8)))),
    st.builds(m.Records, st.lists(records("a", "b", "c")).map(tuple), st.lists(NODES).map(tuple)),
    st.builds(m.CardRequest, NODES, st.integers(1, 3), st.integers(0, 2)),
    st.builds(m.CardReply, NODES, st.integers(1, 3), st.integers(0, 2), st.just(m.Card())),
    st.builds(m.PartRequest, st.just(bytes(16)), st.integers(0, 9)),
    st.builds(m.PartReply, st.just(bytes(16)), st.integers(0, 9), st.none()),
)
EVENTS = st.one_of(
    st.builds(ev.MessageReceived, NODES, st.integers(1, 3), MESSAGES),
    st.builds(ev.LinkUp, NODES, st.integers(1, 3), st.sampled_from(["a:1", "b:1", ""])),
    st.builds(ev.LinkDown, NODES, st.integers(1, 3)),
    st.builds(ev.DialAttemptFailed, st.sampled_from(["a:1", "b:1"]), st.booleans()),
    st.builds(ev.WantPart, NODES, st.just(bytes(16))),
    st.just(ev.SetCard(m.Card(b"x"))),
    st.just(ev.Tick()),
)


@settings(max_examples=2000 if is_long() else 60)
@given(st.lists(st.tuples(st.floats(0, 5), EVENTS), max_size=40))
def test_no_order_of_events_breaks_it_or_takes_back_a_death(script):
    node = Node(ev.StartGossip(("a:1",)))
    dead: set[tuple[NodeId, int]] = set()
    for pause, event in script:
        node.now += pause
        for effect in node.step(event):
            if isinstance(effect, (ev.Died, ev.Departed)):
                life = (effect.record.node, effect.record.epoch)
                assert life not in dead
                dead.add(life)
            elif isinstance(effect, (ev.Joined, ev.Refuted, ev.Suspected)):
                assert (effect.record.node, effect.record.epoch) not in dead
        assert node.core.members.present == sum(not r.state.final for r in node.core.members)
    node.wait(30.0)
