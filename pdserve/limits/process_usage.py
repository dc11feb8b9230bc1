"""Reads the memory and CPU time of a process and of the processes that it has started.

From `/proc`, so only on Linux; elsewhere nothing is known. A reading of a few processes takes some
ten microseconds each, and is kept for a moment: probes may come often.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes, Seconds

__all__ = ["ProcessUsage", "UsageReader", "own_memory", "process_state"]

_FRESH: Final[Seconds] = 0.25
_FAMILY_FRESH: Final[Seconds] = 10.0
"""How long the list of descendants is kept: it takes a file for each thread."""
_MOST_FILES: Final = 512
"""Most files that are read for the list of descendants: some milliseconds."""
_MOST_PROCESSES: Final = 64
"""Most processes whose usage is read."""


class ProcessUsage(NamedTuple):
    """Sums over a process and its descendants."""

    memory: Bytes = 0
    """Resident memory; pages that several of them share count for each."""
    cpu: Seconds = 0.0
    """CPU time, that of descendants that have ended included."""


class UsageReader:
    """Reads the usage of one process at a time; another process id begins anew."""

    def __init__(self, time: Callable[[], Seconds], proc: Path = Path("/proc")) -> None:
        self._time = time
        self._proc = proc
        self._pid: int | None = None
        self._family: list[int] = []
        self._family_read: Seconds = 0.0
        self._usage = ProcessUsage()
        self._read: Seconds = 0.0

    def read(self, pid: int | None) -> ProcessUsage:
        """The usage of this process; nothing if there is none."""
        now = self._time()
        if pid is None:
            self._pid = None
            return ProcessUsage()
        if pid != self._pid or now - self._family_read > _FAMILY_FRESH:
            self._family, self._family_read = self._descendants(pid), now
        elif now - self._read < _FRESH:
            return self._usage
        self._pid, self._read = pid, now
        found = [self._one(each) for each in self._family]
        self._usage = ProcessUsage(sum(one.memory for one in found), sum(one.cpu for one in found))
        return self._usage

    def _descendants(self, pid: int) -> list[int]:
        found = [pid]
        files = 0
        for parent in found:
            # The main thread comes first; it is mostly the one that starts processes.
            for thread in self._threads(parent)[: _MOST_FILES - files]:
                files += 1
                found += self._children(parent, thread)
        return found[:_MOST_PROCESSES]

    def _threads(self, pid: int) -> list[int]:
        try:
            return sorted(map(int, os.listdir(self._proc / str(pid) / "task")))
        except OSError:
            return []

    def _children(self, pid: int, thread: int) -> list[int]:
        """What a thread has started. Kernels without this file tell nothing."""
        path = self._proc / str(pid) / "task" / str(thread) / "children"
        try:
            return [int(each) for each in path.read_text().split()]
        except OSError:  # the thread has ended
            return []

    def _one(self, pid: int) -> ProcessUsage:
        try:
            memory = (self._proc / str(pid) / "statm").read_bytes()
            stat = (self._proc / str(pid) / "stat").read_bytes()
        except OSError:  # it has ended
            return ProcessUsage()
        # The name of the program, in parentheses, may contain anything.
        fields = stat.rpartition(b")")[2].split()
        ticks = sum(int(each) for each in fields[11:15])  # own and waited-for, user and system
        return ProcessUsage(
            int(memory.split()[1]) * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK")
        )


def process_state(pid: int, proc: Path = Path("/proc")) -> str:
    """`running`, which includes sleep; `stopped`, by a signal or a debugger; or `ended`. Empty
    where the system does not tell."""
    if not (proc / "self").exists():
        return ""
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
    except OSError:
        return "ended"
    letter = stat.rpartition(b")")[2].split()[0]
    return {b"T": "stopped", b"t": "stopped", b"Z": "ended", b"X": "ended"}.get(letter, "running")


def own_memory() -> Bytes:
    """Resident memory of this process in bytes; its peak where the system reports nothing else."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
