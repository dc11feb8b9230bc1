"""Runs `kv.layout.convert` on a GPU, with the same map in `native/cuda/convert.cu`.

Memories are device addresses of one device, or addresses that it reaches. A launch is asynchronous
and `convert` returns when the blocks are there, so call it in a thread. It has not been measured.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING, Final

from pdserve.kv.layout import MAX_UNITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Bytes
    from pdserve.kv.layout import Conversion
    from pdserve.transfer.cuda.nvidia import NvidiaDriver

__all__ = ["CudaConverter", "MapArgument", "launch_shape", "map_argument", "word_of"]

_THREADS: Final = 256
_BLOCKS: Final = 1 << 16
"""Most thread blocks of one launch; more units take turns."""


class MapArgument(ctypes.Structure):
    """`pdserve::LayoutMap` as a kernel argument."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("planes", "heads", "tokens", "reserved")),
        ("run", ctypes.c_longlong),
        ("source", ctypes.c_longlong * 3),
        ("destination", ctypes.c_longlong * 3),
    )


def map_argument(plan: Conversion) -> MapArgument:
    planes, heads, tokens, run, *distances = plan.numbers()
    sides = ctypes.c_longlong * 3
    return MapArgument(planes, heads, tokens, 0, run, sides(*distances[:3]), sides(*distances[3:]))


def word_of(plan: Conversion, addresses: Sequence[int]) -> Bytes:
    """The largest word size that divides all runs, strides and plane offsets."""
    numbers = [plan.run, *plan.source, *plan.destination, *addresses]
    return next(word for word in (16, 4, 1) if all(number % word == 0 for number in numbers))


def launch_shape(
    plan: Conversion, units: int, word: Bytes
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(grid, block): x of a block counts a unit's words, up to a warp and more; y counts units."""
    words = plan.run // word
    across = next((x for x in (1, 2, 4, 8, 16, 32, 64, 128) if x >= words), _THREADS)
    down = _THREADS // across
    return (max(1, min(-(-units // down), _BLOCKS)), 1), (across, down)


class CudaConverter:
    """Converts blocks on the device of one address. Use it from one thread at a time."""

    def __init__(self, driver: NvidiaDriver, beside: int) -> None:
        """Errors: `CudaError` if the kernel cannot be compiled or loaded."""
        self._driver = driver
        self._device = driver.beside(beside).ordinal
        self._kernels = {
            word: driver.kernel(self._device, "convert", f"pdserve_convert_{word}")
            for word in (16, 4, 1)
        }
        # The flag 1 is CU_STREAM_NON_BLOCKING: the stream does not wait for the default stream.
        self._stream = driver.asked("cuStreamCreate", 1)

    def convert(
        self,
        plan: Conversion,
        destination: Sequence[int],
        source: Sequence[int],
        destination_blocks: Sequence[int],
        source_blocks: Sequence[int],
    ) -> Bytes:
        """Converts like `layout.convert`, with memories given by their addresses. Does not know the
        memories' sizes: check the blocks before. Errors: `ValueError`, `CudaError`."""
        count = len(source_blocks)
        units = count * plan.units
        if len(destination_blocks) != count or units > MAX_UNITS:
            raise ValueError("as many destinations as sources, and at most 2^31 units")
        if not count:
            return 0
        to = array("q", [destination[memory] + at for memory, at in plan.destination_planes])
        from_ = array("q", [source[memory] + at for memory, at in plan.source_planes])
        table = to + from_ + array("q", destination_blocks) + array("q", source_blocks)
        self._driver.on(self._device)
        device_table = self._driver.allocate(8 * len(table), self._device)
        try:
            self._driver.write(device_table, table.tobytes())
            edges = (0, len(to), 2 * len(to), 2 * len(to) + count)
            columns = [ctypes.c_void_p(device_table + 8 * edge) for edge in edges]
            word = word_of(plan, [*to, *from_])
            grid, block = launch_shape(plan, units, word)
            arguments = [map_argument(plan), *columns, ctypes.c_uint(units)]
            self._driver.launch(self._kernels[word], self._stream, grid, block, arguments)
            self._driver.asked("cuStreamSynchronize", self._stream)
        finally:
            self._driver.free(device_table)
        return units * plan.run

    def close(self) -> None:
        self._driver.on(self._device)
        self._driver.asked("cuStreamDestroy", self._stream)
