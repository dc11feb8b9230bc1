"""Converts KV blocks between an engine's own layout and the layout of pools and transfers.

    wire      [block][layer][k|v][head][token][dim]     what `transfer`, tiers and disks see
    inner     what the engine's kernels want: other orders, a pool per layer, k and v apart

An engine whose inner layout is the wire layout needs nothing of this. Another converts at its
boundary: from its pool into wire blocks before they are delivered, and back when they have arrived.

**The map.** A *plane* is the k, or the v, of one layer: (memory, offset of its beginning). Within a
plane, blocks, heads and tokens have fixed strides, and one token of one head is contiguous. So two
layouts differ in where planes begin and in three strides. One function of a number (`unit_of`,
`offset_of`) names every run of bytes that is contiguous at both ends, a *unit*.
`native/cuda/layout_map.hpp` is the same in C++, for the CPU twin and the CUDA kernel.

It knows no peers, no block pool and no engine. The caller owns both memories, and keeps others away
from the blocks meanwhile. Source and destination must not overlap.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve import accel
from pdserve.transfer.copy_plan import PlanError, heads_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Bytes
    from pdserve.messages.transfer import RankKvLayout

__all__ = [
    "AXES",
    "MAX_UNITS",
    "WIRE",
    "AxisWindow",
    "Conversion",
    "PlaneStrides",
    "StridedLayout",
    "Unit",
    "conversion",
    "convert",
    "convert_pure",
    "offset_of",
    "strided_layout",
    "unit_of",
    "wire_layout",
]

WIRE: Final = "block layer kv head token dim"
AXES: Final = frozenset(WIRE.split())
MAX_UNITS: Final = (1 << 31) - 1
"""Most units of one call: the map counts in 32 bits, which devices divide quickly."""


class PlaneStrides(NamedTuple):
    """Strides within the planes of one end, in bytes."""

    block: Bytes
    head: Bytes
    token: Bytes


class Unit(NamedTuple):
    """Coordinates of a run: `block` is an index into the lists of blocks, `plane` into the
    conversion's planes."""

    block: int
    plane: int
    head: int
    token: int


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """One rank's KV as it lies in memory. One token of one head, `dim` items, is contiguous."""

    layers: int
    """Layers on this rank; `heads` counts on this rank too."""
    heads: int
    tokens: int
    """Tokens per block."""
    row: Bytes
    """Bytes of one token of one head."""
    planes: tuple[tuple[int, Bytes], ...]
    """Memory and offset of (layer 0, k), (layer 0, v), (layer 1, k), …"""
    side: PlaneStrides

    @property
    def memories(self) -> int:
        """Number of memories."""
        return 1 + max(memory for memory, _ in self.planes)


def strided_layout(layout: RankKvLayout, axes: str, *, blocks: int) -> StridedLayout:
    """The layout of pools whose axes are in this order, densely.

    `axes` has the names of `WIRE`, outermost first. Without `layer`, there is a memory per layer;
    without `kv`, k and v are memories of their own; without both, the memories are (layer 0, k),
    (layer 0, v), (layer 1, k), …  `blocks` are those of a pool. Raises `PlanError`.

        block layer kv token head dim    one pool, tokens before heads
        block kv head token dim          a pool per layer
        block token head dim             k and v of every layer apart
        kv block token head dim          a pool per layer, k and v one after the other
    """
    names = axes.split()
    if len(set(names)) != len(names) or not AXES - {"layer", "kv"} <= set(names) <= AXES:
        raise PlanError(f"{axes!r} are not the axes of a pool")
    if names[-1] != "dim":
        raise PlanError(f"{axes!r}: a token of a head must be contiguous")
    row = layout.dim * layout.itemsize
    sizes = {
        "block": blocks,
        "layer": layout.layers,
        "kv": 2,
        "head": len(heads_of(layout)),
        "token": layout.tokens,
    }
    apart = {
        name: row * math.prod(sizes[inside] for inside in names[place + 1 : -1])
        for place, name in enumerate(names[:-1])
    }
    return StridedLayout(
        layers=layout.layers,
        heads=sizes["head"],
        tokens=layout.tokens,
        row=row,
        planes=tuple(_plane(apart, layer, kv) for layer in range(layout.layers) for kv in (0, 1)),
        side=PlaneStrides(apart["block"], apart["head"], apart["token"]),
    )


def _plane(apart: dict[str, Bytes], layer: int, kv: int) -> tuple[int, Bytes]:
    """What has no axis chooses the memory, what has one the offset."""
    memory, offset = 0, 0
    if "layer" in apart:
        offset += layer * apart["layer"]
    else:
        memory += layer * (1 if "kv" in apart else 2)
    if "kv" in apart:
        offset += kv * apart["kv"]
    else:
        memory += kv
    return memory, offset


def wire_layout(layout: RankKvLayout) -> StridedLayout:
    """The layout of pools and transfers, for any number of blocks."""
    return strided_layout(layout, WIRE, blocks=1)


# ------------------------------------------------------------------------------ conversion plans


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is common to all blocks of a conversion from one layout to another."""

    heads: int
    """Heads in a unit's coordinates, as `tokens`: 1 where the rest is contiguous at both ends."""
    tokens: int
    run: Bytes
    """Bytes of one unit."""
    source: PlaneStrides
    destination: PlaneStrides
    source_planes: tuple[tuple[int, Bytes], ...]
    destination_planes: tuple[tuple[int, Bytes], ...]

    @property
    def units(self) -> int:
        """Units per block."""
        return len(self.source_planes) * self.heads * self.tokens

    @property
    def block_bytes(self) -> Bytes:
        """Bytes copied per block."""
        return self.units * self.run

    def numbers(self) -> array[int]:
        """The numbers that native code and kernels take."""
        extents = (len(self.source_planes), self.heads, self.tokens, self.run)
        return array("q", (*extents, *self.source, *self.destination))


def unit_of(plan: Conversion, index: int) -> Unit:
    """The coordinates of unit `number`; units are numbered block by block."""
    index, token = divmod(index, plan.tokens)
    index, head = divmod(index, plan.heads)
    block, plane = divmod(index, len(plan.source_planes))
    return Unit(block, plane, head, token)


def offset_of(side: PlaneStrides, block: int, unit: Unit) -> Bytes:
    """Offset from a plane's beginning; `block` is the block id for `unit.block`."""
    return block * side.block + unit.head * side.head + unit.token * side.token


class AxisWindow(NamedTuple):
    """A range of layers, or of heads: `width` of them, from `source` on at the source and
    `destination` on at the destination, both counted on their own rank."""

    source: int
    destination: int
    width: int


@lru_cache(maxsize=1024)
def conversion(
    source: StridedLayout,
    destination: StridedLayout,
    layers: AxisWindow | None = None,
    heads: AxisWindow | None = None,
) -> Conversion:
    """Plan how blocks of one layout become blocks of the other; without windows, all layers and
    heads. Errors: `PlanError` for layouts that do not fit."""
    for name in ("tokens", "row"):
        ours, theirs = getattr(source, name), getattr(destination, name)
        if ours != theirs:
            raise PlanError(f"{name} differ: {ours} at the source, {theirs} at the destination")
    layers = _within("layers", layers, source.layers, destination.layers)
    heads = _within("heads", heads, source.heads, destination.heads)
    plan = Conversion(
        heads=heads.width,
        tokens=source.tokens,
        run=source.row,
        source=source.side,
        destination=destination.side,
        source_planes=_planes(source, layers.source, layers.width, heads.source),
        destination_planes=_planes(
            destination, layers.destination, layers.width, heads.destination
        ),
    )
    return _merged(plan)


def _within(name: str, window: AxisWindow | None, ours: int, theirs: int) -> AxisWindow:
    """A window that both ends have."""
    if window is None:
        if ours != theirs:
            raise PlanError(f"{ours} {name} at the source, {theirs} at the destination")
        return AxisWindow(0, 0, ours)
    ends = ((window.source, ours), (window.destination, theirs))
    if window.width < 1 or any(at < 0 or at + window.width > size for at, size in ends):
        raise PlanError(f"{window} of {ours} {name} at the source, {theirs} at the destination")
    return window


def _planes(
    layout: StridedLayout, first: int, count: int, head: int
) -> tuple[tuple[int, Bytes], ...]:
    """Returns the planes of `count` layers from `first` on, each beginning at `head`."""
    own = layout.planes[2 * first : 2 * (first + count)]
    return tuple((memory, offset + head * layout.side.head) for memory, offset in own)


def _merged(plan: Conversion) -> Conversion:
    """Returns a plan for the same bytes in the longest runs: it joins tokens, then heads, then
    planes."""
    heads, tokens, run = plan.heads, plan.tokens, plan.run
    sides = (plan.source, plan.destination)
    if tokens == 1 or all(side.token == run for side in sides):
        run, tokens = run * tokens, 1
        if heads == 1 or all(side.head == run for side in sides):
            run, heads = run * heads, 1
    ends = (plan.source_planes, plan.destination_planes)
    together = 1
    if heads == tokens == 1:
        ways = (len(plan.source_planes), 2)
        together = next((n for n in ways if all(_dense(end, n, run) for end in ends)), 1)
    return Conversion(
        heads=heads,
        tokens=tokens,
        run=run * together,
        source=plan.source,
        destination=plan.destination,
        source_planes=plan.source_planes[::together],
        destination_planes=plan.destination_planes[::together],
    )


def _dense(planes: tuple[tuple[int, Bytes], ...], together: int, run: Bytes) -> bool:
    """Do each so many planes follow each other without a gap?"""
    return all(
        planes[n] == (planes[n - 1][0], planes[n - 1][1] + run)
        for n in range(len(planes))
        if n % together
    )


# ------------------------------------------------------------------------------ conversion


def convert(
    plan: Conversion,
    destination: Sequence[memoryview],
    source: Sequence[memoryview],
    destination_blocks: Sequence[int],
    source_blocks: Sequence[int],
    units: range | None = None,
) -> Bytes:
    """Convert block `source_blocks[i]` to block `destination_blocks[i]`, for every i; returns the
    bytes copied. Call it in a thread: it takes as long as copying does.

    `units`: only this range, of `len(source_blocks) * plan.units`, so that a caller can work in
    chunks. Errors: ValueError, before anything is copied, for a block outside of its memory, and
    for more than `MAX_UNITS`.
    """
    total = len(source_blocks) * plan.units
    units = range(total) if units is None else units
    if units.step != 1:
        raise ValueError("units are converted one after the other")
    return _convert(plan, destination, source, destination_blocks, source_blocks, units)


def convert_pure(
    plan: Conversion,
    destination: Sequence[memoryview],
    source: Sequence[memoryview],
    destination_blocks: Sequence[int],
    source_blocks: Sequence[int],
    units: range,
) -> Bytes:
    """Pure-Python version of `convert`."""
    if len(source_blocks) != len(destination_blocks):
        raise ValueError("as many destinations as sources")
    _check(plan, plan.destination, plan.destination_planes, destination, destination_blocks)
    _check(plan, plan.source, plan.source_planes, source, source_blocks)
    total = len(source_blocks) * plan.units
    if total > MAX_UNITS:
        raise ValueError("more than 2^31 units: convert fewer blocks")
    if units.start < 0 or units.stop > total:
        raise ValueError("there are no such units")
    for index in units:
        unit = unit_of(plan, index)
        memory, to = plan.destination_planes[unit.plane]
        to += offset_of(plan.destination, destination_blocks[unit.block], unit)
        origin, from_ = plan.source_planes[unit.plane]
        from_ += offset_of(plan.source, source_blocks[unit.block], unit)
        destination[memory][to : to + plan.run] = source[origin][from_ : from_ + plan.run]
    return len(units) * plan.run


def _check(
    plan: Conversion,
    side: PlaneStrides,
    planes: Sequence[tuple[int, Bytes]],
    memories: Sequence[memoryview],
    blocks: Sequence[int],
) -> None:
    """The farthest byte of any unit is in its memory."""
    if not blocks:
        return
    if min(blocks) < 0:
        raise ValueError("there is no block below 0")
    last = Unit(0, 0, plan.heads - 1, plan.tokens - 1)
    reach = offset_of(side, max(blocks), last) + plan.run
    for memory, offset in planes:
        if not 0 <= memory < len(memories):
            raise ValueError("a plane is in no memory")
        if offset + reach > len(memories[memory]):
            raise ValueError("a block leaves its memory")


def _convert_native(
    plan: Conversion,
    destination: Sequence[memoryview],
    source: Sequence[memoryview],
    destination_blocks: Sequence[int],
    source_blocks: Sequence[int],
    units: range,
) -> Bytes:
    return accel.native.convert_layout(
        plan.numbers(),
        destination,
        source,
        array("q", [n for plane in plan.destination_planes for n in plane]),
        array("q", [n for plane in plan.source_planes for n in plane]),
        array("q", destination_blocks),
        array("q", source_blocks),
        units.start,
        len(units),
    )


_convert = _convert_native if accel.NATIVE else convert_pure
