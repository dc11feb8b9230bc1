"""What is measured of lanes before their first job, and that nothing is left of it."""

from __future__ import annotations

import errno
import itertools
import os
from typing import TYPE_CHECKING

import pytest

from pdserve.kv.storage import BlockMemory
from pdserve.kv.tiers.disk.file_system.file_ops import OsFileOps
from pdserve.kv.tiers.job_runner import MemoryCopier
from pdserve.kv.tiers.lanes import ASSUMED, LaneEstimate
from pdserve.kv.tiers.measuring.first_rates import describe, measure_copies, measure_disk

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MIB = 1 << 20
RECORD = 256 << 10


class Ops(OsFileOps):
    """Counts bytes; `error` is raised by the call of that name."""

    def __init__(self, call: str = "", error: int = errno.ENOSPC) -> None:
        super().__init__(direct=True)
        self.done = {"write": 0, "read": 0}
        self._call, self._error = call, error

    def create(self, path: Path, size: int) -> int:
        self._fail("create")
        return super().create(path, size)

    def write(self, fd: int, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        self._fail("write")
        self.done["write"] += sum(map(len, buffers))
        super().write(fd, offset, buffers)

    def read(self, fd: int, offset: int, buffers: Sequence[bytearray | memoryview]) -> int:
        self._fail("read")
        done = super().read(fd, offset, buffers)
        self.done["read"] += done
        return done

    def _fail(self, call: str) -> None:
        if call == self._call:
            raise OSError(self._error, os.strerror(self._error))


def test_a_disk_is_written_and_read_within_bounds(tmp_path: Path) -> None:
    ops = Ops()
    found = measure_disk(tmp_path, ops, RECORD, 6 * MIB)
    assert set(found) == {"disk_read", "disk_write"}
    assert all(rate.bandwidth > 0 and rate.latency > 0 for rate in found.values())
    assert RECORD <= ops.done["write"] <= 6 * MIB
    assert RECORD <= ops.done["read"] <= ops.done["write"] + 8 * 4096
    assert not list(tmp_path.iterdir())
    assert "disk_read" in describe(found)


def test_a_slow_disk_ends_the_measurement(tmp_path: Path) -> None:
    ticks = itertools.count(0.0, 10.0)
    ops = Ops()
    found = measure_disk(tmp_path, ops, RECORD, 64 * MIB, clock=lambda: next(ticks))
    assert ops.done["write"] == 8 * MIB, "one write"
    assert ops.done["read"] <= 4 * RECORD + 8 * 4096, "one read by each thread"
    assert found["disk_write"].bandwidth <= 8 * MIB / 10
    assert found["disk_read"].latency == 10.0


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("create", errno.EROFS),
        ("create", errno.ENOSPC),
        ("write", errno.ENOSPC),
        ("read", errno.EIO),
    ],
)
def test_a_disk_that_refuses_is_not_measured(tmp_path: Path, call: str, code: int) -> None:
    assert measure_disk(tmp_path, Ops(call, code), RECORD, 6 * MIB) == {}
    assert not list(tmp_path.iterdir())


def test_a_disk_with_no_room_for_a_record_is_not_measured(tmp_path: Path) -> None:
    ops = Ops()
    assert measure_disk(tmp_path, ops, RECORD, RECORD - 1) == {}
    assert ops.done == {"write": 0, "read": 0}


def test_a_file_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "TIER.rates.new").write_bytes(b"x")
    assert measure_disk(tmp_path, Ops(), RECORD, 2 * MIB)
    assert not list(tmp_path.iterdir())


def test_copies_are_measured_and_leave_the_device_as_it_was() -> None:
    device, arena = BlockMemory(6, (RECORD,)), BlockMemory(4, (RECORD,))
    content = os.urandom(6 * RECORD)
    view = device.view()
    view[:] = content
    copier = MemoryCopier(device.view(), arena.view(), RECORD)
    ticks = itertools.count(0.0, 0.5)
    found = measure_copies(copier, 4, RECORD, clock=lambda: next(ticks))
    assert found == {
        lane: LaneEstimate(4 * RECORD / 0.5, ASSUMED[lane].latency) for lane in ("d2h", "h2d")
    }
    assert view == content
    view.release()
    copier.close()
    device.close()
    arena.close()
