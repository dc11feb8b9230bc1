"""Layout conversion against numpy's transposition: any two layouts, both twins, any units."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve import accel
from pdserve.kv.layout import (
    WIRE,
    AxisWindow,
    Conversion,
    PlaneStrides,
    StridedLayout,
    conversion,
    convert,
    convert_pure,
    strided_layout,
    wire_layout,
)
from pdserve.testing.kv_oracle import layouts
from pdserve.transfer.copy_plan import PlanError

if TYPE_CHECKING:
    from pdserve.messages.transfer import RankKvLayout

BLOCKS = 5
NAMES = WIRE.split()
BOTH = [convert_pure, convert] if accel.NATIVE else [convert_pure]

ORDERS = [
    WIRE,
    "block layer kv token head dim",
    "layer kv block token head dim",
    "layer kv block head token dim",
    "block head layer kv token dim",
    "block kv head token dim",
    "block kv token head dim",
    "kv block token head dim",
    "block token head dim",
    "block head token dim",
    "layer block head token dim",
]
"""What engines have, and some more."""


def cells_of(layout: RankKvLayout, random: Random) -> np.ndarray:
    """A pool in the wire's order, an axis each."""
    row = layout.dim * layout.itemsize
    shape = (BLOCKS, layout.layers, 2, layout.heads // layout.tp, layout.tokens, row)
    return np.frombuffer(random.randbytes(int(np.prod(shape))), np.uint8).reshape(shape).copy()


def pools_of(axes: str, cells: np.ndarray) -> list[bytearray]:
    """The memories that hold these cells, by definition: transposed and cut."""
    names = axes.split()
    apart = [name for name in ("layer", "kv") if name not in names]
    order = [NAMES.index(name) for name in apart + names]
    count = int(np.prod([cells.shape[NAMES.index(name)] for name in apart], dtype=int))
    whole = np.ascontiguousarray(cells.transpose(order)).reshape(count, -1)
    return [bytearray(part.tobytes()) for part in whole]


def run(twin, plan: Conversion, to, from_, there, here, units: range | None = None) -> int:
    if units is None:
        units = range(len(here) * plan.units)
    views = [[memoryview(memory) for memory in end] for end in (to, from_)]
    return twin(plan, *views, there, here, units)


def window(random: Random, size: int) -> AxisWindow:
    count = random.randint(1, size)
    return AxisWindow(random.randint(0, size - count), random.randint(0, size - count), count)


@given(st.data(), st.randoms(use_true_random=False))
def test_any_two_layouts(data: st.DataObject, random: Random) -> None:
    axes = data.draw(st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS)))
    (layout,) = layouts(data.draw(st.integers(1, 3)), 1, layers=data.draw(st.integers(1, 3)))
    ours, theirs = cells_of(layout, random), cells_of(layout, random)
    source, before = pools_of(axes[0], ours), pools_of(axes[1], theirs)
    count = data.draw(st.integers(0, BLOCKS))
    here, there = random.sample(range(BLOCKS), count), random.sample(range(BLOCKS), count)
    layers, heads = window(random, layout.layers), window(random, layout.heads)
    for a, b in zip(here, there, strict=True):
        for layer in range(layers.width):
            for head in range(heads.width):
                theirs[b, layers.destination + layer, :, heads.destination + head] = ours[
                    a, layers.source + layer, :, heads.source + head
                ]
    after = pools_of(axes[1], theirs)
    ends = [strided_layout(layout, order, blocks=BLOCKS) for order in axes]
    plan = conversion(ends[0], ends[1], layers, heads)
    total = count * plan.units
    low, high = sorted(random.choices(range(total + 1), k=2))
    for twin in BOTH:
        out = [memory[:] for memory in before]
        pieces = (range(high, total), range(low), range(low, high))
        size = sum(run(twin, plan, out, source, there, here, piece) for piece in pieces)
        assert out == after
        assert size == count * plan.block_bytes


@pytest.mark.parametrize(
    ("axes", "memories", "units", "run"),
    [
        (WIRE, 1, 1, 6 * 96),  # a block is one run
        ("block kv head token dim", 3, 3, 2 * 96),  # a layer is
        ("block head token dim", 6, 6, 96),  # k of a layer is
        ("layer kv block head token dim", 1, 6, 96),
        ("block head layer kv token dim", 1, 6 * 3, 32),  # a head is
        ("block kv token head dim", 3, 6 * 3 * 4, 8),  # a token of a head is
    ],
)
def test_runs_are_as_long_as_both_layouts_allow(
    axes: str, memories: int, units: int, run: int
) -> None:
    (layout,) = layouts(3, 1)
    inner = strided_layout(layout, axes, blocks=BLOCKS)
    for plan in (conversion(inner, wire_layout(layout)), conversion(wire_layout(layout), inner)):
        assert (inner.memories, plan.units, plan.run) == (memories, units, run)
        assert plan.block_bytes == 6 * 96


def test_a_rank_takes_its_heads_out_of_a_larger_one() -> None:
    random = Random(4)
    (whole,) = layouts(4, 1)
    second = layouts(4, 2)[1]
    ours = cells_of(whole, random)
    plan = conversion(
        strided_layout(whole, "block kv token head dim", blocks=BLOCKS),
        wire_layout(second),
        heads=AxisWindow(2, 0, 2),
    )
    for twin in BOTH:
        (out,) = pools_of(WIRE, np.zeros_like(cells_of(second, random)))
        run(twin, plan, [out], pools_of("block kv token head dim", ours), range(5), range(5))
        assert out == pools_of(WIRE, ours[:, :, :, 2:])[0]


@pytest.mark.parametrize(
    "axes",
    [
        "layer kv head token dim",
        "block layer kv head token",
        "block block head token dim",
        "block head dim token",
        "block head token dim page",
    ],
)
def test_what_is_no_pool_has_no_layout(axes: str) -> None:
    with pytest.raises(PlanError, match=r"axes|contiguous"):
        strided_layout(layouts(1, 1)[0], axes, blocks=1)


def test_layouts_that_do_not_fit_are_not_converted() -> None:
    one, other = layouts(2, 1)[0], layouts(2, 1, tokens=8)[0]
    with pytest.raises(PlanError, match="tokens differ: 4 at the source, 8"):
        conversion(wire_layout(one), wire_layout(other))
    with pytest.raises(PlanError, match="row differ"):
        conversion(wire_layout(one), wire_layout(layouts(2, 1, dim=8)[0]))
    with pytest.raises(PlanError, match="2 heads at the source, 1 at"):
        conversion(wire_layout(one), wire_layout(layouts(2, 2)[0]))
    with pytest.raises(PlanError, match="3 layers"):
        conversion(wire_layout(one), wire_layout(one), layers=AxisWindow(2, 0, 2))
    with pytest.raises(PlanError, match="2 heads"):
        conversion(wire_layout(one), wire_layout(one), heads=AxisWindow(0, 0, 0))


@pytest.mark.parametrize("twin", BOTH)
@pytest.mark.parametrize("wrong", ["block", "below", "memory", "plane", "units", "count"])
def test_what_leaves_its_memory_moves_nothing(twin, wrong: str) -> None:
    (layout,) = layouts(2, 1, layers=1)
    plan = conversion(strided_layout(layout, ORDERS[1], blocks=2), wire_layout(layout))
    size = plan.block_bytes
    there, here, units = [0, 1], [1, 0], range(2 * plan.units)
    source, out = bytearray(b"x" * 2 * size), bytearray(2 * size)
    if wrong == "block":
        there = [0, 2]
    elif wrong == "below":
        here = [0, -1]
    elif wrong == "memory":
        source = source[:-1]
    elif wrong == "plane":
        planes = ((1, 0), plan.source_planes[1])
        plan = Conversion(
            plan.heads,
            plan.tokens,
            plan.run,
            plan.source,
            plan.destination,
            planes,
            plan.destination_planes,
        )
    elif wrong == "units":
        units = range(1, 2 * plan.units + 1)
    else:
        here = [0]
    with pytest.raises(ValueError, match=r"leaves|below|no memory|no such|as many"):
        run(twin, plan, [out], [source], there, here, units)
    assert out == bytes(2 * size)


@pytest.mark.parametrize("twin", BOTH)
def test_absurd_distances_are_refused(twin) -> None:
    far = PlaneStrides(1 << 62, 1 << 62, 1 << 62)
    inner = StridedLayout(1, 3, 4, 8, ((0, 0), (0, 8)), far)
    plan = conversion(inner, inner)
    with pytest.raises(ValueError, match="leaves its memory"):
        run(twin, plan, [bytearray(64)], [bytearray(64)], [3], [3])


def test_more_units_than_the_map_can_count_are_refused() -> None:
    (layout,) = layouts(2, 1, layers=1 << 12, tokens=1 << 10, dim=1, itemsize=1)
    inner = strided_layout(layout, "block layer kv token head dim", blocks=1)
    plan = conversion(inner, wire_layout(layout))
    count = (1 << 31) // plan.units
    memory = bytearray(plan.block_bytes)
    for twin in BOTH:
        with pytest.raises(ValueError, match="2\\^31"):
            run(twin, plan, [memory], [memory], [0] * count, [0] * count, range(1))


@pytest.mark.skipif(not accel.NATIVE, reason="the extension is not built")
def test_the_native_twin_checks_what_python_does_not() -> None:
    (layout,) = layouts(2, 1, layers=1)
    plan = conversion(wire_layout(layout), wire_layout(layout))
    with pytest.raises(ValueError, match="one after the other"):
        convert(plan, [], [], [], [], range(0, 10, 2))
    with pytest.raises(BufferError):
        convert(plan, [memoryview(bytes(999))], [memoryview(bytes(999))], [0], [0])
