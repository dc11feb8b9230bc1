"""What a worker's tiers come to on a machine, and what is refused there."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.kv.tiers.disk.directory import OwnDirectory, take_directory
from pdserve.launch import kv_tiers
from pdserve.launch.kv_tiers import (
    DiskRoom,
    NewDirectory,
    describe_tiers,
    measure_disk,
    plan_tiers,
)
from pdserve.limits.memory import MemoryBound
from pdserve.messages.tiers import TierSpec
from pdserve.worker.config import DiskKv, WorkerConfig
from tests.support.disk_tiers import FINGERPRINT

GIB = 1 << 30
MEMORY = MemoryBound("the machine", 32 * GIB, 20 * GIB)
ROOM = DiskRoom(free=100 * GIB)


def planned(**settings: Any) -> TierSpec:
    config = dataclasses.replace(WorkerConfig(), **settings)
    spec = plan_tiers(config, "w", MEMORY, ROOM)
    assert spec is not None
    return spec


def test_without_tiers_only_fetching_is_said() -> None:
    spec = planned(kv_fetch="never")
    assert spec == TierSpec(disk_owner="w", fetch="never")
    assert describe_tiers(spec) == ""


def test_engines_without_tiers_and_workers_without_a_prefix_cache_get_none() -> None:
    for config in (WorkerConfig(engine="instant"), WorkerConfig(prefix_cache=False)):
        assert plan_tiers(config, "w", MEMORY, ROOM) is None
    assert describe_tiers(None) == ""


def test_every_setting_arrives() -> None:
    spec = planned(
        host_kv=8 * GIB,
        disk_kv=DiskKv("/nowhere/kv", 50 * GIB),
        host_kv_admission="all",
        disk_kv_admission="reused",
        disk_kv_write_budget=7 * GIB,
        kv_turn_bonus=9.0,
        kv_fetch="always",
    )
    assert spec == TierSpec(
        host_bytes=8 * GIB,
        disk_path="/nowhere/kv",
        disk_bytes=50 * GIB,
        disk_write_budget=7 * GIB,
        disk_owner="w",
        host_admission="all",
        disk_admission="reused",
        fetch="always",
        turn_bonus=9.0,
    )
    assert describe_tiers(spec) == "8.0 GiB of host memory and 50.0 GiB of disk in /nowhere/kv"


def test_the_workers_of_one_process_share_what_is_named() -> None:
    spec = planned(
        host_kv=8 * GIB,
        disk_kv=DiskKv("/kv", 50 * GIB),
        disk_kv_write_budget=10 * GIB,
        kv_share=0.5,
    )
    assert (spec.host_bytes, spec.disk_bytes, spec.disk_write_budget) == (
        4 * GIB,
        25 * GIB,
        5 * GIB,
    )


def test_a_share_of_a_size_is_never_nothing() -> None:
    """0 would mean: no tier."""
    assert planned(host_kv=1, kv_share=0.5).host_bytes == 1


def test_auto_leaves_more_where_the_device_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(host_kv=None, device="cuda:1").host_bytes == int(20 * GIB * 0.6)
    assert planned(host_kv=None, device="cpu").host_bytes == int(20 * GIB * 0.4)
    monkeypatch.setattr(kv_tiers, "_GPU_FILES", ("/no/such/file",))
    assert planned(host_kv=None).host_bytes == int(20 * GIB * 0.4)
    monkeypatch.setattr(kv_tiers, "_GPU_FILES", ("/dev/null",))
    assert planned(host_kv=None).host_bytes == int(20 * GIB * 0.6)


def test_more_memory_than_is_free_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigError) as caught:
        planned(host_kv=64 * GIB)
    assert caught.value.message == (
        "--host-kv of 64.0 GiB is more than the 20.0 GiB that are free (the machine): lower it, "
        "or write --host-kv auto"
    )
    assert planned(host_kv=64 * GIB, engine="sim").host_bytes == 64 * GIB, "it has no bytes"


def test_auto_needs_some_memory() -> None:
    full = MemoryBound("memory.max of control group /x", GIB, 10 << 20)
    with pytest.raises(ConfigError, match=r"only 10\.0 MiB are free \(memory\.max of"):
        plan_tiers(WorkerConfig(host_kv=None), "w", full)


def test_a_disk_larger_than_its_room_is_refused_with_what_would_fit() -> None:
    disk = DiskKv("/kv", 30 * GIB)
    with pytest.raises(ConfigError) as caught:
        plan_tiers(WorkerConfig(disk_kv=disk), "w", MEMORY, DiskRoom(18 * GIB, 2 * GIB))
    assert caught.value.message == (
        "--disk-kv of 30.0 GiB is more than the 18.0 GiB that are free in /kv and the 2.0 GiB that "
        "KV takes already: make room, or write /kv:20480MiB at most"
    )
    assert plan_tiers(WorkerConfig(disk_kv=disk), "w", MEMORY, DiskRoom(18 * GIB, 12 * GIB))


def taken_by(root: Path, owner: str, capacity: int, used: int) -> OwnDirectory:
    """Another worker has a part of the directory."""
    found = take_directory(root, owner, FINGERPRINT, 1.0, capacity)
    (found.path / "seg-000001-00000000").write_bytes(b"x" * used)
    return found


def test_what_another_worker_may_still_write_is_not_free(tmp_path: Path) -> None:
    """Also if both have the name of their machine."""
    mib = 1 << 20
    other = taken_by(tmp_path, "w", 8 * mib, 2 * mib)
    room = measure_disk(DiskKv(str(tmp_path), mib))
    assert (room.taken, room.in_use >= 2 * mib) == (0, True)
    assert 5 * mib < room.promised <= 6 * mib
    disk, room = DiskKv(str(tmp_path), 5 * mib), dataclasses.replace(room, free=10 * mib)
    with pytest.raises(ConfigError, match=r"less the 6\.0 MiB that other workers with this dir"):
        plan_tiers(WorkerConfig(disk_kv=disk), "w", MEMORY, room)
    assert plan_tiers(WorkerConfig(disk_kv=DiskKv(str(tmp_path), 4 * mib)), "w", MEMORY, room)
    other.unlock()
    room = measure_disk(DiskKv(str(tmp_path), mib))
    assert room.promised == 0
    assert room.taken >= 2 * mib


@pytest.mark.parametrize("owner", ["w-prefill", "w-decode"])
def test_a_start_waits_for_the_workers_of_a_process_that_is_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    """After kill -9 the system frees their memory before their locks. They need not have the name
    of the one that starts."""
    mib = 1 << 20
    last = taken_by(tmp_path, "w-decode", 8 * mib, 2 * mib)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 20:
            last.unlock()

    monkeypatch.setattr(kv_tiers, "_free", lambda path: 10 * mib)
    monkeypatch.setattr(time, "sleep", sleep)
    config = WorkerConfig(disk_kv=DiskKv(str(tmp_path), 11 * mib))
    assert plan_tiers(config, owner, MEMORY)
    assert len(waits) == 20


@pytest.mark.parametrize(("mib", "waits"), [(3, False), (9, True), (30, False)])
def test_a_start_waits_only_for_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mib: int, waits: bool
) -> None:
    """What fits begins at once, and what would not fit in any case is refused at once."""
    other = taken_by(tmp_path, "w", 8 << 20, 2 << 20)
    slept: list[float] = []
    monkeypatch.setattr(kv_tiers, "_free", lambda path: 10 << 20)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(time, "sleep", slept.append)
    config = WorkerConfig(disk_kv=DiskKv(str(tmp_path), mib << 20))
    if mib == 3:
        assert plan_tiers(config, "w", MEMORY)
    else:
        with pytest.raises(ConfigError, match="may still write"):
            plan_tiers(config, "w", MEMORY)
    assert bool(slept) is waits
    other.unlock()


def test_a_disk_that_others_fill_has_no_size_that_fits() -> None:
    disk = DiskKv("/kv", GIB)
    with pytest.raises(ConfigError) as caught:
        plan_tiers(WorkerConfig(disk_kv=disk), "w", MEMORY, DiskRoom(GIB, promised=3 * GIB))
    assert caught.value.message.endswith("may still write: make room")


def test_a_start_that_is_refused_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiers, "_free", lambda path: 0)
    for name, stays in (("new", False), ("mine", True)):
        path = tmp_path / name
        if stays:
            path.mkdir()
        with pytest.raises(ConfigError, match="make room"):
            plan_tiers(WorkerConfig(disk_kv=DiskKv(str(path), GIB)), "w", MEMORY)
        assert path.exists() is stays


def test_a_new_directory_with_something_in_it_stays(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    new = NewDirectory(DiskKv(str(path), GIB))
    path.mkdir()
    (path / "file").touch()
    new.discard()
    assert path.exists()
    (path / "file").unlink()
    new.discard()
    assert not path.exists()
    NewDirectory(None).discard()


def test_a_directory_is_made_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    room = measure_disk(DiskKv(str(path), GIB))
    assert room.free > 0
    assert room.taken == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not list(path.iterdir()), "the probe leaves nothing"


def test_only_kv_makes_room_when_it_is_replaced(tmp_path: Path) -> None:
    for folder, size in (("photos", 3 << 20), ("tier-01234567-89abcdef", 1 << 20)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "seg-000001-00000000").write_bytes(b"x" * size)
    assert 1 << 20 <= measure_disk(DiskKv(str(tmp_path), GIB)).taken < 3 << 20


def test_a_directory_that_cannot_be_used_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    for path, says in (
        (tmp_path / "absent" / "kv", f"there is no directory {tmp_path}/absent; make it, or mount"),
        (file, "is a file; name a directory"),
        (file / "kv", "is a file; name a directory"),
        (Path("/proc"), "/proc cannot be written: "),
        (Path("/proc/kv"), "/proc/kv cannot be written: "),
        (tmp_path / "dangling", f"{tmp_path}/dangling is a link to what is no directory; make"),
    ):
        with pytest.raises(ConfigError, match=r"^--disk-kv: ") as caught:
            measure_disk(DiskKv(str(path), GIB))
        assert says in caught.value.message


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_has_the_room_that_its_kv_takes(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> None:
        raise OSError(code, os.strerror(code))

    (tmp_path / "tier-01234567-89abcdef").mkdir()
    (tmp_path / "tier-01234567-89abcdef" / "seg-000001-00000000").write_bytes(b"x" * (8 << 20))
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    room = measure_disk(DiskKv(str(tmp_path), 8 << 20))
    assert room.free == 0
    config = WorkerConfig(disk_kv=DiskKv(str(tmp_path), 9 << 20))
    with pytest.raises(ConfigError, match=r"more than the 0 B that are free in .*: make room"):
        plan_tiers(config, "w", MEMORY, room)
    assert plan_tiers(WorkerConfig(disk_kv=DiskKv(str(tmp_path), 8 << 20)), "w", MEMORY, room)
