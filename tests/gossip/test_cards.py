"""Cards by version and parts by content, in small worlds and by hand."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.gossip import events as ev
from pdserve.gossip import messages as m
from pdserve.gossip.cards import Cards, part_hash
from pdserve.gossip.config import GossipConfig
from pdserve.gossip.context import GossipContext
from pdserve.ids import NodeId
from tests.gossip.world import World

DATA = bytes(range(256)) * 3000
CARD = m.Card(b"body", (m.CardPart("tokenizer", part_hash(DATA), len(DATA)),))
OWNER, B, ME = NodeId("owner"), NodeId("b"), NodeId("me")
RECORD = m.MemberRecord(OWNER, 1, card=1)


def alone(**changes):
    context = GossipContext(ME, GossipConfig(**changes), Random(1))
    context.links.update({OWNER: 1, B: 1})
    return context, Cards(context, lambda node: None)


def took(context):
    effects, context.effects = context.effects, []
    return effects


def test_a_new_card_reaches_everybody_and_the_last_version_stays(seed):
    world = World(seed)
    world.grow(25)
    for version in range(3):
        world.tell("n3", ev.SetCard(m.Card(b"v%d" % version)))
        world.run(0.01)
    hosts = world.hosts.values()

    def known():
        return all(host.core.cards.get(NodeId("n3")) == m.Card(b"v2") for host in hosts)

    assert world.until(known, 3.0) < 1.5
    for host in hosts:
        versions = [e.version for _, where, e in world.log if isinstance(e, ev.CardReady)
                    and where == host.name]  # fmt: skip
        assert versions == sorted(set(versions))


def test_a_newcomer_gets_the_cards_there_are(seed):
    world = World(seed)
    world.grow(5)
    world.tell("n1", ev.SetCard(m.Card(b"one")))
    world.run(1.0)
    new = world.add("new", ["n0"])
    world.until(lambda: new.core.cards.get(NodeId("n1")) == m.Card(b"one"), 3.0)


def test_a_part_is_pulled_in_chunks_and_checked(seed):
    world = World(seed)
    world.grow(4)
    world.tell("n1", ev.SetCard(CARD, (DATA,)))
    world.run(1.0)
    for node in ("n2", "n3"):
        world.tell(node, ev.WantPart(NodeId("n1"), part_hash(DATA)))
    world.run(1.0)
    ready = [(where, e.data) for _, where, e in world.log if isinstance(e, ev.PartReady)]
    assert sorted(ready) == [("n2", DATA), ("n3", DATA)]


def test_a_card_must_come_with_its_parts():
    _, cards = alone()
    with pytest.raises(ValueError, match="not those"):
        cards.set_own(1, 1, CARD, (b"other",))


def test_who_had_nobody_to_ask_asks_the_first_link():
    context, cards = alone()
    context.links.clear()
    cards.learn(RECORD, None)
    assert took(context) == []
    context.links[B] = 1
    cards.linked()
    assert took(context) == [ev.Send(B, m.CardRequest(OWNER, 1, 1))]
    context.links[OWNER] = 1
    cards.linked()
    assert took(context) == []  # B has been asked, and is there
    del context.links[B]
    cards.linked()
    assert took(context) == [ev.Send(OWNER, m.CardRequest(OWNER, 1, 1))]
    cards.reply(OWNER, m.CardReply(OWNER, 1, 1, CARD))
    took(context)
    context.links.clear()
    cards.want(OWNER, part_hash(DATA))
    assert took(context) == []
    context.links[B] = 1
    cards.linked()
    assert took(context) == [ev.Send(B, m.PartRequest(part_hash(DATA), 0))]
    assert list(context.agenda.take(100.0)) == [("part", part_hash(DATA).hex())]


def test_a_silent_peer_is_replaced_by_another():
    context, cards = alone()
    cards.learn(RECORD, B)
    (first,) = took(context)
    assert first == ev.Send(B, m.CardRequest(OWNER, 1, 1))
    assert [key for key in context.agenda.take(2.0)] == [("card", OWNER)]
    cards.card_due(OWNER)
    (second,) = took(context)
    assert second.node == OWNER
    cards.reply(OWNER, m.CardReply(OWNER, 1, 1, m.Card(b"x")))
    assert took(context) == [ev.CardReady(OWNER, 1, 1, m.Card(b"x"))]
    assert len(context.agenda) == 0


def test_what_is_not_the_card_asked_for_is_not_taken():
    context, cards = alone()
    cards.learn(m.MemberRecord(OWNER, 1, card=2), B)
    took(context)
    cards.reply(OWNER, m.CardReply(OWNER, 1, 2, m.Card()))
    cards.reply(B, m.CardReply(OWNER, 9, 2, m.Card()))
    cards.reply(B, m.CardReply(OWNER, 1, 1, m.Card()))
    cards.reply(B, m.CardReply(OWNER, 1, 2, None))
    assert took(context) == []
    assert cards.get(OWNER) is None


def test_a_death_ends_the_fetch_and_makes_room_for_the_next():
    context, cards = alone(card_fetches=1)
    cards.learn(RECORD, B)
    cards.learn(m.MemberRecord(B, 1, card=1), B)
    assert len(took(context)) == 1
    cards.drop(OWNER)
    assert took(context) == [ev.Send(B, m.CardRequest(B, 1, 1))]


def test_bytes_that_are_not_the_part_are_reported():
    context, cards = alone()
    cards.learn(RECORD, None)
    cards.reply(OWNER, m.CardReply(OWNER, 1, 1, m.Card(b"", (m.CardPart("p", bytes(16), 3),))))
    cards.want(OWNER, bytes(16))
    took(context)
    cards.part_reply(OWNER, m.PartReply(bytes(16), 0, b"abc"))
    (failed,) = took(context)
    assert isinstance(failed, ev.PartFailed)
    assert len(context.agenda) == 0


def test_a_part_that_nobody_sends_fails_after_its_tries():
    context, cards = alone()
    cards.learn(RECORD, None)
    cards.reply(OWNER, m.CardReply(OWNER, 1, 1, CARD))
    cards.want(OWNER, part_hash(DATA))
    for step in range(1, 20):
        for _, whose in context.agenda.take(step * 100.0):
            cards.part_due(str(whose))
    effects = took(context)
    assert isinstance(effects[-1], ev.PartFailed)
    assert len([e for e in effects if isinstance(e, ev.Send)]) == context.config.fetch_tries + 1


def test_a_part_of_no_known_card_fails_at_once():
    context, cards = alone()
    cards.want(OWNER, bytes(16))
    assert isinstance(took(context)[0], ev.PartFailed)
