"""Reads how much memory this process may use: the machine's, control groups', Slurm's and ulimit's.

It computes what each limit has left; callers decide what to do with it. File cache that the kernel
can drop counts as free, as in the machine's own `MemAvailable`.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.limits.cgroups import groups, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdserve.ids import Bytes
    from pdserve.limits.cgroups import Cgroup

__all__ = ["MemoryBound", "available", "oom_kills", "read_bounds"]

_NO_LIMIT = 1 << 60
"""Version 1 writes the largest multiple of a page for "no limit"."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """One memory limit of this process."""

    name: str
    """Its name as operators know it."""
    limit: Bytes
    free: Bytes
    """Bytes left of it; never negative."""


def read_bounds(
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    address_space: Bytes | None = None,
) -> list[MemoryBound]:
    """All limits on this process, the machine's own memory first. In tests `root` replaces `/`, and
    `address_space` RLIMIT_AS.
    """
    own = _table(root / "proc/self/status", unit=1024)
    found = [_machine(root)]
    found += [bound for group in groups("memory", root) for bound in _of_group(group)]
    found += _slurm(environ, own.get("RssAnon", 0) + own.get("RssShmem", 0))
    if address_space is None:
        address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        found.append(_bound("RLIMIT_AS (ulimit -v)", address_space, own.get("VmSize", 0)))
    return found


def available(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> MemoryBound:
    """The limit that leaves the least memory."""
    return min(read_bounds(environ, root), key=lambda bound: bound.free)


def oom_kills(root: Path = Path("/")) -> int:
    """Number of processes that the kernel killed for lack of memory, in this process's control
    group if there is one, else on the machine. Only its growth is meaningful.
    """
    for group in groups("memory", root):
        file = "memory.events" if group.version == 2 else "memory.oom_control"
        count = _table(group.folder / file).get("oom_kill")
        if count is not None:
            return count
    return _table(root / "proc/vmstat").get("oom_kill", 0)


def _bound(name: str, limit: Bytes, used: Bytes) -> MemoryBound:
    return MemoryBound(name, limit, max(0, limit - used))


def _machine(root: Path) -> MemoryBound:
    memory = _table(root / "proc/meminfo", unit=1024)
    total = memory.get("MemTotal") or _physical()
    return MemoryBound("the machine", total, memory.get("MemAvailable", total))


def _physical() -> Bytes:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _of_group(group: Cgroup) -> Iterator[MemoryBound]:
    """The bounds of one group. `memory.high` counts as a limit: above it the group is throttled
    until it hardly runs.
    """
    files, used = (("memory.max", "memory.high"), "memory.current")
    if group.version == 1:
        files, used = ("memory.limit_in_bytes", ""), "memory.usage_in_bytes"
    for file in filter(None, files):
        limit = _number(group.folder / file)
        if limit is not None and limit < _NO_LIMIT:
            taken = (_number(group.folder / used) or 0) - _droppable(group)
            yield _bound(f"{file} of control group {group.name}", limit, max(0, taken))


def _droppable(group: Cgroup) -> Bytes:
    """Bytes of file cache that can be dropped at the cost of a read. Shared memory is not
    included.
    """
    stat, prefix = _table(group.folder / "memory.stat"), "total_" if group.version == 1 else ""
    dirty = ("dirty", "writeback") if group.version == 1 else ("file_dirty", "file_writeback")
    cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return max(0, cache - sum(stat.get(f"{prefix}{name}", 0) for name in dirty))


def _slurm(environ: Mapping[str, str], used: Bytes) -> Iterator[MemoryBound]:
    """Slurm's limits, which it may enforce without a control group. Use by the job's other
    processes is unknown here.
    """
    node = _count(environ, "SLURM_MEM_PER_NODE")
    if node:
        yield _bound("SLURM_MEM_PER_NODE", node * _MIB, used)
    per_cpu, cpus = _count(environ, "SLURM_MEM_PER_CPU"), _count(environ, "SLURM_CPUS_ON_NODE")
    if per_cpu and cpus:
        yield _bound("SLURM_MEM_PER_CPU", per_cpu * cpus * _MIB, used)


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _number(path: Path) -> int | None:
    text = read(path) or ""
    return int(text) if text.isdecimal() else None


def _table(path: Path, unit: int = 1) -> dict[str, int]:
    """Parses lines of a name and a number; other lines are skipped."""
    found: dict[str, int] = {}
    for line in (read(path) or "").splitlines():
        name, *rest = line.replace(":", " ").split()
        if rest and rest[0].isdecimal():
            found[name] = int(rest[0]) * unit
    return found
