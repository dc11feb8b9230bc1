"""Keeps the members of the cluster as this node sees them, and reports their changes.

Fed with gossip effects. Plain synchronous code; readers get immutable records, and listeners are
called after each change. For each life of a member `MemberGone` comes exactly once and last. Owned
by `Node`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from pdserve.gossip import events as ev
from pdserve.messages.node import NodeCard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.gossip.messages import MemberRecord
    from pdserve.ids import Epoch, NodeId

__all__ = ["Member", "MemberAppeared", "MemberChanged", "MemberEvent", "MemberGone", "Registry"]

_log = logging.getLogger(__name__)

_decode_card = msgspec.msgpack.Decoder(NodeCard).decode


@dataclass(frozen=True, slots=True)
class Member:
    """One life of another node."""

    node: NodeId
    epoch: Epoch
    address: str
    """Address at which it is dialled."""
    role: str
    card: NodeCard | None = None
    """Its card; None: not known yet."""
    suspect: bool = False
    """True if gossip suspects that it is dead; it is still a member."""
    reachable: bool = True
    """False if this node's own link to it was lost and there is no other yet."""


@dataclass(frozen=True, slots=True)
class MemberAppeared:
    """A life began; its card may come later, as `MemberChanged`."""

    member: Member


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """A member's card, reachability or suspicion changed."""

    member: Member
    before: Member


@dataclass(frozen=True, slots=True)
class MemberGone:
    """A member's life ended: waits for it can stop."""

    member: Member
    reason: str
    """`died`, `left`, or `own rejoin`: peers declared this node dead, and it starts afresh."""


MemberEvent = MemberAppeared | MemberChanged | MemberGone


class Registry:
    """The members and their listeners."""

    def __init__(self) -> None:
        self._members: dict[NodeId, Member] = {}
        self._listeners: dict[Callable[[MemberEvent], None], None] = {}

    # ------------------------------------------------------------------ reading

    def get(self, node: NodeId) -> Member | None:
        """The present life of `node`; None: no member."""
        return self._members.get(node)

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def by_role(self, role: str) -> list[Member]:
        """Members of a role, sorted by id."""
        found = [member for member in self._members.values() if member.role == role]
        return sorted(found, key=lambda member: member.node)

    def listen(self, listener: Callable[[MemberEvent], None]) -> Callable[[], None]:
        """Calls `listener` on every change, beginning with the present members. Returns a function
        that ends it.
        """
        self._listeners[listener] = None
        for member in tuple(self._members.values()):
            _call(listener, MemberAppeared(member))
        return lambda: self._listeners.pop(listener, None)

    # ------------------------------------------------------------------ feeding

    def feed(self, effect: ev.Effect) -> None:
        """Applies one gossip effect; irrelevant ones are ignored."""
        if isinstance(effect, ev.Joined):
            self._joined(effect.record)
        elif isinstance(effect, ev.CardReady):
            self._card_ready(effect)
        elif isinstance(effect, ev.Suspected):
            self._change(effect.record.node, effect.record.epoch, suspect=True)
        elif isinstance(effect, ev.Refuted):
            self._change(effect.record.node, effect.record.epoch, suspect=False)
        elif isinstance(effect, ev.Unreachable):
            self._change(effect.node, None, reachable=False)
        elif isinstance(effect, ev.Reachable):
            self._change(effect.node, None, reachable=True)
        elif isinstance(effect, ev.Died):
            self._gone(effect.record, "died")
        elif isinstance(effect, ev.Departed):
            self._gone(effect.record, "left")

    def clear(self, reason: str) -> None:
        """Reports all members as gone, because this node starts afresh."""
        for member in tuple(self._members.values()):
            del self._members[member.node]
            self._tell(MemberGone(member, reason))

    def _joined(self, record: MemberRecord) -> None:
        old = self._members.get(record.node)
        if old is not None:  # its death was never reported; a later life proves it
            del self._members[record.node]
            self._tell(MemberGone(old, "died"))
        member = Member(record.node, record.epoch, record.address, record.role)
        self._members[record.node] = member
        self._tell(MemberAppeared(member))

    def _card_ready(self, effect: ev.CardReady) -> None:
        try:
            card = _decode_card(effect.card.body)
        except msgspec.DecodeError as error:
            _log.warning("the card of %s cannot be read: %s", effect.node, error)
            return
        self._change(effect.node, effect.epoch, card=card)

    def _change(self, node: NodeId, epoch: Epoch | None, **fields: object) -> None:
        before = self._members.get(node)
        if before is None or (epoch is not None and before.epoch != epoch):
            return
        member = replace(before, **fields)  # type: ignore[arg-type]
        if member != before:
            self._members[node] = member
            self._tell(MemberChanged(member, before))

    def _gone(self, record: MemberRecord, reason: str) -> None:
        member = self._members.get(record.node)
        if member is not None and member.epoch == record.epoch:
            del self._members[record.node]
            self._tell(MemberGone(member, reason))

    def _tell(self, event: MemberEvent) -> None:
        for listener in tuple(self._listeners):
            if listener in self._listeners:  # else: the one before it has ended it
                _call(listener, event)


def _call(listener: Callable[[MemberEvent], None], event: MemberEvent) -> None:
    try:
        listener(event)
    except Exception:  # one deaf listener must not hide a death from the others
        _log.exception("a listener failed on %s", type(event).__name__)
