"""Measurements for `pdserve doctor tiers`: bounded, cleaned up, and what they say."""

from __future__ import annotations

import errno as codes
import itertools
import os
from typing import TYPE_CHECKING

import pytest

from pdserve.kv.tiers.measuring import probe
from pdserve.kv.tiers.measuring.probe import (
    SIZES,
    DiskProbe,
    HostProbe,
    IoRates,
    break_even,
    can_win,
    describe_disk,
    describe_host,
    measure_disk,
    measure_host,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GB = 1e9
TICK = 0.001


def ticking() -> Callable[[], float]:
    """A clock on which each look takes a millisecond: what is measured does not depend on how busy
    the machine is."""
    ticks = itertools.count()
    return lambda: TICK * next(ticks)


# ---------------------------------------------------------------- what wins


def test_a_fast_tier_wins_from_some_span_on():
    # 70B on eight H100: 320 KiB and 46 us per token.
    kappa, t_tok = 320 * 1024, 46e-6
    assert break_even(kappa, t_tok) / GB == pytest.approx(7.12, abs=0.01)
    host = can_win(kappa, t_tok, 20 * GB, 0.001)
    assert host is not None
    # At the smallest span both take the same time, within one token.
    assert host * t_tok >= 0.001 + host * kappa / (20 * GB) > (host - 1) * t_tok
    assert can_win(kappa, t_tok, 20 * GB, 0.005) == pytest.approx(5 * host, abs=5)


@pytest.mark.parametrize("bandwidth", [0.0, 1 * GB, 7.12 * GB])
def test_a_slow_tier_never_wins(bandwidth: float):
    assert can_win(320 * 1024, 46e-6, bandwidth, 0.0) is None


def test_without_latency_one_token_is_enough():
    assert can_win(1000.0, 1e-3, 1e9, 0.0) == 1


# ---------------------------------------------------------------- measuring


def test_a_disk_is_measured_and_nothing_is_left(tmp_path: Path):
    found = measure_disk(tmp_path, budget=3.0, clock=ticking())
    assert list(tmp_path.iterdir()) == []
    assert found.free > 0
    assert not found.trouble
    assert [rates.size for rates in found.cached] == [*SIZES, 1 << 20]
    assert all(rates.read > 0 and rates.write > 0 for rates in (*found.cached, *found.bypassed))
    assert bool(found.bypassed) is not bool(found.direct)
    assert found.best_read >= found.cached[0].read


def test_a_pass_ends_with_its_time(tmp_path: Path, monkeypatch):
    """A slow disk: each operation takes a second of the clock."""
    written = []
    pwritev = os.pwritev

    def slow(fd: int, buffers: list[memoryview], at: int) -> int:
        written.append(len(buffers[0]))
        return pwritev(fd, buffers, at)

    monkeypatch.setattr(os, "pwritev", slow)
    ticks = itertools.count()
    found = measure_disk(tmp_path, budget=4.0, clock=lambda: float(next(ticks)))
    assert "slow" in found.trouble
    assert len(written) <= 6
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_refuses_to_bypass_is_named(tmp_path: Path, monkeypatch):
    opened = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(codes.EINVAL, "Invalid argument")
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    found = measure_disk(tmp_path, budget=1.0, clock=ticking())
    assert found.direct == "no (Invalid argument)"
    assert found.bypassed == ()
    assert found.cached


def test_a_directory_that_cannot_be_used_is_said(tmp_path: Path):
    found = measure_disk(tmp_path / "absent")
    assert found.trouble == "cannot be used: No such file or directory"
    assert describe_disk(found)[-1].strip() == found.trouble


def test_a_full_disk_is_not_written_to(tmp_path: Path, monkeypatch):
    full = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: _Full(full))
    found = measure_disk(tmp_path)
    assert "too full" in found.trouble
    assert found.cached == ()


class _Full:
    def __init__(self, system: os.statvfs_result) -> None:
        self.f_bavail = 100
        self.f_frsize = system.f_frsize


def test_memory_is_measured(tmp_path: Path):
    found = measure_host(ticking())
    assert found.copy == pytest.approx(probe._COPY_BYTES / TICK)
    assert found.pinned is None or found.pinned >= 0


def test_huge_pages_are_read_as_the_kernel_lists_them(tmp_path: Path):
    for name, free in (("hugepages-2048kB", "7"), ("hugepages-1048576kB", "0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "free_hugepages").write_text(free)
    assert probe._huge_pages(tmp_path) == {2 << 20: 7}
    assert probe._huge_pages(tmp_path / "absent") == {}


# ---------------------------------------------------------------- text


def test_the_disk_s_lines():
    rates = IoRates(1 << 20, 1, 1.5 * GB, 2.25 * GB)
    lines = describe_disk(
        DiskProbe(
            "/kv",
            100 << 30,
            True,
            "no (Invalid argument)",
            0.0012,
            (rates, IoRates(1 << 20, 4, GB, 3 * GB)),
        )
    )
    assert lines == [
        "disk /kv: 100.0 GiB free",
        "  reserves bytes ahead: yes",
        "  bypasses the page cache: no (Invalid argument)",
        "  makes 1 MiB durable in 1.2 ms",
        "  page cache, 1.0 MiB, 1 thread: reads 2.25 GB/s, writes 1.50 GB/s",
        "  page cache, 1.0 MiB, 4 threads: reads 3.00 GB/s, writes 1.00 GB/s",
    ]


def test_the_host_s_lines():
    assert describe_host(HostProbe(8e9, 8 << 20, {2 << 20: 5})) == [
        "host memory: one thread copies 8.00 GB/s",
        "  this process may pin memory: 8.0 MiB",
        "  free huge pages: 5 of 2.0 MiB",
    ]
    assert "without limit" in describe_host(HostProbe(8e9, None))[1]
