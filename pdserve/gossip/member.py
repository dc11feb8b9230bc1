"""Which of two records of a member holds, and the table that applies it.

Within one epoch, from weakest to strongest:

    ALIVE 0  <  SUSPECT 0  <  ALIVE 1  <  SUSPECT 1  <  ...  <  DEAD  <  LEFT

A suspicion beats the word it doubts, a refutation is a higher word, and no word beats a death:
peers have dropped that life's leases and streams, so it may not come back. A later epoch beats
everything of an earlier one. The card's version is a counter of the member's own and grows beside
all this. So records form a semilattice: in whatever order and however often they arrive, everybody
ends with the same table. It knows no time and sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.gossip.messages import Record
    from pdserve.ids import NodeId

__all__ = ["Change", "Members", "merge", "precedence"]


def precedence(record: Record) -> tuple[int, int, int, int]:
    """Orders what records of one member say of its life."""
    if record.state.final:
        return record.epoch, 1, record.state, record.incarnation
    return record.epoch, 0, record.incarnation, record.state


def merge(a: Record, b: Record) -> Record:
    """The least record that is no less than either; both are of one member."""
    if a.epoch != b.epoch:
        return a if a.epoch > b.epoch else b
    strong, weak = (a, b) if precedence(a) >= precedence(b) else (b, a)
    card = max(a.card, b.card)
    # Fixed for an epoch; should a member break that, everybody still chooses alike.
    address, role = max((a.address, a.role), (b.address, b.role))
    if (strong.card, strong.address, strong.role) == (card, address, role):
        return strong
    if (weak.card, weak.address, weak.role) == (card, address, role) and precedence(
        weak
    ) == precedence(strong):
        return weak
    return msgspec.structs.replace(strong, card=card, address=address, role=role)


@dataclass(frozen=True, slots=True)
class Change:
    """The table moved: `old` is None for a member never heard of."""

    old: Record | None
    new: Record

    @property
    def new_life(self) -> bool:
        return self.old is None or self.old.epoch != self.new.epoch

    @property
    def new_state(self) -> bool:
        return self.old is None or precedence(self.old) != precedence(self.new)


class Members:
    """The newest record of every member; only `apply` and `forget` change it."""

    def __init__(self) -> None:
        self._records: dict[NodeId, Record] = {}
        self.present = 0
        """Members that are neither dead nor gone."""

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def get(self, node: NodeId) -> Record | None:
        return self._records.get(node)

    def apply(self, record: Record) -> Change | None:
        """Merge one record; None if it says nothing new."""
        old = self._records.get(record.node)
        new = record if old is None else merge(old, record)
        if new == old:
            return None
        self._records[record.node] = new
        self.present += (not new.state.final) - (old is not None and not old.state.final)
        return Change(old, new)

    def forget(self, node: NodeId) -> Record:
        """Remove a dead member. Raises `KeyError`; `ValueError` if it is not dead."""
        record = self._records[node]
        if not record.state.final:
            raise ValueError(f"{node} is not dead")
        del self._records[node]
        return record
