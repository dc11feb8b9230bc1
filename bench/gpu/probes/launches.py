"""What a launch costs: of an eager operation, of a Triton kernel, inside a CUDA graph."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from bench.gpu.limits import settle
from bench.gpu.probes.base import Row, guarded
from pdserve_engines.torch.models.upload import upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.gpu.probes.base import Probe

INSIDE = 1000
"""Kernels of the graph whose boundaries are measured."""
GRAPHS = 20
"""Graphs of which the capture is measured."""
LAUNCHES = 320
"""Kernels of each: 32 layers of 10."""


def ask_launches(probe: Probe) -> Iterator[Row]:
    """Host time of launches and copies, device time between kernels of a graph."""
    yield from guarded("eager launches", lambda: _eager(probe))
    yield from guarded("Triton launch", lambda: _triton(probe))
    yield from guarded("boundary in a graph", lambda: _boundaries(probe))


def _eager(probe: Probe) -> Iterator[Row]:
    small = torch.zeros(256, device=probe.device, dtype=torch.bfloat16)
    row = torch.zeros(1, 2048, device=probe.device, dtype=torch.bfloat16)
    square = torch.zeros(2048, 2048, device=probe.device, dtype=torch.bfloat16)
    numbers = np.zeros(256, np.int64)
    pageable = torch.from_numpy(numbers)
    works: dict[str, Callable[[], object]] = {
        "host, add_ in place": lambda: small.add_(1),
        "host, add to a new tensor": lambda: small + 1,
        "host, view": lambda: row.view(32, 64),
        "host, linear of one row": lambda: functional.linear(row, square),
        "host, rms_norm": lambda: functional.rms_norm(row, (2048,), row[0]),
        "host, 2 KiB to the device, pinned": lambda: upload(numbers, probe.device),
        "host, 2 KiB to the device, pageable": lambda: pageable.to(probe.device),
        "host, one number to the host": lambda: small[0].item(),
    }
    with torch.inference_mode():
        for what, work in works.items():
            yield Row(what, probe.host_seconds(work) * 1e6, "µs")


def _triton(probe: Probe) -> Iterator[Row]:
    probe.require_cuda()
    from bench.gpu.probes.kernels import noop

    out = torch.zeros(16, device=probe.device)
    yield Row("host, Triton launch", probe.host_seconds(lambda: noop[(1,)](out)) * 1e6, "µs")


def _boundaries(probe: Probe) -> Iterator[Row]:
    probe.require_cuda()
    small = torch.zeros(256, device=probe.device)
    yield _boundary(probe, "add_", lambda: small.add_(1))
    from bench.gpu.probes.kernels import noop

    yield _boundary(probe, "empty Triton kernel", lambda: noop[(132,)](small))


def _boundary(probe: Probe, name: str, work: Callable[[], object]) -> Row:
    graph = _captured(work, INSIDE)
    seconds = probe.device_seconds(lambda number: graph.replay(), 3)
    return Row(f"in a graph, {name}", seconds / INSIDE * 1e6, "µs", f"{INSIDE} kernels")


def _captured(work: Callable[[], object], count: int) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            work()
    return graph


def ask_graphs(probe: Probe) -> Iterator[Row]:
    """Time and memory of capturing graphs as large as a decode step's."""
    probe.require_cuda()
    row = torch.zeros(64, 4096, device=probe.device, dtype=torch.bfloat16)
    square = torch.zeros(4096, 4096, device=probe.device, dtype=torch.bfloat16)
    work = lambda: functional.linear(row, square)  # noqa: E731
    free = torch.cuda.mem_get_info(probe.device)[0]
    begin = time.perf_counter()
    graphs = [_captured(work, LAUNCHES) for _ in range(GRAPHS)]
    yield Row(f"capturing {GRAPHS} graphs", time.perf_counter() - begin, "s", f"{LAUNCHES} each")
    taken = free - torch.cuda.mem_get_info(probe.device)[0]
    yield Row(f"memory of {GRAPHS} graphs", taken / 2**20, "MiB")
    yield Row("host, replay", probe.host_seconds(graphs[0].replay, 20) * 1e6, "µs")
    settle(probe.device)
