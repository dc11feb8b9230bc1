"""Measures what KV tiers would get from this machine: its disk, its memory, its limits.

`pdserve doctor tiers` shows it. A measurement takes a few seconds, writes a bounded number of bytes
to one file, and removes it. `break_even` and `can_win` are pure: they compare a tier with computing
the same tokens again. Nothing here knows a model or a running worker.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import resource
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.limits.sizes import approximate_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Bytes, Seconds

__all__ = [
    "DiskProbe",
    "HostProbe",
    "IoRates",
    "break_even",
    "can_win",
    "describe_disk",
    "describe_host",
    "measure_disk",
    "measure_host",
]

SIZES: Final[tuple[Bytes, ...]] = (256 << 10, 1 << 20, 4 << 20)
"""Sizes of the reads and writes that are measured: blocks are about as large."""
_THREADS: Final = 4
_FILE_BYTES: Final[Bytes] = 64 << 20
"""Largest size of the file. Each measurement passes over it once at most."""
_BUDGET: Final[Seconds] = 4.0
_COPY_BYTES: Final[Bytes] = 64 << 20
_PAGE: Final = 4096
_HUGE_PAGES: Final = Path("/sys/kernel/mm/hugepages")


@dataclass(frozen=True, slots=True)
class IoRates:
    """Bytes per second for one size, one thread unless `threads` says otherwise."""

    size: Bytes
    threads: int
    write: float
    """Until the bytes were durable."""
    read: float


@dataclass(frozen=True, slots=True)
class DiskProbe:
    """What a directory's disk can do."""

    path: str
    free: Bytes = 0
    preallocates: bool = False
    """The file system reserves bytes without writing them."""
    direct: str = ""
    """Why reads and writes cannot bypass the page cache; empty: they can."""
    sync: Seconds = 0.0
    """Time to make 1 MiB durable."""
    cached: tuple[IoRates, ...] = ()
    """Through the page cache, which gives the bytes up at once."""
    bypassed: tuple[IoRates, ...] = ()
    """Without the page cache; empty if that is not possible."""
    trouble: str = ""
    """Why nothing, or not everything, could be measured."""

    @property
    def best_read(self) -> float:
        """Bytes per second of the fastest way to read; 0: not measured."""
        return max((rates.read for rates in (*self.cached, *self.bypassed)), default=0.0)


@dataclass(frozen=True, slots=True)
class HostProbe:
    """What this machine's memory can do."""

    copy: float
    """Bytes per second of one thread that copies."""
    pinned: Bytes | None
    """Most bytes that this process may pin; None: no limit."""
    huge_pages: dict[Bytes, int] = field(default_factory=dict)
    """Free huge pages, by their size."""


# ---------------------------------------------------------------- what wins


def break_even(bytes_per_token: float, seconds_per_token: float) -> float:
    """Bytes per second above which fetching KV is sooner than computing it, for long prefixes."""
    return bytes_per_token / seconds_per_token


def can_win(
    bytes_per_token: float, seconds_per_token: float, bandwidth: float, latency: Seconds
) -> int | None:
    """Fewest tokens for which fetching is sooner than computing; None: it never is."""
    if bandwidth <= 0:
        return None
    gain = seconds_per_token - bytes_per_token / bandwidth
    return max(1, math.ceil(latency / gain)) if gain > 0 else None


# ---------------------------------------------------------------- text


def describe_disk(probe: DiskProbe) -> list[str]:
    """Lines for an operator."""
    lines = [f"disk {probe.path}: {approximate_size(probe.free)} free"]
    if probe.cached or probe.bypassed:
        lines.append("  reserves bytes ahead: " + ("yes" if probe.preallocates else "no"))
        lines.append("  bypasses the page cache: " + (probe.direct or "yes"))
        lines.append(f"  makes 1 MiB durable in {1000 * probe.sync:.1f} ms")
    for title, rates in (("page cache", probe.cached), ("bypassed", probe.bypassed)):
        lines += [f"  {title}, {_describe_rates(each)}" for each in rates]
    if probe.trouble:
        lines.append(f"  {probe.trouble}")
    return lines


def describe_host(probe: HostProbe) -> list[str]:
    """Lines for an operator."""
    pinned = "without limit" if probe.pinned is None else approximate_size(probe.pinned)
    pages = [
        f"{count} of {approximate_size(size)}" for size, count in sorted(probe.huge_pages.items())
    ]
    return [
        f"host memory: one thread copies {_rate(probe.copy)}",
        f"  this process may pin memory: {pinned}",
        f"  free huge pages: {', '.join(pages) or 'none'}",
    ]


def _describe_rates(rates: IoRates) -> str:
    threads = f"{rates.threads} thread{'s' * (rates.threads > 1)}"
    size = approximate_size(rates.size)
    return f"{size}, {threads}: reads {_rate(rates.read)}, writes {_rate(rates.write)}"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


# ---------------------------------------------------------------- memory


def measure_host(clock: Callable[[], Seconds] = time.perf_counter) -> HostProbe:
    """Measure this machine's memory; a fraction of a second."""
    source, target = mmap.mmap(-1, _COPY_BYTES), mmap.mmap(-1, _COPY_BYTES)
    with memoryview(source) as there, memoryview(target) as here:
        here[:] = there  # the first pass allocates the pages
        started = clock()
        here[:] = there
        seconds = clock() - started
    source.close()
    target.close()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pinned = None if soft == resource.RLIM_INFINITY else soft
    return HostProbe(_per_second(_COPY_BYTES, seconds), pinned, _huge_pages(_HUGE_PAGES))


def _huge_pages(folder: Path) -> dict[Bytes, int]:
    """Free huge pages by size, as the kernel lists them."""
    found = {}
    for pool in folder.glob("hugepages-*kB"):
        with contextlib.suppress(OSError, ValueError):
            size = int(pool.name.removeprefix("hugepages-").removesuffix("kB")) << 10
            free = int((pool / "free_hugepages").read_text())
            if free:
                found[size] = free
    return found


# ---------------------------------------------------------------- disk


def measure_disk(
    path: Path, *, budget: Seconds = _BUDGET, clock: Callable[[], Seconds] = time.perf_counter
) -> DiskProbe:
    """Measure the disk below a directory that exists, within about `budget` seconds. An error ends
    the measurement; what was measured before it is kept."""
    if sys.platform != "linux":
        return DiskProbe(str(path), trouble="a disk tier needs Linux")
    try:
        system = os.statvfs(path)
        free = system.f_bavail * system.f_frsize
        with tempfile.TemporaryDirectory(prefix="probe-", dir=path) as folder:
            return _Measurement(path, Path(folder) / "probe", free, budget, clock).run()
    except OSError as error:
        return DiskProbe(str(path), trouble=f"cannot be used: {error.strerror}")


class _Measurement:
    """One measurement of a disk, with a file of its own."""

    def __init__(
        self,
        path: Path,
        file: Path,
        free: Bytes,
        budget: Seconds,
        clock: Callable[[], Seconds],
    ) -> None:
        self._path = path
        self._file = file
        self._free = free
        self._clock = clock
        self._deadline = clock() + budget
        self._slice = budget / (2 * len(SIZES) * 4)
        """Time of one pass: sizes and threads, two ways, writes and reads."""
        self._size = min(_FILE_BYTES, free // 4) // SIZES[-1] * SIZES[-1]
        self._buffers = [_random_buffer() for _ in range(_THREADS)]

    def run(self) -> DiskProbe:
        if not self._size:
            free = approximate_size(self._free)
            return DiskProbe(str(self._path), self._free, trouble=f"too full to measure: {free}")
        try:
            return self._run()
        finally:
            for buffer in self._buffers:
                buffer.release()

    def _run(self) -> DiskProbe:
        fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            preallocates = _preallocates(fd, self._size)
            sync = self._sync_time(fd)
            cached = self._passes(fd, cached=True)
        finally:
            os.close(fd)
        direct, bypassed = self._bypassed()
        late = "" if self._clock() < self._deadline else "slow: not everything was measured"
        return DiskProbe(
            str(self._path), self._free, preallocates, direct, sync, cached, bypassed, late
        )

    def _sync_time(self, fd: int) -> Seconds:
        os.pwrite(fd, self._buffers[0][: 1 << 20], 0)
        started = self._clock()
        os.fdatasync(fd)
        return self._clock() - started

    def _bypassed(self) -> tuple[str, tuple[IoRates, ...]]:
        """Why the page cache cannot be bypassed, or the rates without it."""
        try:
            fd = os.open(self._file, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            return f"no ({error.strerror})", ()
        try:
            return "", self._passes(fd, cached=False)
        except OSError as error:  # a file system may take the flag and refuse to write
            return f"no ({error.strerror})", ()
        finally:
            os.close(fd)

    def _passes(self, fd: int, *, cached: bool) -> tuple[IoRates, ...]:
        """At least one pass, further ones while there is time."""
        rates: list[IoRates] = []
        for size, threads in [*((size, 1) for size in SIZES), (1 << 20, _THREADS)]:
            if not rates or self._clock() < self._deadline:
                rates.append(self._pass(fd, size, threads, cached))
        return tuple(rates)

    def _pass(self, fd: int, size: Bytes, threads: int, cached: bool) -> IoRates:
        started = self._clock()
        written = self._each(fd, size, threads, cached, os.pwritev)
        os.fdatasync(fd)
        middle = self._clock()
        if cached:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began = self._clock()
        read = self._each(fd, size, threads, cached, os.preadv)
        ended = self._clock()
        return IoRates(
            size, threads, _per_second(written, middle - started), _per_second(read, ended - began)
        )

    def _each(
        self,
        fd: int,
        size: Bytes,
        threads: int,
        cached: bool,
        operation: Callable[[int, Sequence[memoryview], int], int],
    ) -> Bytes:
        """Pass over the file with several threads, until its end or the end of the time slice."""
        until = self._clock() + self._slice
        done, errors = [0] * threads, []

        def work(own: int) -> None:
            try:
                for at in range(own * size, self._size, threads * size):
                    done[own] += operation(fd, [self._buffers[own][:size]], at)
                    if cached:
                        os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)
                    if self._clock() >= until:
                        return
            except OSError as error:
                errors.append(error)

        _run_threads(work, threads)
        if errors:
            raise errors[0]
        return sum(done)


def _run_threads(work: Callable[[int], None], threads: int) -> None:
    others = [threading.Thread(target=work, args=(own,)) for own in range(1, threads)]
    for thread in others:
        thread.start()
    work(0)
    for thread in others:
        thread.join()


def _random_buffer() -> memoryview:
    """Page-aligned memory with content that no disk compresses."""
    buffer = mmap.mmap(-1, SIZES[-1])
    buffer.write(os.urandom(SIZES[-1]))
    return memoryview(buffer)


def _preallocates(fd: int, size: Bytes) -> bool:
    """Whether the file system reserves bytes; if not, they are written."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.ftruncate(fd, size)
        return False
    return os.fstat(fd).st_blocks * 512 >= size


def _per_second(count: Bytes, seconds: Seconds) -> float:
    return count / max(seconds, 1e-9)
