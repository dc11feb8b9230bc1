"""Holds the newest record of every member, and merges records.

Within one epoch, from weakest to strongest:

    ALIVE 0  <  SUSPECT 0  <  ALIVE 1  <  SUSPECT 1  <  ...  <  DEAD  <  LEFT

A suspicion beats the record it doubts, a refutation has a higher incarnation, and a death is final:
peers have dropped that life's leases and streams. A later epoch beats everything of an earlier one.
The card's version is the member's own counter and grows independently. So records form a
semilattice: all nodes end with the same table, in any order of arrival and with any repetition.
This file knows no time and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.gossip.messages import MemberRecord
    from pdserve.ids import NodeId

__all__ = ["MemberTable", "RecordChange", "merge", "precedence"]


def precedence(record: MemberRecord) -> tuple[int, int, int, int]:
    """Sort key of a member's records: the stronger one wins."""
    if record.state.final:
        return record.epoch, 1, record.state, record.incarnation
    return record.epoch, 0, record.incarnation, record.state


def merge(a: MemberRecord, b: MemberRecord) -> MemberRecord:
    """The least record that is no less than either; both are of one member."""
    if a.epoch != b.epoch:
        return a if a.epoch > b.epoch else b
    strong, weak = (a, b) if precedence(a) >= precedence(b) else (b, a)
    card = max(a.card, b.card)
    # Both are fixed for an epoch. If a member breaks that rule, all nodes still choose alike.
    address, role = max((a.address, a.role), (b.address, b.role))
    if (strong.card, strong.address, strong.role) == (card, address, role):
        return strong
    if (weak.card, weak.address, weak.role) == (card, address, role) and precedence(
        weak
    ) == precedence(strong):
        return weak
    return msgspec.structs.replace(strong, card=card, address=address, role=role)


@dataclass(frozen=True, slots=True)
class RecordChange:
    """A change of the table; `old` is None for a new member."""

    old: MemberRecord | None
    new: MemberRecord

    @property
    def new_life(self) -> bool:
        return self.old is None or self.old.epoch != self.new.epoch

    @property
    def new_state(self) -> bool:
        return self.old is None or precedence(self.old) != precedence(self.new)


class MemberTable:
    """The newest record of every member; only `apply` and `forget` change it."""

    def __init__(self) -> None:
        self._records: dict[NodeId, MemberRecord] = {}
        self.present = 0
        """Members that are neither dead nor departed."""

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[MemberRecord]:
        return iter(self._records.values())

    def get(self, node: NodeId) -> MemberRecord | None:
        return self._records.get(node)

    def apply(self, record: MemberRecord) -> RecordChange | None:
        """Merges one record; returns the change, or None."""
        old = self._records.get(record.node)
        new = record if old is None else merge(old, record)
        if new == old:
            return None
        self._records[record.node] = new
        self.present += (not new.state.final) - (old is not None and not old.state.final)
        return RecordChange(old, new)

    def forget(self, node: NodeId) -> MemberRecord:
        """Removes a dead member. Raises `KeyError`; `ValueError` if it is not dead."""
        record = self._records[node]
        if not record.state.final:
            raise ValueError(f"{node} is not dead")
        del self._records[node]
        return record
