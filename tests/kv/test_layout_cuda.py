"""The conversion on a device: what is launched, and on a GPU, that it does what the CPU does."""

from __future__ import annotations

import ctypes
from random import Random

import pytest

from pdserve.kv.layout import WIRE, conversion, convert, strided_layout, wire_layout
from pdserve.kv.layout_cuda import (
    CudaConverter,
    MapArgument,
    launch_shape,
    map_argument,
    word_of,
)
from pdserve.testing.kv_oracle import layouts
from pdserve.transfer.cuda import nvidia

ORDERS = (
    WIRE,
    "block kv token head dim",
    "block token head dim",
    "layer kv block token head dim",
    "block head layer kv token dim",
)


def plan_of(axes: str, **sizes: int):
    (layout,) = layouts(3, 1, **sizes)
    return conversion(strided_layout(layout, axes, blocks=5), wire_layout(layout))


def test_the_map_is_laid_out_as_in_the_header() -> None:
    plan = plan_of(ORDERS[1])
    argument = map_argument(plan)
    assert ctypes.sizeof(MapArgument) == 72  # what the kernel's first parameter is: test_kernels
    assert bytes(argument) == b"".join(
        (
            *(n.to_bytes(4, "little") for n in (6, 3, 4, 0)),
            *(n.to_bytes(8, "little") for n in (8, *plan.source, *plan.destination)),
        )
    )


def test_words_are_as_large_as_everything_allows() -> None:
    assert word_of(plan_of(ORDERS[1], dim=8), [1 << 20]) == 16
    assert word_of(plan_of(ORDERS[1], dim=8), [1 << 20, (1 << 20) + 4]) == 4
    assert word_of(plan_of(ORDERS[1], dim=2), [0]) == 4
    assert word_of(plan_of(ORDERS[1], dim=3), [0]) == 1


@pytest.mark.parametrize("units", [1, 7, 5000, 1 << 30])
@pytest.mark.parametrize("dim", [1, 8, 64, 100, 4096])
def test_a_launch_reaches_every_unit(units: int, dim: int) -> None:
    plan = plan_of(ORDERS[1], dim=dim)
    (x, _), (across, down) = launch_shape(plan, units, 2)
    assert across * down == 256
    assert across >= min(plan.run // 2, 256)
    assert 1 <= x <= 1 << 16
    assert x * down >= units or x == 1 << 16


@pytest.mark.gpu
@pytest.mark.skipif(
    nvidia.unavailable_reason() is not None, reason=str(nvidia.unavailable_reason())
)
@pytest.mark.parametrize("axes", ORDERS)
@pytest.mark.parametrize("dim", [64, 6, 3])
def test_the_device_converts_as_the_cpu_does(axes: str, dim: int) -> None:
    driver = nvidia.NvidiaDriver()
    random = Random(dim)
    (layout,) = layouts(3, 1, dim=dim)
    inner, wire = strided_layout(layout, axes, blocks=5), wire_layout(layout)
    size = 5 * conversion(wire, wire).block_bytes
    for plan, ours, theirs in (
        (conversion(inner, wire), inner.memories, 1),
        (conversion(wire, inner), 1, inner.memories),
    ):
        source = [random.randbytes(size // ours) for _ in range(ours)]
        expected = [bytearray(size // theirs) for _ in range(theirs)]
        here, there = random.sample(range(5), 4), random.sample(range(5), 4)
        views = [memoryview(memory) for memory in expected], [memoryview(m) for m in source]
        convert(plan, *views, there, here)
        device_source = [driver.allocate(len(memory)) for memory in source]
        device_out = [driver.allocate(len(memory)) for memory in expected]
        for address, memory in zip(device_source, source, strict=True):
            driver.write(address, memory)
        for address, out in zip(device_out, expected, strict=True):
            driver.write(address, bytes(len(out)))
        converter = CudaConverter(driver, device_out[0])
        moved = converter.convert(plan, device_out, device_source, there, here)
        assert moved == 4 * plan.block_bytes
        found = [driver.read(a, len(o)) for a, o in zip(device_out, expected, strict=True)]
        converter.close()
        for address in device_source + device_out:
            driver.free(address)
        assert found == [bytes(memory) for memory in expected]
