"""Settles a worker's KV tiers for this machine: sizes in bytes, a directory that can be written.

The worker role calls it before its engine starts, so that settings that cannot work end the start
with a remedy. It does not know how tiers work. The engine process still checks what it allocates.
"""

from __future__ import annotations

import errno as codes
import math
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError
from pdserve.kv.tiers.disk.directory import (
    disk_usage,
    is_locked,
    read_description,
    subdirectories,
)
from pdserve.limits.memory import available
from pdserve.limits.sizes import approximate_size
from pdserve.messages.kv_events import TIERS
from pdserve.messages.tiers import TierSpec
from pdserve.worker.config import WITHOUT_TIERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.ids import Bytes, Seconds
    from pdserve.limits.memory import MemoryBound
    from pdserve.messages.engine import EngineCapabilities
    from pdserve.messages.tiers import TierStats
    from pdserve.worker.config import DiskKv, WorkerConfig

__all__ = [
    "DiskRoom",
    "NewDirectory",
    "describe_tiers",
    "measure_disk",
    "missing_tiers",
    "plan_tiers",
    "tier_trouble",
]

_AUTO_SHARE: Final = 0.6
"""Share of the free host memory for `--host-kv auto`."""
_AUTO_SHARE_ON_HOST: Final = 0.4
"""The same where the device's own blocks and the weights take host memory, too: without
--kv-memory, blocks take a quarter of what is free."""
_AUTO_LEAST: Final[Bytes] = 64 << 20
"""Below this size a host tier is not worth its bookkeeping."""
_FULL: Final = (codes.ENOSPC, codes.EDQUOT)
_PATIENCE: Final[Seconds] = 5.0
"""How long a start waits for room that workers have whose processes may just be ending: the system
frees their memory before their locks."""
_MOMENT: Final[Seconds] = 0.1
_GPU_FILES: Final = ("/dev/nvidiactl", "/dev/kfd")


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """What a directory offers."""

    free: Bytes
    """Bytes that this process may still write on its file system."""
    taken: Bytes = 0
    """Bytes that KV in the directory takes already: an earlier run's is replaced."""
    promised: Bytes = 0
    """Bytes that other workers, which have their part of the directory now, may still write."""
    in_use: Bytes = 0
    """Bytes that the KV of those workers takes."""

    @property
    def most(self) -> Bytes:
        """The largest tier that fits."""
        return max(0, self.free + self.taken - self.promised)

    @property
    def alone(self) -> Bytes:
        """The largest tier that would fit if no other worker ran."""
        return self.free + self.taken + self.in_use


class NewDirectory:
    """The directory of a disk tier, if it was not there before this start."""

    def __init__(self, disk: DiskKv | None) -> None:
        self._path = None if disk is None or os.path.lexists(disk.path) else Path(disk.path)

    def discard(self) -> None:
        """The start has failed: remove the directory if it is new and empty."""
        if self._path is not None:
            with suppress(OSError):
                self._path.rmdir()


def plan_tiers(
    config: WorkerConfig,
    owner: str,
    memory: MemoryBound | None = None,
    disk: DiskRoom | None = None,
) -> TierSpec | None:
    """The settings for one engine core, which has its share of what the workers of this process
    take together; None: the engine has no tiers.

    Args: `owner` names the worker on its disk. `memory` and `disk` None: they are measured if they
    are needed.

    Errors: `ConfigError` names the setting, the size that is there and a remedy.
    """
    if config.engine in WITHOUT_TIERS or not config.prefix_cache:
        return None
    host = _host_bytes(config, memory)
    if config.disk_kv is not None:
        new = NewDirectory(config.disk_kv)
        try:
            disk = _measure_patiently(config.disk_kv) if disk is None else disk
            _check_disk(config.disk_kv, disk)
        except ConfigError:
            new.discard()
            raise
    share = config.kv_share
    return TierSpec(
        host_bytes=math.ceil(host * share),
        disk_path="" if config.disk_kv is None else str(Path(config.disk_kv.path).resolve()),
        disk_bytes=0 if config.disk_kv is None else int(config.disk_kv.size * share),
        disk_write_budget=int(config.disk_kv_write_budget * share),
        disk_owner=owner,
        host_admission=config.host_kv_admission,
        disk_admission=config.disk_kv_admission,
        fetch=config.kv_fetch,
        turn_bonus=config.kv_turn_bonus,
    )


def describe_tiers(spec: TierSpec | None) -> str:
    """The tiers below the device for the log; empty: there are none."""
    if spec is None:
        return ""
    found = []
    if spec.host_bytes:
        found.append(f"{approximate_size(spec.host_bytes)} of host memory")
    if spec.disk_path:
        found.append(f"{approximate_size(spec.disk_bytes)} of disk in {spec.disk_path}")
    return " and ".join(found)


def missing_tiers(config: WorkerConfig, capabilities: EngineCapabilities) -> str:
    """Says which tiers are asked for and not there, with what it means; empty: none."""
    if config.tiers is None:
        return ""
    asked = {"host": config.host_kv != 0, "disk": config.disk_kv is not None}
    missing = [tier for tier, yes in asked.items() if yes and tier not in capabilities.tiers]
    if not missing:
        return ""
    flags = " and ".join(f"--{tier}-kv" for tier in missing)
    return (
        f"{flags}: engine {capabilities.engine} does not have this tier; KV that it evicts is lost"
    )


def tier_trouble(tiers: Iterable[TierStats]) -> str:
    """What is wrong with the tiers, in one line; empty: nothing."""
    return "; ".join(f"{TIERS[one.tier]}: {one.trouble}" for one in tiers if one.trouble)


def _measure_patiently(disk: DiskKv) -> DiskRoom:
    """As `measure_disk`, again and again while the tier would fit without other workers."""
    until = time.monotonic() + _PATIENCE
    room = measure_disk(disk)
    while room.most < disk.size <= room.alone and time.monotonic() < until:
        time.sleep(_MOMENT)
        room = measure_disk(disk)
    return room


def measure_disk(disk: DiskKv) -> DiskRoom:
    """Makes the directory if only its last part is missing, writes a file there, and reads what
    is free.

    Errors: `ConfigError` if the directory cannot be used.
    """
    path = Path(disk.path)
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(_cannot_be_made(path, error)) from None
    try:
        free = _free(path)
    except OSError as error:
        raise ConfigError(_unwritable(path, error)) from None
    return _room(path, free)


def _free(path: Path) -> Bytes:
    """Bytes that may still be written there; 0 where the disk or a quota is full, which KV of an
    earlier run may have done. Errors: OSError if it cannot be written at all."""
    try:
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"pdserve")
            probe.flush()
    except OSError as error:
        if error.errno in _FULL:
            return 0
        raise
    system = os.statvfs(path)
    return system.f_bavail * system.f_frsize


def _cannot_be_made(path: Path, error: OSError) -> str:
    """Why there is no such directory, and a remedy."""
    if path.is_symlink():
        return f"--disk-kv: {path} is a link to what is no directory; make that, or name another"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return f"--disk-kv: {path} is a file; name a directory"
    if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
        missing = f"there is no directory {path.parent}"
        return f"--disk-kv: {missing}; make it, or mount what belongs there"
    return _unwritable(path, error)


def _unwritable(path: Path, error: OSError) -> str:
    return (
        f"--disk-kv: {path} cannot be written: {error.strerror}; give this user write access, or "
        "name another directory"
    )


def _room(path: Path, free: Bytes) -> DiskRoom:
    """What workers' KV below this directory takes on the disk and may still take; other files
    stay."""
    taken = promised = in_use = 0
    for folder in subdirectories(path):
        used, of = disk_usage(folder), read_description(folder)
        if of is not None and is_locked(folder):
            promised += max(0, of.capacity - used)
            in_use += used
        else:
            taken += used
    return DiskRoom(free, taken, promised, in_use)


def _check_disk(disk: DiskKv, room: DiskRoom) -> None:
    if disk.size > room.most:
        mib = room.most >> 20
        taken = f" and the {approximate_size(room.taken)} that KV takes already" * bool(room.taken)
        promised = ""
        if room.promised:
            size = approximate_size(room.promised)
            promised = f", less the {size} that other workers with this directory may still write"
        remedy = f", or write {disk.path}:{mib}MiB at most" * bool(mib)
        raise ConfigError(
            f"--disk-kv of {approximate_size(disk.size)} is more than the "
            f"{approximate_size(room.free)} that are free in {disk.path}{taken}{promised}: make "
            f"room{remedy}"
        )


def _host_bytes(config: WorkerConfig, memory: MemoryBound | None) -> Bytes:
    """Bytes of the host tier of all workers of this process."""
    if config.host_kv == 0:
        return 0
    if memory is None:
        memory = available()
    if config.host_kv is None:
        share = _AUTO_SHARE_ON_HOST if _computes_on_host(config) else _AUTO_SHARE
        size = int(memory.free * share)
        if size >= _AUTO_LEAST:
            return size
        raise ConfigError(
            f"--host-kv auto: only {approximate_size(memory.free)} are free ({memory.name}); free "
            "some memory, or leave --host-kv out"
        )
    if config.host_kv > memory.free and config.engine != "sim":
        raise ConfigError(
            f"--host-kv of {approximate_size(config.host_kv)} is more than the "
            f"{approximate_size(memory.free)} that are free ({memory.name}): lower it, or write "
            "--host-kv auto"
        )
    return config.host_kv


def _computes_on_host(config: WorkerConfig) -> bool:
    if config.device != "auto":
        return config.device == "cpu"
    return not any(map(os.path.exists, _GPU_FILES))
