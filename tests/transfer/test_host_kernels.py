"""The kernels' sources, compiled for the host: every address that a launch computes is right."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from array import array
from pathlib import Path
from random import Random

import pytest

from pdserve.kv.layout import AxisWindow, conversion, convert, strided_layout, wire_layout
from pdserve.kv.layout_cuda import launch_shape, map_argument, word_of
from pdserve.testing.kv_oracle import layouts

COMPILER = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), "")
CUDA = Path(__file__).parents[2] / "native" / "cuda"
pytestmark = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("kernels") / "kernels.so"
    source = Path(__file__).with_name("host_kernels.cpp")
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", f"-I{CUDA}"]
    subprocess.run([COMPILER, *flags, "-o", str(out), str(source)], check=True, timeout=50)
    return ctypes.CDLL(str(out))


def address_of(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def pointer(numbers: array[int]) -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.buffer_info()[0])


@pytest.mark.parametrize("axes", ["block kv token head dim", "block head token dim"])
@pytest.mark.parametrize("dim", [64, 8, 6, 3])
@pytest.mark.parametrize("to_wire", [True, False])
def test_convert(kernels: ctypes.CDLL, axes: str, dim: int, to_wire: bool) -> None:
    random = Random(dim)
    (layout,) = layouts(3, 1, dim=dim)
    inner, wire = strided_layout(layout, axes, blocks=5), wire_layout(layout)
    ends = (inner, wire) if to_wire else (wire, inner)
    plan = conversion(*ends, layers=AxisWindow(1, 0, 2), heads=AxisWindow(0, 1, 2))
    size = 5 * conversion(wire, wire).block_bytes
    source, out = (
        [bytearray(random.randbytes(size // end.memories)) for _ in range(end.memories)]
        for end in ends
    )
    expected = [memory[:] for memory in out]
    here, there = random.sample(range(5), 4), random.sample(range(5), 4)
    views = [memoryview(m) for m in expected], [memoryview(m) for m in source]
    convert(plan, *views, there, here)
    to = array("q", [address_of(out[memory]) + at for memory, at in plan.destination_planes])
    from_ = array("q", [address_of(source[memory]) + at for memory, at in plan.source_planes])
    word = word_of(plan, [*to, *from_])
    units = 4 * plan.units
    (grid, _), (x, y) = launch_shape(plan, units, word)
    argument = map_argument(plan)
    tables = [to, from_, array("q", there), array("q", here)]
    for blocks in (grid, 1):  # a grid that is too small takes turns
        kernels.launch_convert(
            blocks, x, y, word, ctypes.byref(argument), *map(pointer, tables), units
        )
        assert out == expected


@pytest.mark.parametrize("grid", [1, 3, 50])
def test_copy_runs(kernels: ctypes.CDLL, grid: int) -> None:
    random = Random(grid)
    source, out = bytearray(random.randbytes(4000)), bytearray(4000)
    expected = bytearray(4000)
    to, from_, lengths = array("q"), array("q"), array("q")
    for at in range(0, 4000, 100):
        step = random.choice((1, 4, 16))
        here, there = (random.randrange(0, 30, step) for _ in range(2))
        length = random.randrange(70)
        expected[at + there : at + there + length] = source[at + here : at + here + length]
        to.append(address_of(out) + at + there)
        from_.append(address_of(source) + at + here)
        lengths.append(length)
    kernels.launch_copy_runs(grid, 128, pointer(to), pointer(from_), pointer(lengths), len(to))
    assert out == expected
