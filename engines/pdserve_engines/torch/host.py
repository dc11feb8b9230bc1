"""What the machine grants this process: processors and memory. Facts only, no decisions.

The launcher normally decides about threads, by more evidence than this; the count here serves an
executor that was told nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_cpus() -> int:
    """Processors in this process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Bytes that can be taken without swapping: the machine's, or what the cgroup leaves."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
