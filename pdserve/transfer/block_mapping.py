"""Maps a ticket and a part between the KV regions of two nodes to runs of bytes to copy.

All ranks of a node number their blocks alike, so one list of block ids serves every pair of ranks.
Pure; created once for each path. Refuses two nodes with incompatible layouts before there is a
path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.transfer.copy_plan import (
    PlanError,
    align_blocks,
    bind_blocks,
    blocks_for,
    check_fit,
    plan_block,
    rank_pairs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Bytes
    from pdserve.messages.transfer import RegionCard
    from pdserve.transfer.copy_plan import BlockCopyPlan, CopyRuns, Layers

__all__ = ["BlockMapper", "BlockMapping", "RegionCopy", "check_blocks"]

_MAX_PLANS: Final = 256
"""Most groups of layers whose plans a path keeps."""


class RegionCopy(NamedTuple):
    """The runs to copy from one source region to one destination region, given by their indices."""

    source: int
    destination: int
    runs: CopyRuns


@dataclass(frozen=True, slots=True)
class BlockMapping:
    """The blocks of a part that the destination lacks: source block `blocks[i]` fills the ticket's
    block at `place + i`. Both ends compute it without the other's addresses."""

    place: int
    blocks: tuple[int, ...]
    names: bytes
    layers: Layers

    def part(self, first: int, count: int) -> BlockMapping:
        """So many of these blocks, without their hashes."""
        return BlockMapping(
            self.place + first, self.blocks[first : first + count], b"", self.layers
        )


class _Plans(NamedTuple):
    """How one block is copied, for some layers."""

    pairs: tuple[tuple[int, int, BlockCopyPlan], ...]
    """Regions of both, and what to copy between them."""
    size: Bytes


class BlockMapper:
    """Maps blocks between the regions of a source and of a destination."""

    def __init__(self, sources: Sequence[RegionCard], destinations: Sequence[RegionCard]) -> None:
        """Errors: `PlanError` if the layouts are incompatible."""
        if not sources or not destinations:
            raise PlanError("a node has no KV pool")
        self._sources = tuple(sources)
        self._destinations = tuple(destinations)
        for source in sources:
            for destination in destinations:
                check_fit(source.layout, destination.layout)
        self.pairs = rank_pairs(
            [card.layout for card in sources], [card.layout for card in destinations]
        )
        """Regions of both, by their places, that have bytes to exchange."""
        if not self.pairs:
            raise PlanError(
                "a rank of the destination holds layers or heads that no rank of the source has"
            )
        self._plans: dict[Layers, _Plans] = {}
        self._blocks = (_least(sources), _least(destinations))
        self.block_tokens = sources[0].layout.tokens

    def share(
        self,
        first_token: int,
        tokens: int,
        start: int,
        blocks: Sequence[int],
        layers: Layers,
        names: bytes = b"",
    ) -> BlockMapping:
        """The blocks that a part brings to a ticket. Errors: `PlanError`."""
        if names and len(names) != 16 * len(blocks):
            raise PlanError(f"{len(names)} bytes of block hashes for {len(blocks)} blocks")
        skip, place = align_blocks(first_token, tokens, self.block_tokens, start, len(blocks))
        return BlockMapping(place, tuple(blocks[skip:]), names[16 * skip :], layers)

    def moves(self, share: BlockMapping, destinations: Sequence[int]) -> list[RegionCopy]:
        """The runs to copy for a mapping; `destinations` are all blocks of the ticket. Errors:
        `PlanError`."""
        self.check(share, destinations)
        count = len(share.blocks)
        theirs = destinations[share.place : share.place + count]
        if not count:
            return []
        return [
            RegionCopy(source, destination, bind_blocks(plan, share.blocks, theirs))
            for source, destination, plan in self._plans_of(share.layers).pairs
        ]

    def _plans_of(self, layers: Layers) -> _Plans:
        plans = self._plans.get(layers)
        if plans is None:
            if len(self._plans) >= _MAX_PLANS:  # peers choose the layers
                self._plans.clear()
            plans = self._plans[layers] = self._plan(layers)
        return plans

    def _plan(self, layers: Layers) -> _Plans:
        pairs = []
        for source, destination in self.pairs:
            ours, theirs = self._sources[source].layout, self._destinations[destination].layout
            plan = plan_block(ours, theirs, layers)
            if plan.spans:
                pairs.append((source, destination, plan))
        return _Plans(tuple(pairs), sum(plan.size for *_, plan in pairs))

    def check(self, share: BlockMapping, destinations: Sequence[int]) -> None:
        """Errors: `PlanError` if either end lacks one of these blocks."""
        check_blocks(share.blocks, self._blocks[0])
        check_blocks(destinations[share.place : share.place + len(share.blocks)], self._blocks[1])

    def size(self, share: BlockMapping) -> Bytes:
        """Bytes that a mapping brings to the destination."""
        return len(share.blocks) * self._plans_of(share.layers).size

    def check_order(self, first_token: int, tokens: int, blocks: Sequence[int]) -> None:
        """Errors: `PlanError` if these blocks cannot hold these tokens."""
        if first_token < 0 or first_token % self.block_tokens:
            raise PlanError(f"token {first_token} is not the first of a block")
        if tokens <= 0 or len(blocks) != blocks_for(tokens, self.block_tokens):
            raise PlanError(f"{len(blocks)} blocks for {tokens} tokens")
        if len(set(blocks)) != len(blocks):
            raise PlanError("a block is listed twice")
        check_blocks(blocks, self._blocks[1])


def check_blocks(blocks: Sequence[int], count: int) -> None:
    """Errors: `PlanError` unless all these blocks are in a pool of `count`."""
    if blocks and not (min(blocks) >= 0 and max(blocks) < count):
        raise PlanError(f"the pool has blocks 0 to {count - 1}, not {min(blocks)} to {max(blocks)}")


def _least(cards: Sequence[RegionCard]) -> int:
    return min(card.blocks for card in cards)
