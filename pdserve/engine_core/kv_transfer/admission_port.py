"""Defines what `KvReceiver` needs of the part that admits prompts which other workers prefill.

There are two implementations. `Scheduler` owns the KV of its engine: the blocks that a peer fills
become the sequence's own. `StagedAdmission` belongs to an engine that schedules itself: a peer
fills staging blocks, from which the engine loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.kv_transfer.remote_prefill import RemotePrefillState
    from pdserve.engine_core.scheduler.scheduler_state import SchedulerLimits
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import Seconds
    from pdserve.messages.handoff import Handoff
    from pdserve.messages.request import TokenDelta

__all__ = ["RemoteAdmissionPort"]


class RemoteAdmissionPort(Protocol):
    """Reserves room for prompts that a peer prefills, gives it blocks, and starts to decode."""

    limits: SchedulerLimits

    def remote(self, handle: int) -> RemotePrefillState | None:
        """The remote state of a submission; None if no other worker is to prefill it."""
        ...

    def stem_of(self, handle: int) -> Sequence:
        """The first live choice of a submission."""
        ...

    @property
    def may_reserve(self) -> bool:
        """Return whether `reserve` may make a reservation now."""
        ...

    def reserve(self, now: Seconds) -> list[tuple[int, int]]:
        """Make the reservations that fit; returns each handle with its cached tokens."""
        ...

    def bind(self, handle: int) -> tuple[list[int], list[int]] | None:
        """Hold the cached leading blocks and allocate fresh ones for the other tokens: (cached,
        fresh). None if too few are free now."""
        ...

    def unbind(self, handle: int) -> None:
        """The fresh blocks of `bind` have been given back: reserve the room again."""
        ...

    def release_shared(self, blocks: Seq[int]) -> None:
        """Release the cached blocks that `bind` has returned."""
        ...

    def postpone(self, handle: int) -> None:
        """End a reservation that found no blocks; it is made again when there are some."""
        ...

    def prefill_here(self, handle: int) -> None:
        """End the reservation; this engine computes the prompt."""
        ...

    def activate(
        self, handle: int, shared: list[int], fresh: list[int], handoff: Handoff, now: Seconds
    ) -> list[TokenDelta]:
        """A peer has filled the fresh blocks of `bind`: go on from there. Returns the deltas that
        are known at once."""
        ...
