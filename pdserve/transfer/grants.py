"""Tracks a node's grants: the slot, generation and blocks of each.

A slot is a number that fits into a notification. Slots are reused in turn, each time with the next
generation, so that a notification of an earlier use is recognised. A block belongs to at most one
grant that is not closed. Pure; one transport owns it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from pdserve.errors import Overloaded
from pdserve.messages.transfer import MAX_SLOTS, TransferTicket
from pdserve.transfer.copy_plan import PlanError
from pdserve.transfer.rdma.imm_data import IMM_GENERATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Epoch, Seconds
    from pdserve.transfer.base import GrantSink, GrantSpec
    from pdserve.transfer.path_base import PathBase

__all__ = ["GrantEntry", "GrantTable"]

_GENERATIONS: Final = 1 << 32

State = Literal["open", "failed", "stopping", "closed"]


@dataclass(slots=True, eq=False)
class GrantEntry:
    """One grant and its state; implements `base.Grant`.

    open       parts arrive and are reported to the sink
    failed     the sink has been told; bytes may still be under way
    stopping   the owner wants no more; bytes may still be under way
    closed     finished or fenced
    """

    ticket: TransferTicket
    path: PathBase
    sink: GrantSink
    state: State = "open"
    parts: set[int] = field(default_factory=set)
    """Numbers of the parts that have arrived."""
    counts: dict[int, int] = field(default_factory=dict)
    """For a part that arrives in several pieces: how many of them have arrived."""

    @property
    def closed(self) -> bool:
        return self.state == "closed"

    def finish(self) -> None:
        self.path.finish(self)

    async def revoke(self, *, timeout: Seconds) -> None:
        await self.path.revoke(self, timeout)


class GrantTable:
    """Assigns slots to one node's grants. Holds at most `MAX_SLOTS`; owned by one transport."""

    def __init__(self, epoch: Epoch, slots: int = MAX_SLOTS) -> None:
        if not 0 < slots <= MAX_SLOTS:
            raise ValueError(f"1 to {MAX_SLOTS} slots")
        self.epoch = epoch
        self._free = deque(range(slots))
        self._generations = [0] * slots
        self._current: dict[int, GrantEntry] = {}
        self._blocks: set[int] = set()

    def __len__(self) -> int:
        return len(self._current)

    def open(self, path: PathBase, order: GrantSpec, sink: GrantSink) -> GrantEntry:
        """Open a grant in a free slot. Errors: `Overloaded` without a free slot, `PlanError` for a
        block of another open grant."""
        if not self._free:
            raise Overloaded("every transfer slot is taken", retry_after=1.0)
        shared = self._blocks.intersection(order.blocks)
        if shared:
            raise PlanError(f"block {min(shared)} belongs to another grant")
        slot = self._free.popleft()
        self._generations[slot] = (self._generations[slot] + 1) % _GENERATIONS
        ticket = TransferTicket(
            transfer=order.transfer,
            attempt=order.attempt,
            epoch=self.epoch,
            slot=slot,
            generation=self._generations[slot],
            first_token=order.first_token,
            tokens=order.tokens,
            blocks=tuple(order.blocks),
            path=path.remote,
        )
        granted = GrantEntry(ticket, path, sink)
        self._current[slot] = granted
        self._blocks.update(ticket.blocks)
        return granted

    def find(
        self, path: PathBase, slot: int, generation: int, *, exact: bool = False
    ) -> GrantEntry | None:
        """The open grant that a notification names, or None. Four bits of the generation are
        compared, or all of it if `exact`."""
        granted = self._current.get(slot)
        if granted is None or granted.path is not path:
            return None
        same = (granted.ticket.generation - generation) % (
            _GENERATIONS if exact else IMM_GENERATIONS
        ) == 0
        return granted if same else None

    def of(self, path: PathBase) -> list[GrantEntry]:
        """All grants of a path that are not closed."""
        return [granted for granted in self._current.values() if granted.path is path]

    def close(self, granted: GrantEntry) -> None:
        """Close a grant: its blocks are the owner's again, and its slot is reused last."""
        if granted.state == "closed":
            return
        granted.state = "closed"
        del self._current[granted.ticket.slot]
        self._blocks.difference_update(granted.ticket.blocks)
        self._free.append(granted.ticket.slot)

    def __iter__(self) -> Iterator[GrantEntry]:
        return iter(list(self._current.values()))
