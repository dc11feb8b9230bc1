from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.gossip import events as ev
from pdserve.gossip.messages import Card, MemberRecord
from pdserve.ids import NodeId
from pdserve.messages.node import NodeCard
from pdserve.runtime.registry import Member, MemberAppeared, MemberChanged, MemberGone, Registry
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.runtime.registry import MemberEvent


def record(node: str, epoch: int = 1, role: str = "worker") -> MemberRecord:
    return MemberRecord(NodeId(node), epoch, address=f"{node}:1", role=role)


def card_of(node: str, card: NodeCard, epoch: int = 1, version: int = 1) -> ev.CardReady:
    return ev.CardReady(NodeId(node), epoch, version, Card(encode(card), ()))


def heard(*effects: ev.Effect) -> tuple[Registry, list[MemberEvent]]:
    registry = Registry()
    events: list[MemberEvent] = []
    registry.listen(events.append)
    for effect in effects:
        registry.feed(effect)
    return registry, events


def kinds(events: list[MemberEvent]) -> list[type]:
    return [type(event) for event in events]


def test_members_are_found_by_id_and_role() -> None:
    registry, _ = heard(
        ev.Joined(record("b")),
        ev.Joined(record("a")),
        ev.Joined(record("r", role="router")),
        card_of("b", NodeCard(topics=("load",))),
    )
    assert registry.get(NodeId("a")) == Member(NodeId("a"), 1, "a:1", "worker")
    assert [m.node for m in registry.by_role("worker")] == ["a", "b"]
    assert (len(registry), registry.get(NodeId("x"))) == (3, None)


def test_a_listener_hears_first_of_those_who_are_there() -> None:
    registry, _ = heard(ev.Joined(record("a")))
    events: list[MemberEvent] = []
    stop = registry.listen(events.append)
    registry.feed(ev.Joined(record("b")))
    stop()
    stop()
    registry.feed(ev.Joined(record("c")))
    assert [event.member.node for event in events] == ["a", "b"]


@pytest.mark.parametrize(
    ("effect", "field", "value"),
    [
        (ev.Suspected(record("a")), "suspect", True),
        (ev.Unreachable(NodeId("a")), "reachable", False),
        (card_of("a", NodeCard(host="h")), "card", NodeCard(host="h")),
    ],
)
def test_a_change_is_told_with_what_was_before(
    effect: ev.Effect, field: str, value: object
) -> None:
    registry, events = heard(ev.Joined(record("a")), effect, effect)
    assert kinds(events) == [MemberAppeared, MemberChanged]
    change = events[1]
    assert isinstance(change, MemberChanged)
    assert getattr(change.member, field) == value != getattr(change.before, field)
    assert registry.get(NodeId("a")) == change.member


def test_doubts_end() -> None:
    registry, _ = heard(
        ev.Joined(record("a")),
        ev.Suspected(record("a")),
        ev.Unreachable(NodeId("a")),
        ev.Refuted(record("a")),
        ev.Reachable(NodeId("a")),
    )
    member = registry.get(NodeId("a"))
    assert member is not None
    assert (member.suspect, member.reachable) == (False, True)


@pytest.mark.parametrize(("effect", "reason"), [(ev.Died, "died"), (ev.Departed, "left")])
def test_a_life_ends_once(effect: Callable[[MemberRecord], ev.Effect], reason: str) -> None:
    end = effect(record("a"))
    registry, events = heard(ev.Joined(record("a")), end, end, ev.Suspected(record("a")))
    assert kinds(events) == [MemberAppeared, MemberGone]
    assert isinstance(events[1], MemberGone)
    assert (events[1].reason, len(registry)) == (reason, 0)


def test_what_belongs_to_another_life_changes_nothing() -> None:
    registry, events = heard(
        ev.Joined(record("a", 2)),
        ev.Died(record("a", 1)),
        ev.Suspected(record("a", 1)),
        card_of("a", NodeCard(host="old"), epoch=1),
        card_of("b", NodeCard()),
    )
    assert kinds(events) == [MemberAppeared]
    assert registry.get(NodeId("a")) == Member(NodeId("a"), 2, "a:1", "worker")


def test_a_later_life_ends_the_one_before_and_has_no_card_yet() -> None:
    registry, events = heard(
        ev.Joined(record("a", 1)), card_of("a", NodeCard(host="h")), ev.Joined(record("a", 2))
    )
    assert kinds(events) == [MemberAppeared, MemberChanged, MemberGone, MemberAppeared]
    assert events[2].member.epoch == 1
    member = registry.get(NodeId("a"))
    assert member is not None
    assert (member.epoch, member.card) == (2, None)


def test_starting_afresh_everybody_is_gone_once() -> None:
    registry, events = heard(ev.Joined(record("a")), ev.Joined(record("b")))
    registry.clear("own rejoin")
    registry.clear("closed")
    assert kinds(events) == [MemberAppeared, MemberAppeared, MemberGone, MemberGone]
    assert {e.reason for e in events if isinstance(e, MemberGone)} == {"own rejoin"}


def test_a_card_that_cannot_be_read_leaves_the_one_before() -> None:
    registry, events = heard(
        ev.Joined(record("a")),
        card_of("a", NodeCard(host="h")),
        ev.CardReady(NodeId("a"), 1, 2, Card(b"\xc1", ())),
    )
    assert kinds(events) == [MemberAppeared, MemberChanged]
    member = registry.get(NodeId("a"))
    assert member is not None
    assert member.card == NodeCard(host="h")


def test_a_listener_that_fails_does_not_hide_a_death_from_the_others() -> None:
    registry = Registry()
    events: list[MemberEvent] = []

    def broken(event: MemberEvent) -> None:
        raise ValueError("a fault")

    registry.listen(broken)
    registry.listen(events.append)
    registry.feed(ev.Joined(record("a")))
    registry.feed(ev.Died(record("a")))
    assert kinds(events) == [MemberAppeared, MemberGone]


def test_one_who_comes_to_listen_and_fails_listens_all_the_same() -> None:
    registry, _ = heard(ev.Joined(record("a")), ev.Joined(record("b")))
    seen: list[str] = []

    def broken(event: MemberEvent) -> None:
        seen.append(event.member.node)
        raise ValueError("a fault")

    registry.listen(broken)
    assert seen == ["a", "b"]


def test_one_who_stops_listening_in_the_middle_hears_no_more() -> None:
    registry = Registry()
    seen: list[str] = []
    stops: list[Callable[[], None]] = []

    def first(event: MemberEvent) -> None:
        for stop in stops:
            stop()

    registry.listen(first)
    stops.append(registry.listen(lambda event: seen.append(event.member.node)))
    registry.feed(ev.Joined(record("a")))
    assert seen == []


def test_other_effects_concern_nobody_here() -> None:
    _, events = heard(ev.TableReady(alone=True), ev.PartFailed(b"", "x"), ev.TableFull(NodeId("x")))
    assert events == []
