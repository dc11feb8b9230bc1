"""What every question of `probe.py` uses: rows of results, times of host and device, guards.

A question is a function that yields rows. It knows neither the order of questions nor the report.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bench.gpu.limits import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SLEEP = 3_000_000
"""Device cycles that the device sleeps while the host queues launches, about 1.7 ms."""


class Unavailable(Exception):
    """The machine lacks what the question needs."""


@dataclass(frozen=True, slots=True)
class Row:
    """One result."""

    what: str
    value: float | None = None
    unit: str = ""
    note: str = ""
    """Why there is no value, or what it is beside another."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The device that is asked, and how large the questions are."""

    device: torch.device
    dry: bool = False

    @property
    def cuda(self) -> bool:
        """True on an NVIDIA GPU."""
        return self.device.type == "cuda"

    def require_cuda(self) -> None:
        """Raises `Unavailable` elsewhere."""
        if not self.cuda:
            raise Unavailable("needs CUDA")

    def size(self, real: int, dry: int) -> int:
        """Chooses between the size on a GPU and that of a dry run."""
        return dry if self.dry else real

    def host_seconds(self, work: Callable[[], object], count: int = 500) -> float:
        """Measures the host's time of a call; the device does not hold it up."""
        count = self.size(count, 3)
        for _ in range(3):
            work()
        found = []
        for _ in range(3):
            settle(self.device)
            begin = time.perf_counter()
            for _ in range(count):
                work()
            found.append((time.perf_counter() - begin) / count)
        settle(self.device)
        return statistics.median(found)

    def device_seconds(self, work: Callable[[int], object], count: int) -> float:
        """Measures the device's time of a call; `work` gets the call's number. The device sleeps
        until the calls are queued, so that it never waits for the host."""
        for number in range(count):
            work(number)
        return statistics.median(self._queued(work, count) for _ in range(self.size(3, 1)))

    def _queued(self, work: Callable[[int], object], count: int) -> float:
        settle(self.device)
        if not self.cuda:
            begin = time.perf_counter()
            for number in range(count):
                work(number)
            return (time.perf_counter() - begin) / count
        first, last = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
        first.record()
        for number in range(count):
            work(number)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / count


def guarded(what: str, rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Yields the rows, or one that says why they end. Raises what leaves the device unusable."""
    try:
        yield from rows()
    except Exception as error:
        if is_fatal(error):
            raise
        yield Row(what, note=reason(error))


def reason(error: BaseException) -> str:
    """Returns the kind of an error and the first line of its text."""
    text = str(error).strip().partition("\n")[0][:160]
    return text if isinstance(error, Unavailable) else f"{type(error).__name__}: {text}"


def is_fatal(error: BaseException) -> bool:
    """Returns True if later calls of this process would fail, too."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    text = str(error)
    return "CUDA error" in text and "invalid argument" not in text
