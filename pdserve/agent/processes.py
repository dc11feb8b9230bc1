"""Starts, finds, signals and watches worker processes of this host.

A process is named by its id and its start time, because ids are used again. Each worker leads a
session of its own: it gets no signal of the agent's terminal and outlives the agent. It knows no
records and no slots.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

__all__ = ["Processes", "Started", "SystemProcesses"]


@dataclass(frozen=True, slots=True)
class Started:
    """One process for ever."""

    pid: int
    begun: int
    """When it started, in clock ticks since the machine did (field 22 of /proc/PID/stat)."""


class Processes(Protocol):
    """What an agent needs of its host; a fake stands for it in tests."""

    def boot_id(self) -> str:
        """Names this run of the machine: processes of another one are gone."""
        ...

    def launch(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Started:
        """Starts a process with its output appended to `log`. Errors: `OSError`."""
        ...

    def find(self, argument: str) -> Started | None:
        """The session leader with this word on its command line, if there is one."""
        ...

    def runs(self, process: Started) -> bool: ...

    def status(self, process: Started) -> int | None:
        """Exit status of a process that this agent started and that has ended, negative for a
        signal; told once. None: not known, also of one that an earlier agent started."""
        ...

    def terminate(self, process: Started) -> None:
        """Asks a worker to drain and end (SIGTERM)."""
        ...

    def kill(self, process: Started) -> None:
        """Ends a worker and its children (SIGKILL)."""
        ...

    def left_running(self, ended: Collection[Started]) -> set[Started]:
        """Those of these ended workers of whose session processes still run, such as the engine.
        One call looks once at all processes of the host, however many workers have ended."""
        ...


class SystemProcesses:
    """Processes by /proc."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._own: dict[int, subprocess.Popen[bytes]] = {}

    def boot_id(self) -> str:
        return (self._proc / "sys/kernel/random/boot_id").read_text().strip()

    def launch(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Started:
        # The worker writes to the file itself: a pipe would break with the agent.
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            os.close(output)
        self._own[process.pid] = process
        stat = self._stat(process.pid)
        # It may have ended already; it stays a zombie until `status` reaps it.
        return Started(process.pid, 0 if stat is None else stat.begun)

    def find(self, argument: str) -> Started | None:
        wanted = argument.encode()
        for path in self._proc.glob("[0-9]*"):
            with suppress(OSError):
                if wanted not in (path / "cmdline").read_bytes().split(b"\0"):
                    continue
                pid = int(path.name)
                stat = self._stat(pid)
                if stat is not None and stat.session == pid and stat.alive:
                    return Started(pid, stat.begun)
        return None

    def runs(self, process: Started) -> bool:
        own = self._own.get(process.pid)
        if own is not None:
            return own.poll() is None
        stat = self._stat(process.pid)
        return stat is not None and stat.begun == process.begun and stat.alive

    def status(self, process: Started) -> int | None:
        own = self._own.get(process.pid)
        status = None if own is None else own.poll()
        if status is not None:
            del self._own[process.pid]
        return status

    def terminate(self, process: Started) -> None:
        if self.runs(process):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)

    def kill(self, process: Started) -> None:
        if self.runs(process) or self.left_running([process]):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def left_running(self, ended: Collection[Started]) -> set[Started]:
        # While a session has members, no new process gets the session's id as its own.
        leaders = {one.pid: one for one in ended if one.pid > 0}
        found: set[Started] = set()
        for path in self._proc.glob("[0-9]*") if leaders else ():
            stat = self._stat(int(path.name))
            if stat is None or not stat.alive:
                continue
            leader = leaders.get(stat.session)
            if leader is not None and stat.begun >= leader.begun:
                found.add(leader)
        return found

    def _stat(self, pid: int) -> _Stat | None:
        if pid <= 0:  # threads of the kernel have session 0, and signals to 0 reach the agent
            return None
        try:
            text = (self._proc / str(pid) / "stat").read_text(errors="replace")
        except OSError:
            return None
        return read_stat(text)


@dataclass(frozen=True, slots=True)
class _Stat:
    session: int
    begun: int
    alive: bool


def read_stat(text: str) -> _Stat | None:
    """Reads /proc/PID/stat. The name may hold spaces and brackets; what follows the last bracket is
    numbers (proc(5))."""
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return _Stat(int(fields[3]), int(fields[19]), fields[0] not in ("Z", "X"))
