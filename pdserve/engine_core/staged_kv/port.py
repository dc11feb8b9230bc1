"""Defines the port of an engine that schedules itself and exchanges KV by staging blocks.

    decode side                                     prefill side
    hold_prefix     keep cached blocks              prefill_staged  compute a prompt and copy its
    hold_frames     keep frames of the host tier                    blocks into staging blocks
    load_staged     start a request whose KV is     copied(...)     leading tokens are there now
                    in frames and staging blocks    let_go(...)     no copy into the staging blocks
    let_go(...)     they are not read any more                      is under way any more

`StagedTransfers` calls the engine, in the core's thread; the engine calls `copied` and `let_go` of
it from `advance` or `drop`. Each start is followed by exactly one `let_go`, also after `drop`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.tiers import CachedSource

__all__ = ["HeldFrames", "StagedBlocks", "StagedEngine"]


@dataclass(frozen=True, slots=True)
class StagedBlocks:
    """The staging blocks of one sequence."""

    first: int
    """The sequence's block that `slots[0]` stands for; the blocks before it are not staged."""
    slots: tuple[int, ...]
    """Staging blocks, in the sequence's order; before them, frames that are held for it."""
    tokens: int
    """Tokens of the sequence, from its start to the end of the last staged block's content."""


@dataclass(frozen=True, slots=True)
class HeldFrames:
    """Frames of the host tier that are held for one sequence."""

    blocks: tuple[int, ...] = ()
    """Blocks of the region, in the sequence's order."""
    sources: tuple[CachedSource, ...] = ()
    """The tiers that they are of."""


class StagedEngine(Protocol):
    """What `StagedTransfers` needs of an engine. No method waits."""

    def add(self, handle: int, request: GenerateRequest) -> None:
        """Take an ordinary request, as `SelfSchedulingCore.add`."""
        ...

    def cached_blocks(self, request: GenerateRequest) -> int:
        """Leading blocks of the request in the engine's prefix cache now; never the block with its
        last token."""
        ...

    def hold_prefix(self, request: GenerateRequest) -> list[int]:
        """Take a reference to those blocks, so that they are not evicted; returns the engine's own
        ids, in order. May hold fewer, to keep blocks for running sequences."""
        ...

    def release_prefix(self, blocks: Sequence[int]) -> None:
        """Give back the references of `hold_prefix`."""
        ...

    def bring_frames(self, request: GenerateRequest) -> frozenset[bytes]:
        """Begin to read to the host what the disk has of the request behind its cached blocks.
        Returns names of what is read, for `hold_frames`."""
        ...

    def hold_frames(
        self, request: GenerateRequest, first: int, read: Collection[bytes]
    ) -> HeldFrames:
        """Hold what the host tier has of the request from block `first` on; never the block with
        its last token. `read`: from `bring_frames`."""
        ...

    def release_frames(self, blocks: Sequence[int]) -> None:
        """Give back blocks of `hold_frames`."""
        ...

    def loaded_frames(self, sources: Sequence[CachedSource]) -> None:
        """The KV of so many tokens was loaded from frames."""
        ...

    def load_staged(self, handle: int, request: GenerateRequest, blocks: StagedBlocks) -> None:
        """Take a request. The KV of its first live choice is in its held prefix, frames and staging
        blocks: the engine copies it and computes only the last token. What it cannot copy, it
        computes. Raises as `add`; `let_go` does not follow then."""
        ...

    def prefill_staged(self, handle: int, request: GenerateRequest, blocks: StagedBlocks) -> None:
        """Take a request of one choice and one token, whose deltas are reported as usual. Its
        blocks are copied into staging as they are computed. Raises as `add`; `let_go` does not
        follow then."""
        ...
