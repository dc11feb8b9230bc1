"""What processes hold over a long life: samples of each, and whether a slope is more than noise.

Judged is anonymous memory, which no cache of the system's is part of. A sample is taken between two
portions of work, while nothing is under way; the line through the last three quarters of them tells
what each piece of work leaves behind.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.chaos.cluster import Node

WARM_UP = 0.25
"""Share of the samples that a line leaves out: caches fill, allocators find their size."""


@dataclass(frozen=True)
class Sample:
    """One process after so much work."""

    done: int
    anonymous: int
    """Bytes that belong to no file and are shared with nobody."""
    resident: int
    """Bytes, files and shared memory included."""
    descriptors: int
    threads: int


@dataclass
class Line:
    """One process's samples."""

    name: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def _warm(self) -> list[Sample]:
        return self.samples[int(len(self.samples) * WARM_UP) :]

    @property
    def slope(self) -> float:
        """Bytes that each piece of work leaves behind, by least squares."""
        warm = self._warm
        fit = statistics.linear_regression([s.done for s in warm], [s.anonymous for s in warm])
        return fit.slope

    @property
    def growth(self) -> float:
        """Bytes over the warm samples, by the slope."""
        return self.slope * (self._warm[-1].done - self._warm[0].done)

    @property
    def late_slope(self) -> float:
        """The same over the last half of the warm samples: below `slope` while it levels off."""
        warm = self._warm[len(self._warm) // 2 :]
        fit = statistics.linear_regression([s.done for s in warm], [s.anonymous for s in warm])
        return fit.slope

    def row(self) -> str:
        """Of a table: process, MiB at first, after warm-up, at last, slope, slope at last."""
        first, warm, last = self.samples[0], self._warm[0], self.samples[-1]
        sizes = " | ".join(f"{s.anonymous / 2**20:.1f}" for s in (first, warm, last))
        descriptors = f"{first.descriptors} / {last.descriptors}"
        return (
            f"| {self.name} | {sizes} | {last.resident / 2**20:.0f} "
            f"| {self.slope:+.2f} | {self.late_slope:+.2f} | {descriptors} |"
        )


HEAD = (
    "| process | first MiB | warm MiB | last MiB | resident MiB "
    "| bytes per {unit} | of the last part | descriptors first / last |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|"
)


class Watch:
    """Samples of every process of these nodes, their children included, under stable names."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.lines: list[Line] = []
        self._processes: list[psutil.Process] = []
        for node in nodes:
            own = psutil.Process(node.process.pid)
            self._add(node.name, own)
            for number, child in enumerate(own.children(recursive=True), 1):
                self._add(f"{node.name}, {_part(child, number)}", child)

    def _add(self, name: str, process: psutil.Process) -> None:
        self.lines.append(Line(name))
        self._processes.append(process)

    def sample(self, done: int) -> None:
        """After so much work; every process must live."""
        for line, process in zip(self.lines, self._processes, strict=True):
            anonymous = anonymous_bytes(Path(f"/proc/{process.pid}/smaps_rollup").read_text())
            resident = process.memory_info().rss
            held = (process.num_fds(), process.num_threads())
            line.samples.append(Sample(done, anonymous, resident, *held))

    def table(self, unit: str) -> str:
        """Of all lines."""
        return "\n".join((HEAD.format(unit=unit), *(line.row() for line in self.lines)))


def anonymous_bytes(rollup: str) -> int:
    """From `/proc/PID/smaps_rollup`; what is swapped out counts."""
    found = re.findall(r"^(?:Anonymous|Swap):\s+(\d+) kB$", rollup, re.MULTILINE)
    return sum(map(int, found)) * 1024


def leaks(lines: Sequence[Line], *, per_piece: float, noise: float) -> list[str]:
    """Those that grow by more than `per_piece` bytes with each piece of work, and by more than
    `noise` bytes in all, which allocators may take for themselves; in words."""
    return [
        f"{line.name}: {line.slope:+.1f} bytes each, {line.growth / 2**20:+.1f} MiB"
        for line in lines
        if line.slope > per_piece and line.growth > noise
    ]


def _part(process: psutil.Process, number: int) -> str:
    words = " ".join(process.cmdline())
    found = re.search(r"pdserve\.engine_core\.(child)|(template|tokeni)", words)
    if found is None:
        return f"child {number}"
    return "engine" if found[1] else "text"
