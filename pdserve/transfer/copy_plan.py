"""Which bytes go where: from blocks, layers and two layouts to runs of bytes.

A layout is one rank's pool: blocks of [layer][k|v][head][token][dim]. So all of a block is one run,
some layers of it are one run, and some of its heads are one run per (layer, k|v). Unequal
tensor-parallel sizes need no transposition, only the right addresses: for H heads, a source rank
that holds the heads [s, s + n) and a destination rank that holds [t, t + m) share an interval of
heads, and its bytes are copied.

    p <= H   rank r holds H / p heads, from r * H / p on
    p > H    rank r holds head r * H / p; R = p / H ranks hold the same one. They share the work: by
             layer when the destination's heads are not replicated, else each serves its own ranks

A `BlockCopyPlan` is that for one block, and depends on nothing but the two layouts and the layers:
it is made once and kept. `bind_blocks` puts block ids into it. Runs come as three arrays of int64,
which C code and numpy read in place: the size of a work-request table is known before it is filled.

It knows no memory, no peers and no requests. What does not fit raises `PlanError`; nothing is ever
rounded, cut or guessed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from pdserve import accel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.ids import Bytes
    from pdserve.messages.transfer import RankKvLayout

__all__ = [
    "MAX_RUNS",
    "BlockCopyPlan",
    "CopyRuns",
    "CopySpan",
    "Layers",
    "PlanError",
    "align_blocks",
    "bind_blocks",
    "bind_blocks_pure",
    "block_bytes",
    "blocks_for",
    "check_fit",
    "heads_of",
    "heads_on",
    "layer_groups",
    "plan_block",
    "rank_pairs",
    "split_runs",
    "valid_tokens",
]

MAX_RUNS: Final = 1 << 22
"""Most runs of one binding. With more, the layouts fit so badly that copying run by run is too
slow."""

Layers = tuple[int, int]
"""A half-open range of the model's layers, counted over all ranks."""


class PlanError(ValueError):
    """The two ends do not fit together; the text says why."""


# ------------------------------------------------------------------------------ ranks and heads


def heads_of(layout: RankKvLayout) -> range:
    """The range of the model's KV heads that this rank holds. Errors: `PlanError`."""
    return heads_on(layout.heads, layout.tp, layout.rank)


def heads_on(heads: int, size: int, rank: int) -> range:
    """The range of `heads` KV heads that one of `size` ranks holds. With more ranks than heads,
    several ranks hold the same one. Errors: `PlanError`."""
    if rank >= size:
        raise PlanError(f"there is no rank {rank} of {size}")
    if size <= heads:
        if heads % size:
            raise PlanError(f"{heads} heads cannot be divided by {size} ranks")
        each = heads // size
        return range(rank * each, (rank + 1) * each)
    if size % heads:
        raise PlanError(f"{size} ranks cannot share {heads} heads evenly")
    head = rank * heads // size
    return range(head, head + 1)


def block_bytes(layout: RankKvLayout) -> Bytes:
    """Bytes of one block on this rank."""
    return layout.layers * _layer_bytes(layout)


def check_fit(source: RankKvLayout, destination: RankKvLayout) -> None:
    """Errors: `PlanError` unless both ends store a token's KV alike."""
    for field in ("content", "order", "heads", "tokens", "dim", "itemsize"):
        ours, theirs = getattr(source, field), getattr(destination, field)
        if ours != theirs:
            raise PlanError(f"{field} differs: {ours!r} at the source, {theirs!r} here")
    heads_of(source)
    heads_of(destination)


def rank_pairs(
    sources: Sequence[RankKvLayout], destinations: Sequence[RankKvLayout]
) -> list[tuple[int, int]]:
    """Pairs of (source, destination) ranks, by index, that have bytes to exchange. Errors:
    `PlanError`."""
    return [
        (s, d)
        for s, source in enumerate(sources)
        for d, destination in enumerate(destinations)
        if plan_block(source, destination, _all_layers(source)).spans
    ]


def _all_layers(layout: RankKvLayout) -> Layers:
    return (layout.first_layer, layout.first_layer + layout.layers)


def _head_bytes(layout: RankKvLayout) -> Bytes:
    return layout.tokens * layout.dim * layout.itemsize


def _layer_bytes(layout: RankKvLayout) -> Bytes:
    return 2 * len(heads_of(layout)) * _head_bytes(layout)


# ------------------------------------------------------------------------------ one block


@dataclass(frozen=True, slots=True)
class CopySpan:
    """A run of bytes inside a block."""

    source: Bytes
    destination: Bytes
    length: Bytes


@dataclass(frozen=True, slots=True)
class BlockCopyPlan:
    """The bytes that one block of the source has for one block of the destination."""

    spans: tuple[CopySpan, ...]
    source_block: Bytes
    destination_block: Bytes

    @property
    def whole(self) -> bool:
        """True if all of a block is copied, so that neighbouring blocks become one run."""
        return self.spans == (CopySpan(0, 0, self.source_block),) and (
            self.source_block == self.destination_block
        )

    @property
    def size(self) -> Bytes:
        """Bytes copied for one block."""
        return sum(span.length for span in self.spans)


@lru_cache(maxsize=4096)
def plan_block(source: RankKvLayout, destination: RankKvLayout, layers: Layers) -> BlockCopyPlan:
    """The spans to copy for one block, for those of `layers` that both ends hold. They ascend at
    both ends; none: this pair of ranks has nothing to exchange. Errors: `PlanError`."""
    check_fit(source, destination)
    ours, theirs = heads_of(source), heads_of(destination)
    first, last = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
    spans: list[CopySpan] = []
    if first < last:
        size = (last - first) * _head_bytes(source)
        for layer in _layers_to_send(source, destination, layers):
            for kv in (0, 1):
                here = _offset(source, layer, kv, first - ours.start)
                spans.append(
                    CopySpan(here, _offset(destination, layer, kv, first - theirs.start), size)
                )
    return BlockCopyPlan(tuple(_merged(spans)), block_bytes(source), block_bytes(destination))


def _layers_to_send(
    source: RankKvLayout, destination: RankKvLayout, layers: Layers
) -> Iterator[int]:
    """The layers that both ends hold and this rank sends; replicas of a head divide them."""
    first = max(layers[0], source.first_layer, destination.first_layer)
    last = min(layers[1], _all_layers(source)[1], _all_layers(destination)[1])
    copies = max(1, source.tp // source.heads)
    mine = source.rank % copies
    if destination.tp > destination.heads:
        return iter(range(first, last) if destination.rank % copies == mine else ())
    return (layer for layer in range(first, last) if layer % copies == mine)


def _offset(layout: RankKvLayout, layer: int, kv: int, head: int) -> Bytes:
    """Offset of a head inside a block; `layer` counts over all ranks, `head` on this one."""
    row = (layer - layout.first_layer) * 2 + kv
    return (row * len(heads_of(layout)) + head) * _head_bytes(layout)


def _merged(spans: list[CopySpan]) -> Iterator[CopySpan]:
    """Merges spans that are neighbours at both ends."""
    last: CopySpan | None = None
    for span in spans:
        if last is None:
            last = span
        elif (
            last.source + last.length == span.source
            and last.destination + last.length == span.destination
        ):
            last = CopySpan(last.source, last.destination, last.length + span.length)
        else:
            yield last
            last = span
    if last is not None:
        yield last


# ------------------------------------------------------------------------------ many blocks


@dataclass(frozen=True, slots=True)
class CopyRuns:
    """Runs of bytes between two regions, as arrays of int64. Offsets count from each region's
    beginning."""

    source: array[int]
    destination: array[int]
    length: array[int]

    def __len__(self) -> int:
        return len(self.length)

    def __iter__(self) -> Iterator[tuple[Bytes, Bytes, Bytes]]:
        return zip(self.source, self.destination, self.length, strict=True)

    @property
    def size(self) -> Bytes:
        """Bytes of all runs."""
        return sum(self.length)


def bind_blocks(plan: BlockCopyPlan, source: Sequence[int], destination: Sequence[int]) -> CopyRuns:
    """The runs that copy block `source[i]` to block `destination[i]`, for every i.

    Whole blocks whose ids ascend together at both ends become one run. Errors: `PlanError`.
    """
    if len(source) != len(destination):
        raise PlanError(f"{len(source)} blocks cannot fill {len(destination)}")
    if len(source) * len(plan.spans) > MAX_RUNS:
        raise PlanError(f"{len(source)} blocks would be more than {MAX_RUNS} runs of bytes")
    return _bind(plan, source, destination)


def bind_blocks_pure(
    plan: BlockCopyPlan, source: Sequence[int], destination: Sequence[int]
) -> CopyRuns:
    """Pure-Python version of `bind_blocks`, for lists that are already checked."""
    here, there = plan.source_block, plan.destination_block
    if plan.whole:
        return _bind_whole(here, source, destination)
    spans = plan.spans
    return CopyRuns(
        array("q", [block * here + span.source for block in source for span in spans]),
        array("q", [block * there + span.destination for block in destination for span in spans]),
        array("q", [span.length for span in spans]) * len(source),
    )


def _bind_native(
    plan: BlockCopyPlan, source: Sequence[int], destination: Sequence[int]
) -> CopyRuns:
    spans = array("q", [n for s in plan.spans for n in (s.source, s.destination, s.length)])
    room = array("q", (0,)) * (len(source) * len(plan.spans))
    runs = CopyRuns(room, room[:], room[:])
    count = accel.native.bind_runs(
        array("q", source),
        array("q", destination),
        spans,
        plan.source_block,
        plan.destination_block,
        runs.source,
        runs.destination,
        runs.length,
    )
    for column in (runs.source, runs.destination, runs.length):
        del column[count:]
    return runs


_bind = _bind_native if accel.NATIVE else bind_blocks_pure


def _bind_whole(size: Bytes, source: Sequence[int], destination: Sequence[int]) -> CopyRuns:
    """Runs of whole blocks; neighbours in both lists become one run."""
    count = len(source)
    if not count:
        return CopyRuns(array("q"), array("q"), array("q"))
    ours, theirs = pairwise(source), pairwise(destination)
    starts = [0]
    starts += [
        place
        for place, ((a, b), (c, d)) in enumerate(zip(ours, theirs, strict=True), 1)
        if b - a != 1 or d - c != 1
    ]
    return CopyRuns(
        array("q", [source[place] * size for place in starts]),
        array("q", [destination[place] * size for place in starts]),
        array("q", [(stop - start) * size for start, stop in pairwise([*starts, count])]),
    )


def split_runs(runs: CopyRuns, limit: Bytes) -> CopyRuns:
    """Splits into runs of at most `limit` bytes. Errors: `PlanError` beyond `MAX_RUNS`."""
    if limit <= 0:
        raise ValueError("a run has at least one byte")
    if not runs.length or max(runs.length) <= limit:
        return runs
    parts = [
        (source + at, destination + at, min(limit, length - at))
        for source, destination, length in runs
        for at in range(0, length, limit)
    ]
    if len(parts) > MAX_RUNS:
        raise PlanError(f"more than {MAX_RUNS} runs of {limit} bytes")
    sources, destinations, lengths = zip(*parts, strict=True)
    return CopyRuns(array("q", sources), array("q", destinations), array("q", lengths))


# ------------------------------------------------------------------------------ tokens and layers


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Number of blocks that hold so many tokens."""
    return -(-tokens // block_tokens)


def valid_tokens(tokens: int, block_tokens: int, place: int) -> int:
    """Number of valid tokens in the block at this index; the last block may be partly filled.
    Errors: `PlanError`."""
    left = tokens - place * block_tokens
    if left <= 0 or place < 0:
        raise PlanError(f"{tokens} tokens do not reach the block at place {place}")
    return min(left, block_tokens)


def align_blocks(
    first_token: int, tokens: int, block_tokens: int, start: int, count: int
) -> tuple[int, int]:
    """Match `count` blocks of the source, from token `start` on, to the destination's blocks, which
    begin at `first_token`.

    Returns (source blocks to skip, destination index of the first one that is not skipped). Both
    lists count from the same token. Errors: `PlanError` for a position inside a block, or for
    blocks beyond the last token.
    """
    for name, value in (("the destination", first_token), ("the source", start)):
        if value < 0 or value % block_tokens:
            raise PlanError(f"{name} begins at token {value}, which is not the first of a block")
    shift = (start - first_token) // block_tokens
    skip = min(count, max(0, -shift))
    place = max(0, shift)
    if place + count - skip > blocks_for(tokens, block_tokens):
        raise PlanError(
            f"blocks up to token {start + count * block_tokens} for a destination that ends at "
            f"token {first_token + tokens}"
        )
    return skip, place


def layer_groups(layers: Layers, count: int) -> list[Layers]:
    """Split the layers, in order, into `count` groups of nearly equal size; fewer if there are
    fewer layers. Errors: `PlanError`."""
    first, last = layers
    if first >= last or count < 1:
        raise PlanError(f"layers {first} to {last} cannot be grouped")
    count = min(count, last - first)
    edges = [first + (last - first) * n // count for n in range(count + 1)]
    return list(pairwise(edges))
