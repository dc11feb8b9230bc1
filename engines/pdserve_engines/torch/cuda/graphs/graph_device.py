"""Captures what a function launches on a CUDA device, to launch all of it at once later.

`GraphDevice` is the port; tests have one that captures operations on the CPU. It knows nothing of
models or batches.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CapturedGraph", "CudaGraphDevice", "GraphDevice"]

_PROGRAMS_PER_MULTIPROCESSOR = 4
"""Programs of decode attention that a multiprocessor computes at one time, about: shared memory
has room for two to eight, by head size."""
_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture CUDA has broken off. Torch's allocator of pinned memory asks each of them
whether it is being captured, for as long as the process lives."""


class CapturedGraph(Protocol):
    """A function's launches, with the addresses and numbers that they were captured with."""

    result: torch.Tensor
    """What the function has returned. A replay of any graph of the device may overwrite it."""

    def replay(self) -> None:
        """Launch everything again, in the current stream. No host code of the function runs."""
        ...


class GraphDevice(Protocol):
    """Captures graphs that share their memory, so at most one of them runs at a time."""

    @property
    def programs(self) -> int:
        """How many programs fill the device: a captured kernel that takes its work from a list has
        so many."""
        ...

    def capture(self, launch: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Call `launch`, which may not wait for the device nor read it, and keep what it launches.
        It is called once before, so that kernels are compiled. Raises what torch raises."""
        ...

    def close(self) -> None:
        """Free the memory of all graphs, which are not replayed any more. Idempotent."""
        ...


class CudaGraphDevice:
    """Implements `GraphDevice`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @property
    def programs(self) -> int:
        properties = torch.cuda.get_device_properties(self._device)
        return int(properties.multi_processor_count) * _PROGRAMS_PER_MULTIPROCESSOR

    def capture(self, launch: Callable[[], torch.Tensor]) -> CapturedGraph:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            launch()
            stream.synchronize()
            result, graph = self._captured(launch)
        self._graphs.append(graph)
        return _CudaGraph(graph, result)

    def _captured(
        self, launch: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        # Other threads use the device meanwhile: transfers, and other cores of the process.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = launch()
        except BaseException:
            # The stream has to leave the capture; the first error is the one that tells something.
            with suppress(RuntimeError):
                self._end(graph)
            raise
        self._end(graph)
        return result, graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End the capture. If CUDA has broken it off, torch raises and goes on counting it as
        under way: its allocator would then never give memory back to the device."""
        try:
            graph.capture_end()
        except RuntimeError:
            _BROKEN.append(graph)
            place = (self._stream.device_index, self._pool)
            # They are not torch's API, and refuse a capture that torch has counted as ended.
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(*place)
                torch._C._cuda_releasePool(*place)
            graph.reset()
            raise

    def close(self) -> None:
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


class _CudaGraph:
    """Implements `CapturedGraph`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: torch.Tensor) -> None:
        self.result = result
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()
