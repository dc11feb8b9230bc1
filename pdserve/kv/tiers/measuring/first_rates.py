"""Measures how fast lanes are before their first job, so that the first plans are right.

Memory is copied as jobs copy it, between the device pool and the arena, before either is used. The
disk writes and reads one file of its own directory as records are written and read, by as many
threads. The file has no name while it is measured, so none is left behind. What cannot be
measured keeps its assumed rate. It takes a tenth of a second at most, plus one write.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.kv.storage import BlockMemory
from pdserve.kv.tiers.jobs import READERS
from pdserve.kv.tiers.lanes import ASSUMED, LaneEstimate
from pdserve.transfer.copying import crc32

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.disk.file_system.file_ops import FileOps
    from pdserve.kv.tiers.jobs import BlockCopier
    from pdserve.messages.tiers import LaneName

__all__ = ["Rates", "describe", "measure_copies", "measure_disk"]

_log = logging.getLogger(__name__)

Rates = dict["LaneName", LaneEstimate]

_COPY_BYTES: Final[Bytes] = 8 << 20
_PASSES: Final = 3
_DISK_BYTES: Final[Bytes] = 16 << 20
_CACHED_BYTES: Final[Bytes] = 8 << 20
"""Bytes written where the page cache cannot be bypassed: a slow disk makes them durable first."""
_WRITE_BYTES: Final[Bytes] = 8 << 20
"""Bytes of one write, as of a batch of records."""
_SLICE: Final[Seconds] = 0.04
"""Seconds after which no further write or read begins."""
_TOUCHES: Final = 8
"""Reads of one page, for the latency."""
_PAGE: Final[Bytes] = 4096


def describe(rates: Mapping[LaneName, LaneEstimate]) -> str:
    """The rates for the log."""
    return ", ".join(f"{lane} {rate.bandwidth / 1e9:.2f} GB/s" for lane, rate in rates.items())


# ---------------------------------------------------------------- memory


def measure_copies(
    copier: BlockCopier,
    blocks: int,
    block_bytes: Bytes,
    clock: Callable[[], Seconds] = time.perf_counter,
) -> Rates:
    """Rates between the device and the host. `blocks`: what both have; none of them is in use.
    Blocks of the device keep their bytes."""
    count = min(blocks, max(1, _COPY_BYTES // block_bytes))
    places = range(count)
    size = count * block_bytes
    # The first pass allocates the pages of memory that nobody has touched.
    copier.copy_out(places, places)
    copier.copy_in(places, places)
    out, back = [], []
    for _ in range(_PASSES):
        out.append(_seconds(lambda: copier.copy_out(places, places), clock))
        back.append(_seconds(lambda: copier.copy_in(places, places), clock))
    return {
        "d2h": LaneEstimate(size / statistics.median(out), ASSUMED["d2h"].latency),
        "h2d": LaneEstimate(size / statistics.median(back), ASSUMED["h2d"].latency),
    }


def _seconds(work: Callable[[], object], clock: Callable[[], Seconds]) -> Seconds:
    began = clock()
    work()
    return max(1e-9, clock() - began)


# ---------------------------------------------------------------- disk


def measure_disk(
    folder: Path,
    ops: FileOps,
    record_bytes: Bytes,
    most: Bytes,
    clock: Callable[[], Seconds] = time.perf_counter,
) -> Rates:
    """Rates of the disk below a folder, for records of this size. `most`: bytes that may be taken
    meanwhile. Empty if the folder cannot be written."""
    limit = _DISK_BYTES if getattr(ops, "direct", False) else _CACHED_BYTES
    records = min(limit, most) // record_bytes
    if not records:
        return {}
    try:
        fd = _nameless(folder, ops, records * record_bytes)
    except OSError as error:
        _log.info("the disk of %s is not measured: %s", folder, error.strerror)
        return {}
    buffers = BlockMemory(READERS, (record_bytes,))
    try:
        return _DiskMeasurement(ops, fd, buffers, records, record_bytes, clock).run()
    except OSError as error:
        _log.info("the disk of %s is not measured: %s", folder, error.strerror)
        return {}
    finally:
        buffers.close()
        ops.close(fd)


def _nameless(folder: Path, ops: FileOps, size: Bytes) -> int:
    """A descriptor of a new file that goes when it is closed."""
    path = folder / "TIER.rates.new"
    with suppress(FileNotFoundError):  # of a process that was killed right here
        ops.unlink(path)
    fd = ops.create(path, size)
    ops.unlink(path)
    return fd


@dataclass(slots=True)
class _DiskMeasurement:
    """One file that is written once, and what was written read once."""

    ops: FileOps
    fd: int
    buffers: BlockMemory
    records: int
    record_bytes: Bytes
    clock: Callable[[], Seconds]

    def run(self) -> Rates:
        written, writing = self._write()
        self.ops.sync(self.fd)
        self.ops.done_with(self.fd)
        latency = self._touch(written)
        read, reading = self._read(written)
        return {
            "disk_read": LaneEstimate(read / reading, latency),
            "disk_write": LaneEstimate(written * self.record_bytes / writing, latency),
        }

    def _write(self) -> tuple[int, Seconds]:
        """Number of records written, and seconds."""
        each = max(1, _WRITE_BYTES // self.record_bytes)
        payload = self.buffers.view(0)
        began = self.clock()
        done = 0
        while done < self.records and (not done or self.clock() - began < _SLICE):
            count = min(each, self.records - done)
            for _ in range(count):
                crc32(payload)
            self.ops.write(self.fd, done * self.record_bytes, [payload] * count)
            done += count
        seconds = max(1e-9, self.clock() - began)
        payload.release()
        return done, seconds

    def _touch(self, records: int) -> Seconds:
        page = self.buffers.view(0)[:_PAGE]
        times = []
        for number in range(_TOUCHES):
            began = self.clock()
            self.ops.read(self.fd, number * records // _TOUCHES * self.record_bytes, [page])
            times.append(self.clock() - began)
        page.release()
        return statistics.median(times)

    def _read(self, records: int) -> tuple[Bytes, Seconds]:
        """Bytes read by all threads, and seconds."""
        until = self.clock() + _SLICE
        done, errors = [0] * READERS, list[OSError]()

        def work(own: int) -> None:
            view = self.buffers.view(own)
            try:
                for number in range(own, records, READERS):
                    done[own] += self.ops.read(self.fd, number * self.record_bytes, [view])
                    crc32(view)
                    if self.clock() >= until:
                        return
            except OSError as error:
                errors.append(error)
            finally:
                view.release()

        seconds = _seconds(lambda: _run_threads(work), self.clock)
        if errors:
            raise errors[0]
        return sum(done), seconds


def _run_threads(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(own,), daemon=True) for own in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
